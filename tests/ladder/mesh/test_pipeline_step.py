import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import load_family
from rungwise.ladder.mesh.mesh_step import lower_step
from rungwise.model import transformer
from rungwise.model.stages import Stages

CHILD = Path(__file__).with_name("pipeline_child.py")


@pytest.fixture(scope="module")
def child() -> Any:
    """The child's cases; tests cannot import one another."""
    spec = importlib.util.spec_from_file_location("pipeline_child", CHILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"pipe": 5}, ("mesh.pipe 5", "num_layers 4", "fewer stages")),
        ({"pipe": 2, "pipe_head_layers": 4}, ("num_layers 4", "head_layers 4")),
        ({"pipe": 2, "pipe_chunks": 2}, ("num_microbatches 1 is no multiple of num_stages 2",)),
        ({"pipe_chunks": 2}, ("mesh.pipe_chunks 2", "set mesh.pipe above 1")),
        ({"pipe_schedule": "gpipe"}, ("mesh.pipe_schedule gpipe", "set mesh.pipe above 1")),
    ],
)
def test_pipeline_refuses_what_its_run_cannot_have(mesh, words):
    rung = load_family("tiny").rung_runs[0]
    with pytest.raises(ValueError, match="mesh") as caught:
        rung.replace(model=rung.model.replace(num_layers=4).model_dump(), mesh=mesh)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("options", [{}, {"num_chunks": 2}, {"head_layers": 2}, {"num_stages": 7}])
def test_stages_hold_every_layer_once_and_give_it_back(options):
    stages = Stages(**({"num_layers": 7, "num_stages": 2} | options))
    layers = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)))
    rows = stages.stacked(layers)
    assert len(rows) == stages.num_stages * stages.num_chunks * stages.chunk_rows
    assert sorted(row for row in stages.rows if row >= 0) == list(range(7))
    np.testing.assert_array_equal(rows[np.array(stages.rows) < 0], 0.0)
    np.testing.assert_array_equal(stages.unstacked(rows), layers)


def test_pipeline_step_sends_what_its_schedule_says(child: Any, monkeypatch: pytest.MonkeyPatch):
    """The whole training step over all three axes, lowered for an accelerator that is not here."""
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)
    text = lower_step(child.CASES["all_axes"], platform="cuda").as_text()
    counts = Counter(re.findall(r"stablehlo\.(\w+)", text))
    assert counts["collective_permute"] == 2  # in the one scan over ticks
    # A layer that all stages have, in a scan, and one that a stage lacks; each there and back: forward, which the
    # backward computes again, and backward.
    assert counts["all_to_all"] == 2 * 2 * 3


@pytest.mark.slow
def test_pipeline_gradients_are_those_of_one_device(on_eight_devices):
    """Every gradient and figure; counts exactly, so none is taken from a bubble or from padding."""
    reports = json.loads(on_eight_devices(CHILD, "all_axes", "gpipe", "sharded_weights"))
    assert len(reports) == 3
    for name, report in reports.items():
        assert report["gradients"][0] < 2e-5, (name, report)
        assert report["figures"][0] < 2e-5, (name, report)
        assert report["counts"][0] == 0.0, (name, report)
        assert report["dropped"] > 0, (name, report)
