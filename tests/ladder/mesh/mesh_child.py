"""Run by `test_mesh.py` with eight CPU devices: training and evaluation on meshes against one device. Prints JSON.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/ladder/mesh/mesh_child.py all` tries every transport.
"""

import json
import re
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from rungwise.comm.mesh import build_mesh
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.ladder.mesh.mesh_engine import MeshEngine
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.training.engine import Engine, OneDevice
from rungwise.ladder.training.schedule import horizon_of
from rungwise.model import transformer

SEQ, VOCAB, BATCH, STEPS = 8, 32, 32, 2

COUNTERS = ("drop_fraction", "sender_drop_fraction", "receiver_drop_fraction", "tokens_lost_all_routes", "dead_experts")
"""Figures that are counts over a count: whoever keeps the same assignments has them bit for bit."""

VARIANTS: dict[str, dict[str, Any]] = {
    "pooled": {},
    "ragged": {
        "transport": {"name": "ragged"},
        "optimizer": {"name": "muonh", "clip_norm": 0.5},
        "model": {"quantile_estimator": "histogram"},
        "execution": {"microbatches": 2},
    },
    "cell": {
        "transport": {"name": "expert_cell"},
        "optimizer": {"name": "adamw"},
        "model": {"balance": "auxiliary_loss", "balance_loss_weight": 0.1},
    },
    "waves": {
        "transport": {"num_waves": 2},
        "execution": {"microbatches": 2, "rematerialize_experts": True},
    },
    "dropless": {
        "transport": {"name": "dropless"},
        "optimizer": {"epsilon": 1e-2},  # its sums over ranks round most
        "model": {"quantile_estimator": "topk"},
    },
}

CASES = (
    ("pooled", "data=4,expert=2,optimizer=sharded", AxisType.Auto),
    ("pooled", "data=2,expert=2,weights=sharded", AxisType.Auto),
    ("waves", "expert=8", AxisType.Auto),
    ("dropless", "data=2,expert=4", AxisType.Auto),
    ("pooled", "data=2,expert=2,pipe=2,weights=sharded,optimizer=sharded", AxisType.Auto),
    ("pooled", "expert=8", AxisType.Explicit),
    ("ragged", "data=2,expert=4,optimizer=sharded", AxisType.Auto),
    ("cell", "data=4,expert=2,optimizer=sharded,offload=optimizer", AxisType.Auto),
)
IN_TESTS = 3
"""Cases of the test; `mesh_child.py all` goes through all of them.

Eight ranks hold the experts of each of four replicas, so a device has one or several of both."""


def run_config(variant: str, mesh: str = "") -> RunConfig:
    """The smallest rung of `tiny` made smaller still, one sequence of eight tokens a rank, tight capacities."""
    rung, changes = load_family("tiny").rung_runs[0], VARIANTS[variant]
    shape = {"seq_len": SEQ, "vocab_size": VOCAB, "hidden_dim": 16, "head_dim": 8, "num_layers": 2, "global_every": 2}
    experts = {"num_experts": 16, "top_k": 2}
    model = rung.model.replace(
        **{**shape, **experts, "window": 4, "expert_dim": 8, "latent_dim": 8, **changes.get("model", {})}
    )
    transport = {"name": "pooled_wave", "num_ranks": 8, "num_waves": 1, **experts, **changes.get("transport", {})}
    factors = {"sender_capacity_factor": 1.0, "receiver_capacity_factor": 1.0}
    return rung.replace(
        model=model,
        transport={**transport, **factors},
        data_replicas=BATCH // 8,
        sequences_per_rank=1,
        steps=20,
        execution=rung.execution.replace(**changes.get("execution", {})),
        optimizer=rung.optimizer.replace(**{"epsilon": 1e-3, **changes.get("optimizer", {})}),  # else Adam turns
        # rounding of gradients near zero into whole steps
        mesh=MeshConfig().changed(mesh),
    )


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32) for _ in range(STEPS)]


def train(engine: Engine, config: RunConfig) -> dict[str, Any]:
    """A few steps from the start; figures of each, the final state, and held-out losses of an odd number of windows."""
    state, horizon, figures = engine.init_state(), horizon_of(config), []
    step = engine.compile_step(config, state, batches()[0], horizon)
    for tokens in batches():
        state, given = step(state, tokens, horizon)
        figures.append(jax.device_get(given))
    return {"figures": figures, "state": engine.to_tree(state), "placed": state, "step": step}


def largest_error(ours: Any, theirs: Any) -> dict[str, Any]:
    """The leaf that differs most, relative to its largest entry."""
    worst: tuple[float, str] = (0.0, "")
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(jax.device_get(ours)), jax.tree.leaves(jax.device_get(theirs)), strict=True
    )
    for (path, mine), other in pairs:
        assert np.shape(mine) == np.shape(other), path
        if np.size(other):
            scale = float(np.abs(other).max()) or 1.0
            worst = max(worst, (float(np.abs(np.subtract(mine, other)).max()) / scale, jax.tree_util.keystr(path)))
    return {"error": worst[0], "leaf": worst[1]}


def counters(run: dict[str, Any]) -> list[Any]:
    return [np.asarray(getattr(figures.layers, name)).tolist() for figures in run["figures"] for name in COUNTERS]


def check_restore(whole: Engine, tree: Any, config: RunConfig, folder: str) -> bool:
    """A checkpoint of one topology, restored under another, comes back bit for bit."""
    places = Checkpoints(folder)
    places.save(1, tree, meta={})
    other = MeshEngine(config.replace(mesh=MeshConfig().changed("data=2,expert=4,optimizer=sharded")))
    _, back, _ = places.restore(other.abstract_tree())
    again = other.to_tree(other.from_tree(back))
    _, alone, _ = places.restore(whole.abstract_tree())
    same = jax.tree.map(lambda *leaves: all(np.array_equal(leaves[0], leaf) for leaf in leaves), tree, again, alone)
    return all(jax.tree.leaves(same))


def evaluation_error(*runs: tuple[Engine, dict[str, Any]], config: RunConfig, dropping: bool = False) -> float:
    """Largest difference of losses: without drops of an odd number of windows, with them of a whole batch."""
    windows = batches()[0] if dropping else batches()[0][:6]
    losses = [engine.eval_step(config, dropping=dropping)(run["placed"], windows) for engine, run in runs]
    return largest_error(*losses)["error"]


def main() -> None:
    """All cases of a variant against its one run on one device."""
    transformer.MAX_UNROLLED_LAYERS = 0  # one layer to compile instead of all
    results, alone = [], {}
    for variant, mesh, axis_type in CASES if "all" in sys.argv else CASES[:IN_TESTS]:
        print(variant, mesh, axis_type, file=sys.stderr, flush=True)
        config = run_config(variant, mesh)
        if variant not in alone:
            one = OneDevice(config)
            alone[variant] = one, train(one, config)
        one, want = alone[variant]
        devices = build_mesh(config.mesh.sizes, axis_type=axis_type)
        engine = MeshEngine(config, mesh=devices)
        got = train(engine, config)
        result: dict[str, Any] = {"variant": variant, "mesh": mesh, "same_counters": counters(got) == counters(want)}
        result["dropped"] = float(np.max(got["figures"][0].layers.drop_fraction))
        result |= largest_error((got["figures"], got["state"]), (want["figures"], want["state"]))
        if variant == "waves":
            result["all_to_alls"] = len(re.findall(r" all-to-all(?:-start)?\(", got["step"].compiled.as_text()))
            result["dropping"] = evaluation_error((engine, got), (one, want), config=config, dropping=True)
        if mesh == "data=4,expert=2,optimizer=sharded":
            result["reduce_scatters"] = len(re.findall(r" reduce-scatter(?:-start)?\(", got["step"].compiled.as_text()))
            with tempfile.TemporaryDirectory() as folder:
                result["restored"] = check_restore(one, got["state"], config, folder)
            result["evaluation"] = evaluation_error((engine, got), (one, want), config=config)
        results.append(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
