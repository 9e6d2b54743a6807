import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from rungwise.analysis.reading.records import Records, read_records
from rungwise.analysis.source import load_layers
from rungwise.ladder.recording.journal import Journal, append_alert, append_event, writer_of

WRITER = """
import sys
from rungwise.ladder.recording.journal import Journal
journal = Journal(sys.argv[1], family="tiny", run="d64")
journal.start_attempt(0)
for step in range(1, 10**9):
    journal.write(step, {"train/loss": 3 - step * 1e-6})
    if step == 20:
        print("twenty", flush=True)
"""


@pytest.fixture
def writer(tmp_path):
    """A child that writes records as fast as it can, past its twentieth."""
    with subprocess.Popen([sys.executable, "-P", "-c", WRITER, tmp_path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            yield child
        finally:
            child.kill()


def open_journal(folder) -> Journal:
    return Journal(folder, family="tiny", run="d64")


def test_journal_is_strict_json_with_nonfinite_values_as_words(tmp_path):
    values = {"train/loss": math.nan, "train/grad_norm": math.inf, "train/logit_abs_max": -math.inf}
    with open_journal(tmp_path) as journal:
        journal.start_attempt(0, device="cpu")
        journal.write(1, values, layers={"moe/drop_fraction": [0.0, math.nan]})
        journal.end(1, "finished")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    header, attempt, metrics, end = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert header == {"schema": 1, "kind": "header", "family": "tiny", "run": "d64", "lineage": "tiny/d64"}
    assert (attempt["attempt"], attempt["pid"], attempt["device"]) == (1, os.getpid(), "cpu")
    assert metrics["values"] == {
        "train/loss": "NaN",
        "train/grad_norm": "Infinity",
        "train/logit_abs_max": "-Infinity",
    }
    assert metrics["layers"] == {"moe/drop_fraction": [0.0, "NaN"]}
    assert (end["state"], "reason" in end) == ("finished", False)


@pytest.mark.parametrize("name", ["loss", "train/loss/", "moe/unknown", "grad_norm/", "infinite/train/loss"])
def test_journal_refuses_a_metric_outside_the_vocabulary(tmp_path, name):
    with open_journal(tmp_path) as journal:
        journal.start_attempt(0)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            journal.write(1, {"train/loss": 1.0, name: 1.0})
        assert [record["kind"] for record in read_records(tmp_path / "metrics.jsonl").records] == ["attempt"]


def test_journal_refuses_records_outside_an_attempt(tmp_path):
    with open_journal(tmp_path) as journal:
        with pytest.raises(ValueError, match="start_attempt"):
            journal.write(1, {"train/loss": 1.0})
        journal.start_attempt(0)
        journal.end(0, "finished")
        with pytest.raises(ValueError, match="start_attempt"):
            journal.end(0, "finished")


def test_journal_numbers_attempts_and_orders_records_by_time(tmp_path):
    for restored in (0, 5, 9):
        with open_journal(tmp_path) as journal:
            journal.start_attempt(restored)
            for step in range(restored + 1, restored + 200):
                journal.write(step, {"train/loss": 1.0})
    records = read_records(tmp_path / "metrics.jsonl").records
    assert [record["attempt"] for record in records if record["kind"] == "attempt"] == [1, 2, 3]
    for attempt in (1, 2, 3):
        times = [record["time"] for record in records if record["attempt"] == attempt]
        assert all(later > earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (RuntimeError("no\nmemory"), "failed", "RuntimeError: no"),
        (KeyboardInterrupt(), "killed", "KeyboardInterrupt: "),
    ],
)
def test_journal_left_by_an_exception_says_so(tmp_path, error, state, reason):
    def train() -> None:
        with open_journal(tmp_path) as journal:
            journal.start_attempt(0)
            journal.write(7, {"train/loss": 1.0})
            raise error

    with pytest.raises(type(error)):
        train()
    end = read_records(tmp_path / "metrics.jsonl").records[-1]
    assert (end["kind"], end["step"], end["state"], end["reason"]) == ("end", 7, state, reason)


def test_journal_second_writer_is_refused_by_the_first_ones_pid(tmp_path, writer):
    with pytest.raises(ValueError, match=f"written by pid {writer.pid} on"):
        open_journal(tmp_path)
    assert f"pid {writer.pid}" in (writer_of(tmp_path) or "")


def test_journal_of_a_killed_writer_loses_no_record_and_goes_on(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    path = tmp_path / "metrics.jsonl"
    before = read_records(path)
    steps = [record["step"] for record in before.records if record["kind"] == "metrics"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20
    assert before.corrupt == ()
    with path.open("ab") as file:
        file.write(b'{"kind": "metrics", "attempt": 1, "st')  # what a kill in the middle of a write leaves
    assert read_records(path) == Records(before.records, 1, ())
    assert writer_of(tmp_path) is None
    with open_journal(tmp_path) as journal:
        assert journal.start_attempt(10) == 2
        journal.write(11, {"train/loss": 2.0})
    after = read_records(path)
    assert after.records[: len(before.records)] == before.records
    assert [record["step"] for record in after.records[len(before.records) :]] == [10, 11]
    assert (after.torn, after.corrupt) == (1, ())


def test_journal_corrupt_line_in_the_middle_is_counted_not_healed(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start_attempt(0)
        for step in range(1, 6):
            journal.write(step, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[3], lines[5] = b"\0" * 20, lines[5].replace(b'"values"', b'"val"')
    path.write_bytes(b"\n".join(lines))
    records = read_records(path)
    assert (records.torn, records.corrupt) == (0, (4, 6))
    assert [record["step"] for record in records.records] == [0, 1, 3, 5]


def test_journal_torn_header_is_written_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"schema": 1, "ki')
    assert read_records(tmp_path / "metrics.jsonl") == Records(torn=1)
    with open_journal(tmp_path) as journal:
        journal.start_attempt(0)
    assert len(read_records(tmp_path / "metrics.jsonl").records) == 1


def test_journal_of_another_run_or_a_later_schema_is_refused(tmp_path):
    open_journal(tmp_path).close()
    with pytest.raises(ValueError, match="holds 'tiny/d64', not 'tiny/d128'"):
        Journal(tmp_path, family="tiny", run="d128")
    (tmp_path / "metrics.jsonl").write_text('{"schema": 2, "kind": "header"}\n')
    with pytest.raises(ValueError, match="schema 2"):
        read_records(tmp_path / "metrics.jsonl")


def test_journal_events_and_alerts_come_from_many_processes(tmp_path):
    script = """
import sys
from rungwise.ladder.recording.journal import append_event
for step in range(25):
    append_event(sys.argv[1], "note", step, text=sys.argv[2])
"""

    def append(text: str) -> int:
        return subprocess.run([sys.executable, "-P", "-c", script, tmp_path, text], check=True).returncode

    with (
        open_journal(tmp_path),
        ThreadPoolExecutor() as pool,
    ):  # the run's own writer does not stand in the way
        assert list(pool.map(append, "abcd")) == [0, 0, 0, 0]
    events = read_records(tmp_path / "events.jsonl")
    assert (events.torn, events.corrupt) == (0, ())
    assert sorted((event["text"], event["step"]) for event in events.records) == [
        (t, s) for t in "abcd" for s in range(25)
    ]
    words = {"rule": "loss_spike", "metric": "train/loss", "state": "open", "severity": "critical", "explanation": "…"}
    append_alert(tmp_path, {**words, "step": 3, "updated": 3, "observed": math.inf})
    alert = read_records(tmp_path / "alerts.jsonl").records[0]
    assert (alert["kind"], alert["observed"]) == ("alert", "Infinity")
    with pytest.raises(ValueError, match="event kind 'surprise'"):
        append_event(tmp_path, "surprise", 1)


def test_journal_keeps_every_layer(tmp_path):
    with open_journal(tmp_path) as journal:
        journal.start_attempt(0)
        for step in (1, 2):
            journal.write(step, {"train/loss": 1.0}, layers={"moe/drop_fraction": [0.1 * step, 0.2 * step]})
    layers = load_layers(tmp_path, "moe/drop_fraction")
    assert layers.to_dict("list") == {0: [0.1, 0.2], 1: [0.2, 0.4]}
    assert list(layers.index) == [1, 2]
    assert load_layers(tmp_path, "moe/router_entropy").shape[1] == 0
