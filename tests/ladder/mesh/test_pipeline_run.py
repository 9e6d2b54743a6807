"""A real run over two stages against the same run on one device: every figure of every step, and evaluation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungwise.ladder.family import family_text

EDITS = {
    "data_replicas = 3": "data_replicas = 4",
    "data_replicas = 5": "data_replicas = 6",
    "seq_len = 128": "seq_len = 32",
    "num_layers = 3 ": "num_layers = 2 ",
    "num_experts = 32 ": "num_experts = 8 ",
    "num_waves = 2 ": "num_waves = 1 ",
    "every_fraction = 0.05": "every_fraction = 0.5",
    "every_fraction = 0.1": "every_fraction = 0.5",
    "num_sequences = ": "num_sequences = 16 #",
    "seeds = [0, 1, 2]": "seeds = [0]\noverride = { steps = 4 } #",
}
"""`tiny` with short sequences, few experts, four steps and two microbatches: quick to compile."""

FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"


def family(name: str) -> str:
    """The text of a family of this name."""
    text = family_text("tiny").replace('name = "tiny"', f'name = "{name}"', 1)
    for old, new in EDITS.items():
        assert old in text
        text = text.replace(old, new, 1)
    return f"{text}\n[execution]\nmicrobatches = 2\n"


def records(home: Path, name: str) -> list[dict[str, Any]]:
    """What the journal says of every step, but for speed."""
    lines = (home / name / "runs" / "d32" / "metrics.jsonl").read_text().splitlines()
    return [
        {metric: value for metric, value in record["values"].items() if not metric.startswith("perf/")}
        for record in map(json.loads, lines)
        if record["kind"] == "metrics"
    ]


@pytest.mark.slow
def test_run_over_two_stages_is_the_run_on_one_device(tracked_home: Path, tmp_path: Path, ladder: Callable[..., Any]):
    for name, mesh in (("whole", "data=1"), ("staged", "pipe=2")):
        path = tmp_path / f"{name}.toml"
        path.write_text(family(name))
        words = ("run", path, "--rung", "d32", "--home", tracked_home, "--quiet", "--mesh", mesh)
        finished = ladder(*words, timeout=1500, XLA_FLAGS=FLAGS)
        assert finished.returncode == 0, finished.stderr
    one, staged = records(tracked_home, "whole"), records(tracked_home, "staged")
    assert len(one) == len(staged) >= 4
    for expected, got in zip(one, staged, strict=True):
        assert got == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert any("eval/loss" in values for values in one)
    assert all(values.get("moe/drop_fraction", 1.0) > 0.0 for values in one)
