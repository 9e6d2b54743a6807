"""Run by `test_pipeline_step.py` with eight CPU devices: gradients over pipelines against one device. Prints JSON."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rungwise.comm.mesh import build_mesh
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.gradients import make_gradient
from rungwise.ladder.mesh_step import EVERYWHERE, TOKENS, MeshPlan, mesh_gradient
from rungwise.ladder.step import init_state
from rungwise.model import transformer

transformer.MAX_UNROLLED_LAYERS = 0  # one layer to compile
QUICK = {"xla_backend_optimization_level": 0}
"""Small models spend their time compiling."""

SHAPE: dict[str, Any] = {
    "seq_len": 16,
    "vocab_size": 32,
    "hidden_dim": 16,
    "head_dim": 8,
    "window": 8,
    "expert_dim": 8,
    "latent_dim": 8,
}


def run_config(mesh: dict[str, Any], *, microbatches: int = 1, replicas: int = 4, **model: Any) -> RunConfig:
    """A small run of `tiny` on a mesh."""
    rung = load_family("tiny").rung_runs[0]
    return rung.replace(
        model=rung.model.replace(**{**SHAPE, **model}).model_dump(),
        data_replicas=replicas,
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


def on_one_device(config: RunConfig) -> Any:
    """Gradient and figures without a mesh."""
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

    specs = plan.specs.params
    everywhere = jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(specs, EVERYWHERE, TOKENS, TOKENS),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    params, bias = shaken(config)
    packed = layout.map(lambda leaf, array: leaf.to_rest(array), params)
    grads, figures = jax.jit(everywhere, compiler_options=QUICK)(packed, bias, *batch(config))
    return layout.map(lambda leaf, array: leaf.from_rest(array), grads), figures


def compare(config: RunConfig) -> dict[str, Any]:
    """Largest difference of every gradient over that gradient's largest value, and of every figure."""
    (want, figures), (got, found) = on_one_device(config), on_mesh(config)
    figures = figures._replace(margins=None)
    errors = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max() / np.abs(a).max()), want, got)
    worst = max(jax.tree_util.tree_leaves_with_path(errors), key=lambda pair: pair[1])
    report: dict[str, Any] = {"gradient": worst[1], "worst": jax.tree_util.keystr(worst[0])}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(figures), jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kind = "exact" if np.issubdtype(a.dtype, np.integer) else "figures"
        difference = float(np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(a).max(), 1e-9))
        if difference > report.get(kind, (0.0, ""))[0]:
            report[kind] = (difference, name)
    return report


OPTIONS: dict[str, Any] = {
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
"""Penalties of every layer, a head that is the first stage's embedding, and parameters of every kind."""

CASES: dict[str, RunConfig] = {
    "more_microbatches": run_config({"pipe": 2}, microbatches=4, num_layers=3, **OPTIONS),
    "gpipe": run_config(
        {"pipe": 2, "pipe_schedule": "gpipe", "pipe_head_layers": 2}, microbatches=4, num_layers=4, **OPTIONS
    ),
    "fewer_microbatches": run_config({"pipe": 4}, microbatches=2, num_layers=5),
    "gpipe_fewer": run_config({"pipe": 4, "pipe_schedule": "gpipe"}, num_layers=4),
    "interleaved": run_config({"pipe": 2, "pipe_chunks": 2}, microbatches=2, num_layers=5),
    "all_axes": run_config(
        {"data": 2, "expert": 2, "pipe": 2, "optimizer": "sharded"}, microbatches=2, num_layers=3, tied_head=True
    ),
}


def main() -> None:
    reports = {}
    for name in sys.argv[1:] or CASES:
        print(name, file=sys.stderr, flush=True)
        reports[name] = compare(CASES[name])
        print(reports[name], file=sys.stderr, flush=True)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
