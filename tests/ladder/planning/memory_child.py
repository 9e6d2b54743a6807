"""Run by `test_memory_compiled.py` with eight CPU devices: bytes of compiled steps, and planned ones. Prints JSON.

Shapes are small, no two widths are alike, and there are more layers than are unrolled.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from rungwise.comm.mesh import build_mesh
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.mesh.lowered import collectives_of
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.ladder.mesh.mesh_step import lower_step
from rungwise.ladder.planning.memory import plan_memory
from rungwise.ladder.training.step import init_state, make_train_step

QUICK = {"xla_backend_optimization_level": 0}
"""Nothing runs; the buffers are the same."""

SHAPE: dict[str, Any] = {
    "hidden_dim": 64,
    "latent_dim": 40,
    "expert_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 9,
    "seq_len": 128,
    "window": 64,
}
EXPERTS_WEIGH: dict[str, Any] = {"seq_len": 32, "window": 16, "num_experts": 64, "expert_dim": 64, "latent_dim": 64}
"""Few tokens and many experts: the update needs most."""


WIDE_EXPERTS: dict[str, Any] = {"model": {"num_experts": 16, "expert_dim": 256}, "sequences_per_rank": 16}
"""What experts compute weighs most; four of them a rank."""


def variant(
    *,
    model: dict[str, Any] | None = None,
    transport: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    mesh: str = "",
    shape: dict[str, Any] = SHAPE,
    **run: Any,
) -> RunConfig:
    """The smallest rung of `tiny` in `shape`, changed."""
    base = load_family("tiny").rung_runs[0]
    changed = base.model.replace(**{**shape, **(model or {})})
    counts = {"num_experts": changed.num_experts, "top_k": changed.top_k}
    return base.replace(
        model=changed.model_dump(),
        transport={**vars(base.transport), **counts, **(transport or {})},
        execution={**base.execution.model_dump(), **(execution or {})},
        optimizer={**base.optimizer.model_dump(), **(optimizer or {})},
        mesh=base.mesh.changed(mesh).model_dump(),
        **run,
    )


_BLOCKS = {"rematerialize": "blocks"}
_RAGGED = {"name": "ragged", "num_waves": 1}
_UPDATE = {"model": EXPERTS_WEIGH, "execution": _BLOCKS}

CASES: dict[str, dict[str, Any]] = {
    "one device": {},
    "one device, blocks": {"execution": _BLOCKS},
    "one device, communication kept": {"execution": {"rematerialize": "blocks_keep_communication"}},
    "one device, bfloat16": {"execution": {"compute_dtype": "bfloat16"}},
    "one device, 2 microbatches": {"execution": {"microbatches": 2}},
    "one device, vocabulary 8,192": {"model": {"vocab_size": 8192}},
    "one device, ragged": {"transport": _RAGGED},
    "one device, expert_cell": {"transport": {"name": "expert_cell"}},
    "one device, dropless": {"transport": {"name": "dropless", "num_waves": 1}},
    "one device, Muon's update": _UPDATE,
    "one device, Adam's update": {**_UPDATE, "optimizer": {"name": "adamw"}},
    "data and expert": {"mesh": "data=2,expert=4", "execution": _BLOCKS},
    "sharded optimizer": {"mesh": "data=2,expert=4,optimizer=sharded", **_UPDATE},
    "ragged": {"mesh": "data=2,expert=4", "transport": _RAGGED},
    "sharded weights": {"mesh": "data=2,expert=4,weights=sharded,optimizer=sharded"},
    "pipeline": {"mesh": "expert=4,pipe=2", "execution": {**_BLOCKS, "microbatches": 2}},
    **{
        f"{waves} waves{', experts again' * again}": {
            **WIDE_EXPERTS,
            "mesh": "data=2,expert=4",
            "transport": {"num_waves": waves},
            "execution": {**_BLOCKS, "rematerialize_experts": again},
        }
        for waves in (1, 2, 4)
        for again in (False, True)
    },
}


def build(name: str) -> RunConfig:
    return variant(**CASES[name])


RESIDENT = ("dense_weights", "expert_weights", "optimizer_state", "batch_and_bias")


def lower(config: RunConfig) -> tuple[Any, dict[str, int]]:
    """A training step, lowered for the devices here, and the sizes of its mesh."""
    if config.mesh == MeshConfig():
        state = jax.eval_shape(lambda: init_state(config))
        tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
        return jax.jit(make_train_step(config), donate_argnums=0).lower(state, tokens), {"data": 1}
    return lower_step(config, build_mesh(config.mesh.sizes)), config.mesh.sizes


def compile_step(config: RunConfig) -> dict[str, int]:
    """Bytes of one device: arguments, temporaries, and the largest all-to-all over `expert`."""
    lowered, sizes = lower(config)
    found = [item for item in collectives_of(lowered, sizes) if item.kind == "all_to_all" and item.axes == ("expert",)]
    memory = lowered.compile(compiler_options=QUICK).memory_analysis()
    return {
        "resident": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "exchange": max((item.bytes // item.trips for item in found), default=0),
    }


def plan_step(config: RunConfig) -> dict[str, int]:
    """The same as planned."""
    plan = plan_memory(config, device="cpu")
    resident = sum(plan.phases["layers"][name] for name in RESIDENT)
    steps = {name: sum(parts.values()) for name, parts in plan.phases.items() if name != "evaluation"}
    return {"resident": resident, "temporaries": max(steps.values()) - resident, "exchange": plan.buffers.send}


def main() -> None:
    """Every case named on the command line, or all."""
    for name in sys.argv[1:] or CASES:
        config = build(name)
        print(json.dumps([name, {"compiled": compile_step(config), "planned": plan_step(config)}]), flush=True)


if __name__ == "__main__":
    main()
