"""A run whose context and mixture change on the way: trained for real on two sources, killed and refused for real."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.reading.records import read_records
from rungwise.analysis.source import RunRecord, load_run
from rungwise.ladder.family import family_text
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.watching.watch import judge_loaded

pytestmark = pytest.mark.slow

EDITS = {
    'name = "tiny-phases"': 'name = "mini-phases"',
    "tokens_per_active_param = 20": "tokens_per_active_param = 2",
    "sequences_per_rank = 16": "sequences_per_rank = 8",
    "seq_len = 64\n": "seq_len = 16\n",
    "start = 0.5\nseq_len = 128\n\n[[context]]\nstart = 0.9\nseq_len = 1024": "start = 0.5\nseq_len = 128",
    "num_layers = 3": "num_layers = 1",
    "num_experts = 32": "num_experts = 8",
    "top_k = 4": "top_k = 2",
    "num_sequences = 512": "num_sequences = 64",
    "every_fraction = 0.05": "every_fraction = 0.5",
    "every_fraction = 0.1": "every_fraction = 0.25",
}
"""`tiny-phases` made small: one layer, 16 → 128 tokens of context, so that a rank has 8 documents and then one."""


def write_family(folder: Path, edits: Mapping[str, str] = EDITS) -> Path:
    text = family_text("tiny-phases")
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "mini-phases.toml"
    path.write_text(text)
    return path


def train(family: Path, home: Path, cache: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
    words = ("run", str(family), "--rung", "d32", "--home", str(home), "--quiet")
    quick = "--xla_backend_optimization_level=0"  # compiling takes longer than training here
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "XLA_FLAGS": quick}
    return subprocess.Popen([sys.executable, "-P", "-m", "rungwise.ladder", *words], env=environment, stderr=stderr)


def events_of(home: Path) -> list[dict[str, Any]]:
    """What a run's events say, but for when it was written."""
    records = read_records(home / "mini-phases" / "runs" / "d32" / "events.jsonl").records
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def calm(place: Path) -> Path:
    """Home of a run trained without a stop."""
    assert train(write_family(place), place / "calm", place / "compiled").wait(600) == 0
    return place / "calm"


@pytest.fixture(scope="module")
def record(calm: Path) -> RunRecord:
    return load_run(calm / "mini-phases" / "runs" / "d32")


def test_a_run_goes_through_its_phases_and_says_so(calm: Path, record: RunRecord):
    assert record.state == "finished"
    steps = record.plan["steps"]
    starts = [round(share * steps) + 1 for share in (0.5, 0.8)]
    planned = [event for event in events_of(calm) if event["kind"] != "note"]
    assert [(event["kind"], event["step"], event["planned"]) for event in planned] == [
        ("context", starts[0], True), ("mixture", starts[1], True)
    ]  # fmt: skip
    assert planned[0]["seq_len"] == [16, 128]
    assert planned[0]["sequences_per_rank"] == [8, 1]
    assert planned[1]["weights"] == [{"guides": 1, "manual": 4}, {"guides": 4, "manual": 1}]
    assert 0 < planned[0]["predicted_drop_fraction"] < 1
    notes = [event for event in events_of(calm) if event["kind"] == "note"]
    assert len(notes) == 2
    for note in notes:
        assert {"eval/guides/loss", "eval/manual/loss", "train/loss", "moe/drop_fraction"} <= set(note["outcome"])
    frame = record.trajectory.frame.set_index("step")
    assert (frame["progress/tokens"].diff().dropna() == record.plan["tokens_per_step"]).all()
    assert frame["progress/flops"].iloc[-1] == pytest.approx(record.plan["flops"])
    shares = frame["data/source_fraction/guides"].to_numpy(float)
    assert np.mean(shares[: starts[1] - 1]) == pytest.approx(0.2, abs=0.01)
    assert np.mean(shares[starts[1] - 1 :]) == pytest.approx(0.8, abs=0.02)
    assert frame["eval/context-128/loss"].first_valid_index() == starts[0] + 4


def test_detectors_are_quiet_at_planned_phases(calm: Path, record: RunRecord, place: Path):
    runs = load_family_runs(str(place / "mini-phases.toml"), home=calm)
    verdict = judge_loaded(runs, "d32")
    assert [alert for alert in verdict.alerts if alert.severity != "info"] == []
    assert not [remark for remark in verdict.remarks if "condition" in remark]


def test_a_run_killed_in_a_longer_phase_ends_as_if_never_stopped(calm: Path, record: RunRecord, place: Path):
    home = place / "stormy"
    journal = home / "mini-phases" / "runs" / "d32" / "metrics.jsonl"
    wanted = round(0.8 * record.plan["steps"]) + 2
    child = train(place / "mini-phases.toml", home, place / "compiled")
    deadline = time.monotonic() + 300
    while child.poll() is None and time.monotonic() < deadline:
        if journal.exists() and f'"step": {wanted},' in journal.read_text(errors="replace"):
            break
        time.sleep(0.002)
    assert child.poll() is None, "the run ended before it could be killed"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert train(place / "mini-phases.toml", home, place / "compiled").wait(600) == 0
    resumed = load_run(home / "mini-phases" / "runs" / "d32")
    assert [attempt.state for attempt in resumed.attempts] == ["killed", "finished"]
    frame, whole = resumed.trajectory.frame, record.trajectory.frame
    for name in ("step", "train/loss", "eval/loss", "train/param_norm", "data/source_fraction/guides"):
        np.testing.assert_array_equal(frame[name], whole[name], err_msg=name)
    assert events_of(home) == events_of(calm)


def test_a_phase_that_would_drop_too_much_is_refused_with_the_figure(calm: Path, record: RunRecord, tmp_path: Path):
    """The run goes on at the length it had, and there it drops less: the same state, eight documents a rank for one."""
    family = write_family(tmp_path, EDITS | {"max_drop_fraction = 0.5": "max_drop_fraction = 0.001"})
    child = train(family, tmp_path, calm.parent / "compiled", stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=600)
    assert child.returncode == 0, said
    change = round(0.5 * record.plan["steps"])
    (event,) = [event for event in events_of(tmp_path) if "refused" in event]
    assert (event["kind"], event["step"], event["refused"]) == ("note", change + 1, 0)
    assert event["probe"]["drop_fraction"] > event["max_drop_fraction"] == 0.001
    figure = f"drops {event['probe']['drop_fraction']:.2%}, more than max_drop_fraction 0.10%; 16 tokens stay"
    assert figure in said.decode()
    assert figure in event["what"]
    assert not [event for event in events_of(tmp_path) if event["kind"] == "context"]
    ours, theirs = load_run(tmp_path / "mini-phases" / "runs" / "d32"), record
    assert (ours.state, ours.plan["context"], theirs.plan["context"]) == ("finished", None, "16, 128 from 0.5")
    assert ours.plan["flops"] < theirs.plan["flops"]
    loss, other = (run.trajectory.frame["train/loss"].to_numpy() for run in (ours, theirs))
    np.testing.assert_array_equal(loss[:change], other[:change])
    assert loss[change] != other[change]
    short, long = (run.trajectory.frame["moe/drop_fraction"].to_numpy()[change] for run in (ours, theirs))
    assert event["probe"]["drop_fraction"] == pytest.approx(long, rel=1e-6)  # the forward pass of the step not taken
    assert long > short
