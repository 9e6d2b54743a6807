"""Whether a family's runs fit their devices: for `ladder plan` by what is asked, for `ladder run` by the device itself.

Imports no jax before a device is asked.
"""

import os
from dataclasses import dataclass
from typing import Any

from rungwise.comm.config import TRANSPORTS
from rungwise.ladder.family import ExecutionConfig, LadderConfig, RunConfig
from rungwise.ladder.planning.memory import Device, MemoryPlan, parse_bytes, plan_memory

MEMORY_VARIABLE = "RUNGWISE_DEVICE_MEMORY"
"""Environment variable with the memory of a device that does not say itself, such as 64GB."""

REMATERIALIZE = ("nothing", "blocks_keep_communication", "blocks")


@dataclass(frozen=True, kw_only=True)
class FamilyMemory:
    """Bytes per device of every run, and of the hero under other transports and choices of what is computed again."""

    device: Device
    device_memory: int | None
    runs: dict[str, dict[str, Any]]
    """`MemoryPlan.to_dict()` by run, with `fits` and `short_by` where the device's memory is given."""
    configurations: list[dict[str, Any]]
    """Of the hero, the largest last: transport, rematerialize, total and the same two."""


def family_memory(
    config: LadderConfig,
    *,
    mesh: str | None = None,
    execution: str | None = None,
    device_memory: int | None = None,
    fused: bool = False,
) -> FamilyMemory:
    """Memory of a family's runs as they are, or on another mesh or carried out in another way.

    Args:
        mesh: changes to each run's mesh, as `data=2,expert=4`; a rung takes as many devices of `data` as divide its
            replicas.
        execution: changes to each run's execution, as `rematerialize=blocks,microbatches=2`.
        device_memory: bytes; None says nothing about what fits.
        fused: as `plan_memory`.
    Raises:
        ValueError: the mesh does not divide a run, or a field is unknown.
    """
    runs = {run.run: _changed(run, mesh, execution) for run in config.runs}
    spread = any(run.mesh.num_devices > 1 for run in runs.values())
    asked = device_memory is not None or config.plan_only or config.execution.compute_dtype == "bfloat16"
    device: Device = "accelerator" if spread or asked else "cpu"
    plans = {name: plan_memory(run, device=device, fused=fused) for name, run in runs.items()}
    made = [_variant(runs["hero"], name, choice) for name in TRANSPORTS for choice in REMATERIALIZE]
    others = [plan_memory(variant, device=device, fused=fused) for variant in made]
    configurations = [
        {"transport": plan.transport, "rematerialize": variant.execution.rematerialize, "total": plan.total}
        | _verdict(plan, device_memory)
        for variant, plan in zip(made, others, strict=True)
    ]
    return FamilyMemory(
        device=device,
        device_memory=device_memory,
        runs={name: plan.to_dict() | _verdict(plan, device_memory) for name, plan in plans.items()},
        configurations=sorted(configurations, key=lambda row: row["total"]),
    )


def _changed(run: RunConfig, mesh: str | None, execution: str | None) -> RunConfig:
    placed = run.mesh.changed(mesh or "")
    if run.role == "rung":
        divisors = (size for size in range(1, placed.data + 1) if run.data_replicas % size == 0)
        placed = placed.replace(data=max(divisors))
    done = run.execution.replace(**_fields(run.execution, execution or ""))
    return run.replace(mesh=placed.model_dump(), execution=done.model_dump())


def _fields(record: ExecutionConfig, text: str) -> dict[str, str]:
    """`field=value` pairs of a record.

    Raises:
        ValueError: one is no field of it.
    """
    pairs = (part.partition("=") for part in filter(None, text.split(",")))
    changes = {name: value for name, _, value in pairs}
    known = type(record).model_fields
    for name in changes:
        if name not in known:
            raise ValueError(f"execution {text!r}: {name!r} is no field=value; fields: {', '.join(known)}")
    return changes


def _variant(hero: RunConfig, transport: str, rematerialize: str) -> RunConfig:
    fields = {**vars(hero.transport), "name": transport}
    if transport == "dropless":
        fields |= {"payload": "compute"}
    if transport in ("ragged", "dropless"):
        fields |= {"spill": 0}
    execution = hero.execution.replace(rematerialize=rematerialize)
    return hero.replace(transport=fields, execution=execution.model_dump(), mesh=hero.mesh.model_dump())


def _verdict(plan: MemoryPlan, device_memory: int | None) -> dict[str, Any]:
    if device_memory is None:
        return {"fits": None, "short_by": None}
    return {"fits": plan.total <= device_memory, "short_by": max(0, plan.total - device_memory)}


def refusal(plan: MemoryPlan, device_memory: int) -> str | None:
    """One line that names run, need and remedy where a run does not fit."""
    if plan.total <= device_memory:
        return None
    remedies = {
        "logits": "raise execution.microbatches",
        "update_work": "set mesh.optimizer = 'sharded', or use more devices",
        "optimizer_state": "set mesh.optimizer = 'sharded'",
        "expert_weights": "raise mesh.expert",
        "dense_weights": "set mesh.weights = 'sharded'",
    }
    advice = remedies.get(plan.largest_part, "set execution.rematerialize = 'blocks' or raise execution.microbatches")
    return (
        f"run {plan.run} needs about {plan.total / 1e9:.3g} GB a device on {plan.mesh}, the device has"
        f" {device_memory / 1e9:.3g} GB (largest part: {plan.largest_part}); {advice}"
    )


def check_device_memory(config: RunConfig) -> None:
    """Refuses a run that does not fit its device, before anything is allocated. Silent where the size is not known.

    Raises:
        ValueError: it does not fit; the message says by how much and what would help.
    """
    size, device = device_memory()
    if size is None:
        return
    message = refusal(plan_memory(config, device=device), size)
    if message is not None:
        raise ValueError(message)


def device_memory() -> tuple[int | None, Device]:
    """Bytes that this process may use of a device, None where nothing says; and its kind."""
    import jax

    local = jax.local_devices()[0]
    device: Device = "cpu" if local.platform == "cpu" else "accelerator"
    stated = os.environ.get(MEMORY_VARIABLE)
    if stated:
        return parse_bytes(stated), device
    stats = local.memory_stats() or {}
    return stats.get("bytes_limit"), device
