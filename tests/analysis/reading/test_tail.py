"""A run read while it is written: folder and store tell the same, each record once."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from rungwise.analysis.reading.store import StoreError
from rungwise.analysis.reading.tail import FolderTail, StoreTail, Tail
from rungwise.ladder.home import resolve_tracking, run_folder, write_json
from rungwise.ladder.recording.journal import Journal, append_event
from rungwise.ladder.recording.tracking import mirror_folder


@pytest.fixture
def folder(tracked_home: Path) -> Path:
    folder = run_folder(tracked_home, "tiny", "hero")
    folder.mkdir(parents=True)
    document = {"family": "tiny", "run": "hero", "role": "hero", "rung": "hero", "seed": 0, "config_hash": "c0ffee"}
    write_json(folder / "config.json", document | {"plan": {}, "config": {}})
    return folder


def told(tail: Tail) -> tuple[list[str], list[str]]:
    """New records and events as texts: NaN equals NaN, and what only a folder knows is left out."""
    names = ("kind", "attempt", "step", "time", "values", "state")
    records = [{name: record.get(name) for name in names} for record in tail.new_records()]
    for record in records:
        record["values"] = {name: float(value) for name, value in sorted((record["values"] or {}).items())}
        record["step"] = None if record["kind"] == "end" else record["step"]
    return [repr(record) for record in records], [repr(event) for event in tail.new_events()]


def write(journal: Journal, steps) -> None:
    for step in steps:
        loss = (2.0, math.nan, math.inf, -math.inf)[step % 4]
        journal.write(step, {"train/loss": loss, "moe/drop_fraction": 0.1})
        if step % 5 == 0:
            journal.write(step, {"eval/loss": 2.5})


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tracked_home: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield resolve_tracking(tracked_home)
        return
    with request.getfixturevalue("mlflow_server")() as address:
        yield address


def test_tail_of_folder_and_store_tell_the_same_as_the_run_grows(folder, uri):
    here, there = FolderTail(folder), StoreTail(uri, "tiny", "hero")
    assert told(here) == told(there) == ([], [])
    counts = []
    for restored, end in ((0, "failed"), (6, "finished")):
        with Journal(folder, family="tiny", run="hero") as journal:
            journal.start_attempt(restored)
            for start in (restored + 1, restored + 6):
                append_event(folder, "mixture", start)
                write(journal, range(start, start + 5))
                mirror_folder(folder, uri)
                records, events = told(here)
                assert (records, events) == told(there)
                assert len(events) == 1
                counts.append(len(records))
            journal.end(restored + 10, end)
        mirror_folder(folder, uri)
        assert told(here) == told(there)
    assert counts == [7, 6, 7, 6]  # an attempt, five steps, an evaluation; then no attempt


def test_tail_holds_back_a_record_of_which_only_a_part_is_there(folder, tracked_home):
    from mlflow.entities import Metric

    from rungwise.analysis.reading.store import find_attempts, find_experiment, open_client

    uri = resolve_tracking(tracked_home)
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(0)
        write(journal, range(1, 3))
        mirror_folder(folder, uri)
        client = open_client(uri)
        (run,) = find_attempts(client, str(find_experiment(client, "tiny")))
        client.log_batch(run.info.run_id, [Metric("train/loss", 1.0, 1 << 42, 3)])
        tail = StoreTail(uri, "tiny", "hero")
        assert [record["step"] for record in tail.new_records()] == [0, 1, 2]
        assert list(tail.new_records()) == []


def test_tail_of_a_store_that_is_gone_says_so_and_goes_on_when_it_is_back(folder, tracked_home):
    uri, database = resolve_tracking(tracked_home), tracked_home / "mlflow.db"
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(0)
        write(journal, range(1, 3))
    mirror_folder(folder, uri)
    tail = StoreTail(uri, "tiny", "hero")
    hidden = database.rename(database.with_name("hidden.db"))
    with pytest.raises(StoreError, match="no such database"):
        list(tail.new_records())
    hidden.rename(database)
    assert [record["kind"] for record in tail.new_records()] == ["attempt", "metrics", "metrics", "end"]
