"""A disk that takes nothing for a while: a real one, through the limit on the size of a file."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.reading.records import read_records
from rungwise.ladder.home import run_folder
from rungwise.ladder.recording.checkpoint import CheckpointFailed, Checkpoints
from rungwise.ladder.recording.journal import Journal


@contextlib.contextmanager
def _full_beyond(size: int) -> Iterator[None]:
    """No file of this process may grow past `size` bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_full_disk_costs_the_journal_no_record_and_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with Journal(tmp_path, family="tiny", run="d32") as journal:
        journal.start_attempt(0)
        journal.write(1, {"train/loss": 3.0})
        path = tmp_path / "metrics.jsonl"
        with _full_beyond(path.stat().st_size + 50):  # the next record fits in part
            for step in range(2, 50):
                journal.write(step, {"train/loss": 3.0 - step / 100})
        journal.write(50, {"train/loss": 2.5})
        journal.end(50, "finished")
    records = [record for record in read_records(path).records if record["kind"] == "metrics"]
    assert [record["step"] for record in records] == list(range(1, 51))
    assert [record["values"]["train/loss"] for record in records[1:49]] == [3.0 - step / 100 for step in range(2, 50)]
    assert not read_records(path).corrupt
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "journal cannot be written" in said[0]
    assert "written again" in said[1]
    alerts = [record for record in read_records(tmp_path / "alerts.jsonl").records if record["kind"] == "alert"]
    assert [(alert["rule"], alert["state"], alert["updated"]) for alert in alerts] == [
        ("storage_journal", "open", 2),
        ("storage_journal", "resolved", 50),
    ]


def test_a_journal_that_could_not_be_completed_says_so_at_its_end(tmp_path: Path):
    journal = Journal(tmp_path, family="tiny", run="d32")
    journal.start_attempt(0)
    with _full_beyond((tmp_path / "metrics.jsonl").stat().st_size):
        journal.write(1, {"train/loss": 3.0})
        with pytest.raises(OSError, match="File too large"):
            journal.end(1, "finished")
    journal.close()


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tmp_path: Path):
    tree = {"weights": np.random.default_rng(0).standard_normal(100_000)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tree, meta={})
    with _full_beyond(50_000), pytest.raises(CheckpointFailed, match="step 2"):
        checkpoints.save(2, tree, meta={})
    assert checkpoints.steps() == (1,)
    assert checkpoints.unfinished_steps() == (2,)
    _, restored, _ = checkpoints.restore(tree)
    np.testing.assert_array_equal(restored["weights"], tree["weights"])
    checkpoints.save(3, tree, meta={})
    assert checkpoints.steps() == (3,)
    assert not checkpoints.unfinished_steps()


def test_a_folder_that_takes_no_checkpoint_is_refused_with_its_name(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    Checkpoints(folder).check_writable()
    assert list(folder.iterdir()) == []
    with _full_beyond(100), pytest.raises(ValueError, match=f"checkpoint folder {folder} .*File too large.*--home"):
        Checkpoints(folder).check_writable()
    with pytest.raises(ValueError, match="checkpoint folder /proc/self cannot be written to"):
        Checkpoints("/proc/self").check_writable()  # takes no file, not even from root
    Checkpoints(folder).check_writable()


@pytest.mark.slow
def test_a_run_without_a_place_for_checkpoints_is_bad_input_before_its_first_step(ladder: Any, home: Path):
    place = run_folder(home, "tiny", "d32") / "checkpoints"
    place.parent.mkdir(parents=True)
    place.touch()
    done = ladder("run", "tiny", "--rung", "d32", "--home", home)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: checkpoint folder {place} cannot be written to (File exists)")
    assert not (place.parent / "metrics.jsonl").exists()


def test_an_alert_of_a_full_disk_is_whole_json(tmp_path: Path):
    with Journal(tmp_path, family="tiny", run="d32") as journal:
        journal.start_attempt(0)
        journal.trouble.failed("checkpoint", 4, OSError(28, "No space left on device"))
        journal.trouble.failed("checkpoint", 5, OSError(28, "No space left on device"))
    lines = (tmp_path / "alerts.jsonl").read_text().splitlines()
    (alert,) = (record for record in map(json.loads, lines) if record["kind"] == "alert")
    assert alert["severity"] == "critical"
    assert alert["since"] == 4
