"""The runner around training: what it does for runs that need none."""

import pytest

from rungwise.analysis.source import load_run_mlflow
from rungwise.ladder.family import load_family
from rungwise.ladder.home import resolve_tracking, run_folder
from rungwise.ladder.launching.run import Budget, bytes_of, run_ladder
from rungwise.ladder.recording.tracking import MIRRORED_FILE, is_mirrored


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


def test_budget_runs_side_by_side_what_its_cores_and_memory_hold():
    small, *_, large = load_family("tiny").rung_runs
    assert Budget(cores=2).has_room(small, [large])
    assert not Budget(cores=1).has_room(small, [large])
    assert Budget(cores=1).has_room(large, []), "one alone always has its cores"
    both = bytes_of(small) + bytes_of(large)
    assert Budget(cores=8, memory=both).has_room(small, [large])
    assert not Budget(cores=8, memory=both - 1).has_room(small, [large])


def test_budget_too_small_for_a_run_is_refused_with_its_need():
    large = load_family("tiny").rung_runs[-1]
    Budget(memory=bytes_of(large)).check(large)
    with pytest.raises(ValueError, match=r"--memory 1GB: run d80-seed1 alone needs about [12]\.\d+ GB"):
        Budget(memory=10**9).check(large)
