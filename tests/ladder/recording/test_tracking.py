import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rungwise.analysis.reading.store import PointReader, find_attempts, find_experiment, find_forecasts, open_client
from rungwise.analysis.registry import load_registered, load_registered_mlflow
from rungwise.analysis.source import load_run, load_run_mlflow
from rungwise.analysis.vocabulary import TAG_FORECAST_HASH, TAG_MIRRORED_BYTES, TAG_WATCH_STATE
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder, write_json
from rungwise.ladder.recording.journal import Journal, append_event, append_verdict
from rungwise.ladder.recording.tracking import Mirror, is_mirrored, mirror_folder, mirror_forecast


def make_run(home: Path, run: str = "d64", **config) -> Path:
    folder = run_folder(home, "tiny", run)
    folder.mkdir(parents=True)
    document = {
        "family": "tiny",
        "run": run,
        "role": "rung",
        "rung": "d64",
        "seed": 0,
        "config_hash": "c0ffee",
    }
    document |= {
        "corpus_hash": "beef",
        "code_version": "1",
        "plan": {"tokens": 640},
        "config": {"model": {"top_k": 2}},
    }
    write_json(folder / "config.json", document | config)
    return folder


def train(folder: Path, steps, *, restored: int = 0, end: str | None = "finished") -> None:
    with Journal(folder, family="tiny", run=folder.name) as journal:
        journal.start_attempt(restored)
        for step in steps:
            journal.write(step, {"train/loss": 3 - 0.1 * step, "progress/tokens": 64.0 * step})
        if end:
            journal.end(max(steps), end)


def attempts(tracking_uri: str, run: str = "d64"):
    client = open_client(tracking_uri)
    experiment = find_experiment(client, "tiny")
    assert experiment is not None
    return client, find_attempts(client, experiment, f"tiny/{run}")


def losses(tracking_uri: str, run: str = "d64") -> list[list[tuple[int, float]]]:
    client, found = attempts(tracking_uri, run)
    points = [PointReader(client, tracking_uri).read(each) for each in found]
    return [sorted((step, value) for key, step, _, value in each if key == "train/loss") for each in points]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.1)


def test_mirror_tells_everything_about_an_attempt(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    append_event(folder, "context", 3, expected="eval/loss falls")
    train(folder, range(1, 5))
    mirror_folder(folder, uri)
    client, (run,) = attempts(uri)
    tags = {
        name.removeprefix("rungwise."): value for name, value in run.data.tags.items() if name.startswith("rungwise")
    }
    tags.pop("mirrored_bytes")
    tags.pop("mirrored_time")
    assert tags == {
        "lineage": "tiny/d64",
        "attempt": "1",
        "restored_step": "0",
        "family": "tiny",
        "run": "d64",
        "role": "rung",
        "rung": "d64",
        "seed": "0",
        "state": "finished",
        "config_hash": "c0ffee",
        "corpus_hash": "beef",
        "code_version": "1",
        "schema": "1",
    }
    assert (run.info.run_name, run.info.status) == ("d64", "FINISHED")
    assert run.data.params == {"plan.tokens": "640", "model.top_k": "2"}
    assert run.data.metrics["train/loss"] == pytest.approx(2.6)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert sorted(found.path for found in client.list_artifacts(run.info.run_id)) == [
        "config.json",
        "events.jsonl",
    ]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_mirror_keeps_two_long_settings_apart_and_loses_no_neighbour(tracked_home):
    settings = {name: {"schedule": "x" * 6000 + f" lr={name}", "odd (key)": 1, "top_k": 2} for name in ("a", "b")}
    for name, config in settings.items():
        train(make_run(tracked_home, name, config=config), range(1, 3))
        mirror_folder(run_folder(tracked_home, "tiny", name), resolve_tracking(tracked_home))
    first, second = (attempts(resolve_tracking(tracked_home), name)[1][0].data.params for name in settings)
    assert set(first) == {"plan.tokens", "schedule", "odd :0028:key:0029:", "top_k"}
    assert first["schedule"] != second["schedule"]
    assert "see config.json" in first["schedule"]


def test_mirror_resumed_run_is_one_mlflow_run_an_attempt(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    train(folder, range(1, 6), end=None)  # dies without a word
    train(folder, range(4, 8), restored=3, end="failed")
    mirror_folder(folder, uri)
    train(folder, range(6, 10), restored=5)
    mirror_folder(folder, uri)
    runs = attempts(uri)[1]
    assert [run.info.run_name for run in runs] == ["d64", "d64 attempt 2", "d64 attempt 3"]
    assert [run.info.status for run in runs] == ["KILLED", "FAILED", "FINISHED"]
    assert all(run.info.end_time for run in runs)
    assert [[step for step, _ in series] for series in losses(uri)] == [
        [1, 2, 3, 4, 5],
        [4, 5, 6, 7],
        [6, 7, 8, 9],
    ]


def test_mirror_leaves_a_live_run_running_and_a_dead_one_killed(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    with Journal(folder, family="tiny", run="d64") as journal:
        journal.start_attempt(0)
        journal.write(1, {"train/loss": 2.0})
        mirror_folder(folder, uri)
        assert attempts(uri)[1][0].info.status == "RUNNING"
    mirror_folder(folder, uri)
    assert attempts(uri)[1][0].info.status == "KILLED"


def test_mirror_copied_again_holds_each_point_once(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    with Journal(folder, family="tiny", run="d64") as journal:
        journal.start_attempt(0)
        for step, value in enumerate((1.5, math.nan, math.inf, -math.inf, -0.0)):
            journal.write(step, {"train/loss": value, "train/grad_norm": 1.0})
    mirror_folder(folder, uri)
    client, (run,) = attempts(uri)
    points = sorted(PointReader(client, uri).read(run), key=repr)
    client.set_tag(run.info.run_id, TAG_MIRRORED_BYTES, "1")  # as if killed between the batch and its mark
    mirror_folder(folder, uri)
    assert repr(sorted(PointReader(client, uri).read(run), key=repr)) == repr(points)
    assert len(points) == 12  # ten, and the signs of two infinities


def test_mirror_fills_a_second_store_from_the_start(tracked_home):
    folder, other = make_run(tracked_home), f"sqlite:///{tracked_home}/other.db"
    shutil.copy(tracked_home / "mlflow.db", tracked_home / "other.db")
    train(folder, range(1, 5))
    for uri in (resolve_tracking(tracked_home), other):
        mirror_folder(folder, uri)
        assert len(losses(uri)[0]) == 4


def test_mirror_of_a_run_trained_anew_starts_a_new_series(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    train(folder, range(1, 5), end="failed")
    mirror_folder(folder, uri)
    (folder / "metrics.jsonl").unlink()
    train(folder, range(1, 3))
    mirror_folder(folder, uri)
    record = load_run_mlflow(uri, "tiny", "d64")
    assert (record.state, len(record.attempts), record.trajectory.frame["step"].max()) == ("finished", 1, 2)


def test_mirror_of_the_hero_names_its_forecast_and_keeps_it_once(tracked_home, registered_home):
    folder, uri = make_run(tracked_home, "hero", role="hero"), resolve_tracking(tracked_home)
    (file,) = forecasts_folder(registered_home, "tiny").glob("*.json")
    train(folder, range(1, 3))
    for _ in range(2):
        mirror_folder(folder, uri)
        mirror_forecast(file, uri)
    client, (run,) = attempts(uri, "hero")
    (kept,) = find_forecasts(client, run.info.experiment_id)
    assert run.data.tags[TAG_FORECAST_HASH] == kept.data.tags[TAG_FORECAST_HASH] == file.stem
    assert load_registered_mlflow(uri, "tiny") == load_registered(file.parent)


def test_mirror_tags_the_live_attempt_with_what_the_watch_says(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    train(folder, range(1, 3), end="failed")
    mirror_folder(folder, uri)
    for state in ("healthy", "alert"):
        append_verdict(folder, state, 3)
    train(folder, range(3, 5), restored=2)
    mirror_folder(folder, uri)
    assert [run.data.tags.get(TAG_WATCH_STATE) for run in attempts(uri)[1]] == [None, "alert"]


def test_mirror_leaves_word_of_a_whole_copy_and_of_no_other(tracked_home, tmp_path):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    train(folder, range(1, 3), end="failed")
    assert not is_mirrored(folder, uri)
    mirror_folder(folder, uri)
    assert is_mirrored(folder, uri)
    assert not is_mirrored(folder, "http://elsewhere:5000")
    assert not is_mirrored(folder, f"sqlite:///{tmp_path}/removed.db")
    append_event(folder, "note", 2, text="said afterwards")
    assert not is_mirrored(folder, uri)
    mirror_folder(folder, uri)
    train(folder, range(3, 5), restored=2)
    assert not is_mirrored(folder, uri)


def test_mirror_process_follows_and_finishes(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    mirror = Mirror(folder, tracking_uri=uri)
    train(folder, range(1, 40))
    assert mirror.close(120)
    assert attempts(uri)[1][0].info.status == "FINISHED"
    assert losses(uri) == [[(step, 3 - 0.1 * step) for step in range(1, 40)]]


TRAINER = """
import sys, time
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.tracking import Mirror
mirror = Mirror(sys.argv[1], tracking_uri=sys.argv[2])
journal = Journal(sys.argv[1], family="tiny", run="d64")
journal.start_attempt(0)
for step in range(1, 21):
    journal.write(step, {"train/loss": 3 - 0.1 * step})
print("queued", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_mirror_outlives_a_killed_trainer_and_completes_the_copy(tracked_home):
    folder, uri = make_run(tracked_home), resolve_tracking(tracked_home)
    command = [sys.executable, "-P", "-c", TRAINER, folder, uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: (tracked_home / "mlflow.db").exists() and bool(find_experiment(open_client(uri), "tiny")))
    wait_until(lambda: [run.info.status for run in attempts(uri)[1]] == ["KILLED"])
    assert len(losses(uri)[0]) == 20


@pytest.mark.slow
def test_four_runs_meet_at_a_new_store_and_none_fails(home):
    command = [sys.executable, "-P", "-m", "rungwise.ladder.trials.new_store", "--rounds", "2", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    found = json.loads(done.stdout)
    assert (done.returncode, found["faults"], found["processes"]) == (0, [], 4), done.stderr
    for rung in ("d32", "d80"):
        assert len(losses(resolve_tracking(home / "round-2"), rung)[0]) == 100


@pytest.mark.slow
def test_mirror_killed_while_it_makes_the_store_leaves_none_that_is_half_made(home):
    folder, uri = make_run(home), resolve_tracking(home)
    train(folder, range(10))
    script = "import sys; from rungwise.ladder.recording.tracking import mirror_folder; mirror_folder(*sys.argv[1:])"
    child = subprocess.Popen([sys.executable, "-P", "-c", script, folder, uri])
    draft = home / ".mlflow.db.draft"
    wait_until(lambda: draft.exists() and draft.stat().st_size > 0)
    child.kill()
    child.wait()
    assert not (home / "mlflow.db").exists()
    mirror_folder(folder, uri)
    assert len(losses(uri)[0]) == 10
    assert not draft.exists()


@pytest.mark.slow
def test_mirror_survives_an_outage_of_the_server_without_losing_or_doubling_a_point(home, mlflow_server, capfd):
    folder = make_run(home)
    with Journal(folder, family="tiny", run="d64") as journal:
        with mlflow_server() as uri:
            mirror = Mirror(folder, tracking_uri=uri)
            try:
                journal.start_attempt(0)
                for step in range(5):
                    journal.write(step, {"train/loss": 3 - 0.1 * step})
                wait_until(lambda: find_experiment(open_client(uri), "tiny") is not None)
                wait_until(lambda: bool(losses(uri)) and len(losses(uri)[0]) == 5)
            except BaseException:
                mirror.process.kill()
                raise
        for step in range(5, 9):  # the server is down
            journal.write(step, {"train/loss": 3 - 0.1 * step})
        wait_until(lambda: "training goes on" in capfd.readouterr().err)
        with mlflow_server():
            for step in range(9, 12):
                journal.write(step, {"train/loss": math.inf if step == 10 else 3 - 0.1 * step})
            journal.end(11, "finished")
            assert mirror.close(120)
            assert [step for step, _ in losses(uri)[0]] == list(range(12))
            here, there = load_run(folder), load_run_mlflow(uri, "tiny", "d64")
            assert there.trajectory.frame.equals(here.trajectory.frame)
            assert there.attempts == here.attempts
    mirror = Mirror(folder, tracking_uri=uri)  # down again: leaving is bounded
    assert not mirror.close(3)
    mirror.process.kill()
    mirror.process.wait()
