"""A run's state as its journal tells it."""

import os

from rungwise.ladder.launching.status import STALE_AFTER, run_status
from rungwise.ladder.recording.journal import Journal

VALUES = {"train/loss": 3.0, "perf/tokens_per_second": 500.0}


def journal(folder, **keywords):
    return Journal(folder, family="tiny", run=folder.name, **keywords)


def test_status_of_nothing_is_not_started(tmp_path):
    status = run_status(tmp_path / "d32", steps=10)
    assert (status["state"], status["step"], status["loss"], status["attempts"]) == (
        "not started",
        0,
        None,
        0,
    )


def test_status_open_journal_is_running_with_its_pace(tmp_path):
    with journal(tmp_path / "d32") as open_journal:
        open_journal.start_attempt(0)
        for step in (1, 2, 3):
            open_journal.write(step, VALUES)
        status = run_status(tmp_path / "d32", steps=10)
        open_journal.end(3, "finished")
    assert (status["state"], status["step"], status["tokens_per_second"]) == ("running", 3, 500.0)
    assert 0 < status["seconds_left"] < 60


def test_status_without_a_writer_is_stale(tmp_path):
    dead = journal(tmp_path / "d32")
    dead.start_attempt(0)
    dead.write(1, VALUES)
    dead.close()
    status = run_status(tmp_path / "d32", steps=10)
    assert status["state"] == "stale"
    assert "resume" in status["reason"]
    assert status["seconds_left"] is None


def test_status_on_another_machine_is_running_until_it_is_silent(tmp_path):
    away = journal(tmp_path / "d32")
    away.start_attempt(0, host="elsewhere")
    away.write(1, VALUES)
    away.close()
    written = os.stat(tmp_path / "d32" / "metrics.jsonl").st_mtime
    assert run_status(tmp_path / "d32", now=written + STALE_AFTER / 2)["state"] == "running"
    assert run_status(tmp_path / "d32", now=written + STALE_AFTER * 2)["state"] == "stale"


def test_status_failed_run_gives_its_reason_and_a_later_attempt_counts(tmp_path):
    with journal(tmp_path / "d32") as first:
        first.start_attempt(0)
        first.end(4, "failed", "the disk is full")
    failed = run_status(tmp_path / "d32", steps=10)
    assert (failed["state"], failed["reason"]) == ("failed", "the disk is full")
    with journal(tmp_path / "d32") as second:
        second.start_attempt(4)
        second.write(10, VALUES)
        second.end(10, "finished")
    done = run_status(tmp_path / "d32", steps=10)
    assert (done["state"], done["attempts"], done["step"]) == ("done", 2, 10)


def test_status_non_finite_loss_is_said_as_such(tmp_path):
    with journal(tmp_path / "d32") as broken:
        broken.start_attempt(0)
        broken.write(1, {"train/loss": float("inf")})
        broken.end(1, "finished")
    assert run_status(tmp_path / "d32")["loss"] == float("inf")
