"""The runner around training: what it does for runs that need none."""

from rungwise.analysis.source import load_run_mlflow
from rungwise.ladder.home import resolve_tracking, run_folder
from rungwise.ladder.run import run_ladder
from rungwise.ladder.tracking import MIRRORED_FILE, is_mirrored


def test_run_completes_the_copy_of_a_finished_run(rungs_home, capsys):
    folder, uri = run_folder(rungs_home, "tiny", "d32"), resolve_tracking(rungs_home)
    (folder / MIRRORED_FILE).unlink()
    run_ladder("tiny", home=rungs_home)
    assert capsys.readouterr().err == "d32: copying to MLflow what it lacks\n"
    assert load_run_mlflow(uri, "tiny", "d32").state == "finished"
    run_ladder("tiny", home=rungs_home)
    assert capsys.readouterr().err == ""


def test_run_says_once_that_a_store_does_not_answer(rungs_home, capsys):
    run_ladder("tiny", home=rungs_home, tracking="http://127.0.0.1:9")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "'http://127.0.0.1:9' failed" in lines[1]
    assert not is_mirrored(run_folder(rungs_home, "tiny", "d32"), "http://127.0.0.1:9")
