import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import load_family
from rungwise.model.stages import Stages


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"pipe": 5}, ("mesh.pipe 5", "num_layers 4", "fewer stages")),
        ({"pipe": 2, "pipe_head_layers": 4}, ("num_layers 4", "head_layers 4")),
        ({"pipe": 2, "pipe_chunks": 2}, ("num_microbatches 1 is no multiple of num_stages 2",)),
        ({"pipe_chunks": 2}, ("mesh.pipe_chunks 2", "set mesh.pipe above 1")),
        ({"pipe_schedule": "gpipe"}, ("mesh.pipe_schedule gpipe", "set mesh.pipe above 1")),
        ({"pipe": 2, "weights": "sharded"}, ("mesh.weights 'sharded' with mesh.pipe 2",)),
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


def run_child(*words: str) -> dict:
    """What `pipeline_child.py` says, on eight CPU devices."""
    timeouts = " ".join(f"--xla_cpu_collective_call_{kind}_timeout_seconds=600" for kind in ("warn_stuck", "terminate"))
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("pipeline_child.py")), *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {timeouts}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout)


@pytest.mark.slow
def test_pipeline_gradients_are_those_of_one_device():
    """Every gradient and figure; counts exactly, so none is taken from a bubble or from padding."""
    reports = run_child()
    assert len(reports) >= 6
    for name, report in reports.items():
        assert report["gradient"] < 2e-5, (name, report)
        assert report.get("figures", (0.0,))[0] < 2e-5, (name, report)
        assert "exact" not in report, (name, report)
