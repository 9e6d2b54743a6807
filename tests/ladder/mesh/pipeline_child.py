"""Run by `test_pipeline_step.py` with eight CPU devices: gradients over pipelines against one device. Prints JSON."""

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rungwise.comm.mesh import build_mesh
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.mesh.mesh_step import EVERYWHERE, TOKENS, MeshPlan, mesh_gradient
from rungwise.ladder.training.gradients import make_gradient
from rungwise.ladder.training.step import init_state
from rungwise.model import transformer

QUICK = {"xla_backend_optimization_level": 0}
"""Small models spend their time compiling."""

MODEL: dict[str, Any] = {
    "seq_len": 16,
    "vocab_size": 32,
    "hidden_dim": 16,
    "num_layers": 5,
    "head_dim": 8,
    "window": 8,
    "expert_dim": 8,
    "latent_dim": 8,
    "num_experts": 8,
    "attention_gate": True,
    "gated_norm_rank": 2,
    "embed_norm": True,
    "short_conv_kernel": 2,
    "short_conv_sites": ("key", "moe"),
    "tied_head": True,
    "balance": "auxiliary_loss",
    "balance_loss_weight": 0.3,
    "balance_scope": "local",
    "router_z_loss_weight": 0.2,
}
"""Penalties of every layer, a head that is the first stage's embedding, parameters of every kind, and five layers:
no number of stages divides them."""


def run_config(mesh: dict[str, Any], microbatches: int = 1) -> RunConfig:
    """The small run of all cases on a mesh; its transport drops."""
    rung = load_family("tiny").rung_runs[0]
    transport = {"name": "expert_cell", "num_experts": 8, "num_ranks": 2, "num_waves": 1}
    return rung.replace(
        model=rung.model.replace(**MODEL).model_dump(),
        transport=dataclasses.replace(rung.transport, **transport),
        data_replicas=4,
        mesh=mesh,
        execution=rung.execution.replace(microbatches=microbatches).model_dump(),
        steps=10,
    )


def batch(config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, and weights that count most of them."""
    rng = np.random.default_rng(0)
    shape = config.data_replicas, config.transport.num_ranks, config.sequences_per_rank, config.model.seq_len
    tokens = rng.integers(0, config.model.vocab_size, (*shape[:-1], shape[-1] + 1)).astype(np.int32)
    return tokens, (rng.random(shape) < 0.8).astype(np.float32)


def shaken(config: RunConfig) -> tuple[Any, np.ndarray]:
    """Parameters none of which is at its start, and a bias."""
    rng = np.random.default_rng(1)
    state = init_state(config)
    params = jax.tree.map(
        lambda leaf: (np.asarray(leaf) + 0.05 * rng.normal(size=leaf.shape)).astype(np.float32), state.params
    )
    return params, rng.normal(0, 0.1, state.bias.shape).astype(np.float32)


@functools.cache
def on_one_device() -> Any:
    """Gradient and figures of every case, without a mesh and in one piece."""
    config = run_config({})
    gradient = make_gradient(config, jnp.dtype("float32"))
    tokens, weights = (leaf.reshape(-1, leaf.shape[-1]) for leaf in batch(config))
    return jax.jit(gradient, compiler_options=QUICK)(*shaken(config), tokens, weights, 3)


def on_mesh(config: RunConfig) -> tuple[Any, Any]:
    """The same over the mesh the config asks for, margins left out, and the jitted function's arguments."""
    plan = MeshPlan(config, build_mesh(config.mesh.sizes))
    gradient, layout = mesh_gradient(config, plan), plan.layout
    assert gradient is not None

    def one_device(params: Any, bias: Any, tokens: Any, weights: Any) -> Any:
        grads, figures = gradient(
            params, bias, tokens.reshape(-1, tokens.shape[-1]), weights.reshape(-1, weights.shape[-1]), jnp.int32(3)
        )
        return layout.reduce(grads), figures._replace(margins=None)

    parts = layout.map(lambda leaf, _: leaf.part_spec, plan.like.params)
    everywhere = jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(plan.specs.params, EVERYWHERE, TOKENS, TOKENS),
        out_specs=(parts, PartitionSpec()),
        check_vma=False,
    )
    params, bias = shaken(config)
    packed = layout.map(lambda leaf, array: leaf.to_rest(array), params)
    grads, figures = jax.jit(everywhere, compiler_options=QUICK)(packed, bias, *batch(config))
    return layout.map(lambda leaf, array: leaf.from_parts(array), grads), figures


def compare(config: RunConfig) -> dict[str, Any]:
    """The largest difference of gradients, of counts and of other figures, over each array's largest value."""
    (want, figures), (got, found) = on_one_device(), on_mesh(config)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path((want, figures._replace(margins=None))),
        jax.tree.leaves((got, found)),
        strict=True,
    )
    report: dict[str, Any] = {"dropped": int(np.sum(found.sums.sender_dropped))}
    for (path, a), b in pairs:
        kind = "gradients" if path[0].idx == 0 else "counts" if np.issubdtype(a.dtype, np.integer) else "figures"
        expected = np.asarray(a, np.float64)
        difference = float(np.nan_to_num(np.abs(expected - b).max() / max(np.abs(expected).max(), 1e-9), nan=np.inf))
        report[kind] = max(report.get(kind, (0.0, "")), (difference, jax.tree_util.keystr(path[1:])))
    return report


CASES: dict[str, RunConfig] = {
    "all_axes": run_config({"data": 2, "expert": 2, "pipe": 2, "optimizer": "sharded"}, 2),
    "gpipe": run_config({"pipe": 4, "pipe_schedule": "gpipe"}, 2),
    "sharded_weights": run_config({"data": 2, "expert": 2, "pipe": 2, "weights": "sharded"}, 2),
    "two_stages": run_config({"pipe": 2}, 4),
    "four_stages": run_config({"pipe": 4}, 2),
    "interleaved": run_config({"pipe": 2, "pipe_chunks": 2}, 2),
    "room_for_the_head": run_config({"pipe": 2, "pipe_schedule": "gpipe", "pipe_head_layers": 3}, 4),
}
"""The first three hold every part once; the others cost as much again and are run by name."""


def main() -> None:
    transformer.MAX_UNROLLED_LAYERS = 0  # one layer to compile
    reports = {}
    for name in sys.argv[1:] or CASES:
        print(name, file=sys.stderr, flush=True)
        reports[name] = compare(CASES[name])
        print(reports[name], file=sys.stderr, flush=True)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
