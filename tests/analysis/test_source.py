import math
import socket
import string
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungwise.analysis.reading.store import (
    StoreError,
    check_reachable,
    escape_key,
    find_attempts,
    find_experiment,
    open_client,
    unescape_key,
)
from rungwise.analysis.source import RunRecord, load_run, load_run_mlflow, load_runs
from rungwise.ladder.home import resolve_tracking, run_folder, write_json
from rungwise.ladder.recording.journal import Journal, append_event
from rungwise.ladder.recording.tracking import mirror_folder

TIMING_NAMES = ["loss", "timing(s)/gen", "timing[s]/gen", "drop%/layer 3", "expert#7/load", "a//b"]


def make_run(home: Path, run: str, **config) -> Path:
    folder = run_folder(home, "tiny", run)
    folder.mkdir(parents=True)
    document = {"family": "tiny", "run": run, "role": "rung", "rung": run, "seed": 0, "config_hash": "c0ffee"}
    write_json(folder / "config.json", document | {"plan": {"tokens": 640}, "config": {}} | config)
    return folder


def write(folder: Path, losses, *, end: str | None = "finished") -> Path:
    with Journal(folder, family="tiny", run=folder.name) as journal:
        journal.start_attempt(0)
        for step, loss in enumerate(losses):
            journal.write(step, {"train/loss": loss})
        if end:
            journal.end(len(losses) - 1, end)
    return folder


def assert_same(here: RunRecord, there: RunRecord) -> None:
    pd.testing.assert_frame_equal(there.trajectory.frame, here.trajectory.frame)
    order = ["attempt", "time", "metric"]
    older, old = (each.trajectory.superseded.sort_values(order, ignore_index=True) for each in (there, here))
    pd.testing.assert_frame_equal(older, old)
    for metric in here.trajectory.metrics:
        assert there.trajectory.logged(metric).tolist() == here.trajectory.logged(metric).tolist()
    names = (
        "family",
        "run",
        "role",
        "rung",
        "seed",
        "plan",
        "config",
        "config_hash",
        "state",
        "attempts",
        "events",
    )
    for name in (*names, "heartbeat"):
        assert getattr(there, name) == getattr(here, name)


def test_source_folder_and_mlflow_give_the_same_record(tracked_home):
    folder, uri = make_run(tracked_home, "d64"), resolve_tracking(tracked_home)
    append_event(folder, "mixture", 4, expected=["train/loss"])
    values = (2.5, math.nan, math.inf, -math.inf, 1 / 3, 1e-310)
    for restored, length in ((0, 40), (30, 10), (32, 20)):
        with Journal(folder, family="tiny", run="d64") as journal:
            journal.start_attempt(restored)
            for step in range(restored + 1, restored + length):
                loss = values[step % len(values)]
                journal.write(step, {"train/loss": loss, "train/grad_norm": -loss, "progress/tokens": 64.0 * step})
                if step % 10 == 0:
                    journal.write(step, {"eval/loss": loss})
            journal.write(10_000, {"train/loss": 7.0})  # mis-numbered
            journal.write(restored + length, {"train/loss": 1.0})
            if restored != 30:
                journal.end(restored + length, "failed" if restored == 0 else "finished", "RuntimeError: no memory")
    mirror_folder(folder, uri)
    here, there = load_run(folder), load_run_mlflow(uri, "tiny", "d64")
    assert_same(here, there)
    assert [attempt.state for attempt in here.attempts] == ["failed", "killed", "finished"]
    assert here.attempts[0].reason == "RuntimeError: no memory"
    assert here.trajectory.series("train/loss").isin([math.inf, -math.inf]).sum() > 10
    assert len(here.trajectory.superseded) > 10


def test_source_live_run_reads_the_same(tracked_home):
    folder, uri = make_run(tracked_home, "d64"), resolve_tracking(tracked_home)
    with Journal(folder, family="tiny", run="d64") as journal:
        journal.start_attempt(0)
        journal.write(1, {"train/loss": 2.0})
        mirror_folder(folder, uri)
        here = load_run(folder)
        assert_same(here, load_run_mlflow(uri, "tiny", "d64"))
    assert (here.state, here.attempts[0].ended) == ("running", None)
    assert not here.is_stale(now=here.heartbeat + 59, limit_s=60)
    assert here.is_stale(now=here.heartbeat + 61, limit_s=60)


def test_source_diverged_rung_is_never_the_best(tracked_home):
    curves = {"rung-a": [3.4, 3.1], "rung-b": [3.5, math.nan], "rung-c": [3.3, 2.95]}
    for run, losses in curves.items():
        mirror_folder(write(make_run(tracked_home, run), losses), resolve_tracking(tracked_home))
        (run_folder(tracked_home, "tiny", run) / "config.json").unlink()
    records = load_runs(tracked_home, "tiny", tracking_uri=resolve_tracking(tracked_home))
    final = pd.Series({record.run: record.trajectory.latest("train/loss") for record in records}, dtype=float)
    assert not (final < 0.1).any()
    assert not (final == 0).any()
    assert list(final.sort_values().index) == ["rung-c", "rung-a", "rung-b"]
    assert list(final.sort_values(ascending=False).index) == ["rung-a", "rung-c", "rung-b"]
    diverged = records[1].trajectory
    assert diverged.logged("train/loss").tolist() == [True, True]
    assert diverged.series("train/loss").isna().to_list() == [False, True]


def test_source_runs_here_and_only_in_the_store_are_joined(tracked_home):
    uri = resolve_tracking(tracked_home)
    write(make_run(tracked_home, "d64"), [3.0, 2.0])
    mirror_folder(write(make_run(tracked_home, "d128"), [3.0, 1.0]), uri)
    mirror_folder(run_folder(tracked_home, "tiny", "d64"), uri)
    (run_folder(tracked_home, "tiny", "d128") / "config.json").unlink()
    assert [record.run for record in load_runs(tracked_home, "tiny")] == ["d64"]
    assert [record.run for record in load_runs(tracked_home, "tiny", tracking_uri=uri)] == ["d128", "d64"]
    assert load_runs(tracked_home, "laptop", tracking_uri=uri) == []


def test_source_corrupt_lines_are_noted(tracked_home):
    folder = write(make_run(tracked_home, "d64"), [3.0, 2.0, 1.0])
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    lines[3] = lines[3][:20]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    record = load_run(folder)
    assert record.notes == ("metrics.jsonl: 1 corrupt line(s) left out (line 4)",)
    assert list(record.trajectory.frame["step"]) == [0, 2]


def test_source_lost_attempt_line_costs_only_itself(tracked_home):
    folder = write(make_run(tracked_home, "d64"), [3.0, 2.0], end=None)
    write(folder, [2.5, 1.5])
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    lines[4] = b"\0"
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert load_run(folder).trajectory.series("train/loss").to_list() == [2.5, 1.5]


def test_source_without_config_or_run_says_which(tracked_home):
    with pytest.raises(ValueError, match=r"d64/config.json: cannot be read"):
        load_run(run_folder(tracked_home, "tiny", "d64"))
    folder = make_run(tracked_home, "d64", seed=None)
    document = {"family": "tiny", "run": "d64"}
    write_json(folder / "config.json", document)
    with pytest.raises(ValueError, match="lacks role, rung, seed"):
        load_run(folder)
    mirror_folder(write(make_run(tracked_home, "d128"), [1.0]), resolve_tracking(tracked_home))
    with pytest.raises(ValueError, match="run tiny/d256 is not in"):
        load_run_mlflow(resolve_tracking(tracked_home), "tiny", "d256")


def test_source_unreachable_addresses_are_named_without_their_password(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    wrong = {
        f"http://me:secret@{address}": rf"'http://{address}' does not answer",
        f"postgresql+psycopg2://me:secret@{address}/runs": rf"{address}/runs' does not answer",
        f"sqlite:///{tmp_path}/none.db": "none.db': no such database",
        "mlruns": "neither a server",
    }
    for uri, message in wrong.items():
        with pytest.raises(ValueError, match=message) as raised:
            check_reachable(uri)
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)


def test_source_server_that_accepts_and_stays_silent_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreError, match="does not answer"):
        check_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)


def test_source_store_that_is_no_database_is_one_line_with_its_address(tmp_path):
    (tmp_path / "mlflow.db").write_text("no database at all " * 100)
    with pytest.raises(StoreError, match=r"mlflow.db' cannot be read: .*not a database") as raised:
        load_runs(tmp_path, "tiny", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert "\n" not in str(raised.value)


@given(st.text(string.printable + "äß🦙", min_size=1, max_size=60))
def test_source_key_escape_is_one_to_one(name):
    assert unescape_key(escape_key(name)) == name


def test_source_key_escape_is_accepted_by_mlflow(tracked_home):
    write(make_run(tracked_home, "d64"), [1.0])
    mirror_folder(run_folder(tracked_home, "tiny", "d64"), resolve_tracking(tracked_home))
    client = open_client(resolve_tracking(tracked_home))
    (run,) = find_attempts(client, str(find_experiment(client, "tiny")))
    names = [*TIMING_NAMES, ".", "..", "/a", "a/./b", "a/", "x" * 300, "x" * 301, "ä:b"]
    for name in names:
        client.log_metric(run.info.run_id, escape_key(name), 1.0)
    stored = client.get_run(run.info.run_id).data.metrics
    assert len(stored.keys() - {"train/loss"}) == len(names)
    assert set(TIMING_NAMES) <= {unescape_key(key) for key in stored}
