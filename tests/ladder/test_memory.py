"""Memory planned before anything runs: against shapes, what JAX keeps, and compiled steps on one device."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import tree_flatten_with_path

from rungwise.comm import sharded
from rungwise.ladder import memory_weights
from rungwise.ladder.family import RunConfig, load_family, shipped_families
from rungwise.ladder.gradients import make_gradient
from rungwise.ladder.memory import device_share, parse_bytes, plan_memory
from rungwise.ladder.memory_layer import kept_activations
from rungwise.ladder.memory_weights import device_weights, parameter_shapes
from rungwise.ladder.mesh_config import MeshConfig
from rungwise.ladder.mesh_layout import build_layout
from rungwise.ladder.parameter_groups import parameter_name
from rungwise.ladder.step import compute_dtype, init_state, make_train_step
from rungwise.model.attention import QUERY_BLOCK
from rungwise.model.transformer import abstract_params

SHAPE: dict[str, Any] = {
    "hidden_dim": 64,
    "latent_dim": 40,
    "expert_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 10,
    "seq_len": 256,
    "window": 128,
}
"""No two widths alike, and more layers than are unrolled."""

EVERY_OPTION: dict[str, Any] = {
    "attention_gate": True,
    "exclusive_attention": True,
    "gated_norm_rank": 16,
    "embed_norm": True,
    "short_conv_kernel": 4,
    "short_conv_sites": ("key", "value", "attention", "moe"),
    "learned_query_key_norm": False,
    "global_kv_heads": 1,
}


def variant(
    *,
    model: dict[str, Any] | None = None,
    transport: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    mesh: str = "",
    **run: Any,
) -> RunConfig:
    """The smallest rung of `tiny` in `SHAPE`, changed."""
    base = load_family("tiny").rung_runs[0]
    shape = base.model.replace(**SHAPE, **(model or {}))
    counts = {"num_experts": shape.num_experts, "top_k": shape.top_k}
    return base.replace(
        model=shape.model_dump(),
        transport={**vars(base.transport), **counts, **(transport or {})},
        execution={**base.execution.model_dump(), **(execution or {})},
        optimizer={**base.optimizer.model_dump(), **(optimizer or {})},
        mesh=base.mesh.changed(mesh).model_dump(),
        **run,
    )


ONE_WAVE = {"num_waves": 1}
RESIDUALS: dict[str, dict[str, Any]] = {
    "pooled_wave": {},
    "every option": {"model": EVERY_OPTION},
    "no latent width": {"model": {"latent_dim": None}},
    "no shared experts": {"model": {"num_shared_experts": 0}},
    "softmax gates": {"model": {"gate": "softmax"}},
    "ragged": {"transport": {"name": "ragged", **ONE_WAVE}},
    "expert_cell": {"transport": {"name": "expert_cell", **ONE_WAVE}},
    "expert_cell in two waves": {"transport": {"name": "expert_cell"}},
    "dropless": {"transport": {"name": "dropless", **ONE_WAVE}},
    "one rank": {"transport": {"num_ranks": 1}, "data_replicas": 8},
    "two microbatches": {"execution": {"microbatches": 2}},
    "blocks": {"execution": {"rematerialize": "blocks"}},
    "blocks, pooled_wave kept": {"execution": {"rematerialize": "blocks_keep_communication"}},
    "blocks, ragged kept": {
        "transport": {"name": "ragged", **ONE_WAVE},
        "execution": {"rematerialize": "blocks_keep_communication"},
    },
    "blocks, dropless kept": {
        "transport": {"name": "dropless", **ONE_WAVE},
        "execution": {"rematerialize": "blocks_keep_communication"},
    },
}


def _residual_bytes(config: RunConfig) -> float:
    """Bytes of what the scan over layers hands to the backward pass, a layer."""
    state = jax.eval_shape(lambda: init_state(config))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
    gradient = make_gradient(config, compute_dtype(config.execution))
    traced = jax.make_jaxpr(lambda params, bias, batch: gradient(params, bias, batch, None, jnp.zeros((), jnp.int32)))
    layers, found = config.model.num_layers, []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan" and equation.params["length"] == layers:
                if not equation.params["reverse"]:
                    stacked = [out.aval for out in equation.outvars if out.aval.shape[:1] == (layers,)]
                    found.append(sum(aval.size * aval.dtype.itemsize for aval in stacked))
            for value in equation.params.values():
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    walk(getattr(value, "jaxpr", value))

    walk(traced(state.params, state.bias, tokens).jaxpr)
    assert len(found) == 1
    return found[0] / layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", RESIDUALS)
def test_saved_activations_are_what_jax_hands_to_the_backward_pass(case: str, dtype: str):
    changes = RESIDUALS[case]
    config = variant(**{**changes, "execution": {**changes.get("execution", {}), "compute_dtype": dtype}})
    share = device_share(config, config.mesh, device="cpu")
    planned = kept_activations(config.model, config.transport, share, config.execution.rematerialize)
    assert sum(planned.values()) == pytest.approx(_residual_bytes(config), rel=0.005)


@pytest.mark.parametrize("name", shipped_families())
def test_parameter_shapes_are_the_model_s_of_every_shipped_run(name: str):
    for run in load_family(name).runs:
        leaves = tree_flatten_with_path(abstract_params(run.model))[0]
        assert parameter_shapes(run.model) == {parameter_name(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("optimizer", ["adamw", "muonh"])
@pytest.mark.parametrize(
    "mesh",
    [
        "",
        "data=2,expert=4",
        "data=2,expert=4,optimizer=sharded",
        "data=11,expert=64,optimizer=sharded",
        "data=11,expert=64,weights=sharded",
        "data=11,weights=sharded,optimizer=sharded",
        "expert=4,pipe=5",
        "data=2,pipe=4,optimizer=sharded",
    ],
)
def test_what_a_device_holds_is_what_the_layout_gives_it(mesh: str, optimizer: str):
    placed = MeshConfig().changed(mesh)
    model = load_family("marin").rung_runs[0].model
    config = load_family("marin").hero_run
    config = config.replace(model=model.model_dump(), optimizer={**config.optimizer.model_dump(), "name": optimizer})
    params = abstract_params(model)
    layout = build_layout(
        params,
        placed.sizes,
        optimizer=optimizer,
        weights=placed.weights,
        optimizer_state=placed.optimizer,
    )
    planned = device_weights(config, placed)
    for path, leaf in tree_flatten_with_path(params)[0]:
        name = parameter_name(path)
        rest = jax.eval_shape(layout.leaves[name].to_rest, leaf)
        parts = jax.eval_shape(layout.leaves[name].to_parts, leaf)
        held = {
            "rest": _on_one(rest.shape, layout.leaves[name].rest_spec, placed),
            "part": _on_one(parts.shape, layout.leaves[name].part_spec, placed),
        }
        assert {"rest": planned[name].rest, "part": planned[name].part} == held, name


def _on_one(shape: tuple[int, ...], spec: Any, mesh: MeshConfig) -> int:
    """Elements of one device."""
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(shape) // math.prod(mesh.sizes[axis] for axis in axes)


def test_constants_of_other_files_are_theirs():
    assert memory_weights.MOST_PADDING == sharded.MOST_PADDING
    from rungwise.ladder import memory_layer

    assert memory_layer.QUERY_BLOCK == QUERY_BLOCK
