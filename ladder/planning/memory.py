"""Bytes one device needs for a training step, by part, before anything is allocated. Imports no jax.

A run needs the most in one of four phases: while layers run backwards, while the loss is differentiated, while the
optimizer moves the weights, or in the evaluation with drops. Weights and optimizer state are there in all of them.

    layers     = saved activations of all layers + gradients + work of one layer
    loss       = saved activations of all layers + 2 × logits + gradient of the head
    update     = gradients + work of the optimizer + work of the balancing bias
    evaluation = the larger of a microbatch's logits and one layer's work on it

What is exact, what is estimated and how far off it was: `docs/memory.md`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rungwise.comm.buffers import row_bytes
from rungwise.comm.pipeline_schedules import program_of
from rungwise.ladder.changing.phases import Phase, has_phases, plan_phases
from rungwise.ladder.family import RunConfig
from rungwise.ladder.mesh.mesh_config import MeshConfig, check_mesh
from rungwise.ladder.planning.memory_layer import (
    WIDE,
    DeviceShare,
    Parts,
    experts_at_once,
    kept_activations,
    rows_of,
    saved_activations,
)
from rungwise.ladder.planning.memory_weights import DeviceWeight, device_weights, is_matrix, moments, square_share

Device = Literal["cpu", "accelerator"]

LAYER_WORK = {"nothing": 1.0, "blocks": 1.35, "blocks_keep_communication": 1.35, "blocks_offload": 1.35}
"""Bytes of the layer at work over what a layer saves where nothing is computed again: measured on CPU, where values of
a layer computed again lie beside their gradients."""

EVALUATION_WORK = 0.4
"""Bytes of the layer at work in a forward pass alone, over the same. Measured on CPU."""

MUON_COPIES, MUON_SQUARES, ADAM_COPIES = 3.0, 1.5, 1.5
"""Float32 values the update holds beside gradients: Newton-Schulz, copies of a matrix [m, n] and of its square of the
smaller side; Adam, copies of a weight. Measured on CPU, where all parameters are moved side by side."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of `80GB`, `138GiB`, `1.5e10`.

    Raises:
        ValueError: not a number and a unit.

    >>> parse_bytes("80GB"), parse_bytes("138 GiB")
    (80000000000, 148176371712)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?B?)\s*", text.strip(), re.IGNORECASE)
    try:
        size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    except (ValueError, KeyError):
        size = 0
    if size < 1:
        raise ValueError(f"device memory {text!r} is no amount; write 80GB or 138GiB")
    return size


@dataclass(frozen=True, kw_only=True)
class TransportBuffers:
    """Bytes of one rank and layer in one exchange; there are `waves` exchanges each way."""

    waves: int
    send: int
    """Largest payload out, own share included; as much comes back to where it was sent from."""
    receive: int
    back: int
    """Largest payload that the way back brings."""
    expert_rows: int
    """Rows in and out of the experts and their two hidden products, of what is computed at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of the fullest device of a run's mesh. Estimated parts are marked in `docs/memory.md`."""

    run: str
    mesh: str
    transport: str
    device: Device
    tokens_per_device: int
    """Of one microbatch."""
    phases: dict[str, Parts]
    """Bytes by part in each phase: layers, loss, update, evaluation. Resident parts are in all."""
    buffers: TransportBuffers
    host: int
    """Bytes of optimizer state in the host's memory."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def total(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def largest_part(self) -> str:
        parts = self.phases[self.peak_phase]
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        """What `ladder plan --json` prints of it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "buffers"}
        return fields | {
            "buffers": dict(vars(self.buffers)),
            "peak_phase": self.peak_phase,
            "total": self.total,
            "largest_part": self.largest_part,
        }


def plan_memory(
    config: RunConfig, mesh: MeshConfig | None = None, *, device: Device = "accelerator", fused: bool = False
) -> MemoryPlan:
    """Bytes of the fullest device in the phase of the run that needs most, for its own mesh or another.

    Args:
        device: type of products where the family leaves it to the device, and the form of grouped products.
        fused: as if attention scores and whole logits were never stored, which needs kernels this project lacks.
    Raises:
        ValueError: the mesh does not divide what it deals out.
    """
    mesh = config.mesh if mesh is None else mesh
    check_mesh(mesh, run=config.run, data_replicas=config.data_replicas, num_ranks=config.transport.num_ranks)
    parts = plan_phases(config) if has_phases(config) else [Phase(0, config.steps, config)]
    plans = [_plan_phase(part.config, mesh, device=device, fused=fused) for part in parts]
    return max(plans, key=lambda plan: plan.total)


def _plan_phase(config: RunConfig, mesh: MeshConfig, *, device: Device, fused: bool) -> MemoryPlan:
    share = device_share(config, mesh, device=device, fused=fused)
    weights = device_weights(config, mesh)
    resident, host = _resident(config, mesh, weights)
    kept = _kept(config, mesh, share)
    sums = {"gradient_sums": sum(weight.rest for weight in weights.values()) * WIDE if _adds_up(config, mesh) else 0}
    held = sum(weight.rest for weight in weights.values()) * _param_bytes(config)
    parts = sum(weight.part for weight in weights.values()) * WIDE
    work = _layer_work(config, share) + _gathered(weights, share)
    phases = {
        "layers": resident | kept | sums | {"gradients": held, "layer_work": work},
        "loss": resident | kept | sums | _loss(config, share, fused=fused),
        "update": resident
        | {"gradients": parts, "update_work": _update_work(config, weights), "bias_work": 2 * kept["saved_margins"]},
        "evaluation": resident | _evaluation(config, share, fused=fused),
    }
    return MemoryPlan(
        run=config.run,
        mesh=str(mesh),
        transport=config.transport.name,
        device=device,
        tokens_per_device=share.tokens,
        phases={phase: {name: size for name, size in parts.items() if size} for phase, parts in phases.items()},
        buffers=_buffers(config, share),
        host=host,
    )


def device_share(
    config: RunConfig, mesh: MeshConfig, *, device: Device = "accelerator", fused: bool = False
) -> DeviceShare:
    """What one device of a mesh has of one microbatch."""
    execution, transport = config.execution, config.transport
    wide = execution.compute_dtype == "float32" or (execution.compute_dtype == "by_device" and device == "cpu")
    replicas = config.data_replicas // mesh.data // microbatches(config, mesh)
    ranks = replicas * transport.num_ranks // mesh.expert
    return DeviceShare(
        tokens=ranks * config.sequences_per_rank * config.model.seq_len,
        ranks=ranks,
        experts=config.model.num_experts // mesh.expert,
        itemsize=4 if wide else 2,
        copied=wide != (execution.param_dtype == "float32"),
        accelerator=device == "accelerator",
        on_mesh=mesh.expert > 1,
        fused=fused,
        experts_again=execution.rematerialize_experts,
        mxfp8=execution.expert_matmul == "mxfp8",
    )


def microbatches(config: RunConfig, mesh: MeshConfig) -> int:
    """Parts in which one device runs its replicas, as `training/gradients.py` has it."""
    return math.gcd(config.execution.microbatches, config.data_replicas // mesh.data)


def _adds_up(config: RunConfig, mesh: MeshConfig) -> bool:
    """Whether gradients of microbatches are added in arrays of their own."""
    return mesh.pipe > 1 or microbatches(config, mesh) > 1


def _param_bytes(config: RunConfig) -> int:
    return 4 if config.execution.param_dtype == "float32" else 2


def layers_here(config: RunConfig, mesh: MeshConfig) -> int:
    """Layers of the fullest stage, all its chunks, each with as many rows as the fullest."""
    if mesh.pipe == 1:
        return config.model.num_layers
    return mesh.pipe_chunks * max(map(len, mesh.layers(config.model.num_layers)))


def _resident(config: RunConfig, mesh: MeshConfig, weights: Mapping[str, DeviceWeight]) -> tuple[Parts, int]:
    """What lies on the device between steps, and bytes of it that lie in the host's memory instead."""
    size = _param_bytes(config)
    experts = sum(weight.rest for name, weight in weights.items() if ".experts." in name)
    dense = sum(weight.rest for weight in weights.values()) - experts
    kept = sum(weight.part * moments(name, weight.shape, config.optimizer.name) for name, weight in weights.items())
    state, host = kept * size, 0
    if mesh.offload == "optimizer":
        state, host = 0, state
    batch = config.batch_size // (mesh.data * mesh.expert) * (config.model.seq_len + 1) * WIDE
    bias = layers_here(config, mesh) * config.model.num_experts * WIDE
    parts = {"dense_weights": dense * size, "expert_weights": experts * size, "optimizer_state": state}
    return parts | {"batch_and_bias": batch + bias}, host


def _gathered(weights: Mapping[str, DeviceWeight], share: DeviceShare) -> int:
    """Weights of one layer made whole from slices, and their gradient."""
    return 2 * share.itemsize * sum(weight.gathered for name, weight in weights.items() if name.startswith("layers."))


def _kept(config: RunConfig, mesh: MeshConfig, share: DeviceShare) -> Parts:
    """Activations of all layers that wait for the backward pass; margins wait for the end of the step."""
    of_layer = kept_activations(config.model, config.transport, share, config.execution.rematerialize)
    layers, parts = layers_here(config, mesh), microbatches(config, mesh)
    kept = {f"saved_{name}": layers * size for name, size in of_layer.items()}
    kept["saved_margins"] *= parts
    carries = _carries(mesh, parts)
    return kept | {"pipeline_carries": carries * share.tokens * config.model.hidden_dim * share.itemsize}


def _carries(mesh: MeshConfig, parts: int) -> int:
    """Inputs of a stage and cotangents that wait for their turn, in microbatches."""
    if mesh.pipe == 1:
        return 0
    if mesh.pipe_schedule == "gpipe":
        return parts * mesh.pipe_chunks + mesh.pipe - 1
    slots = program_of(mesh.schedule(parts))
    return slots.num_inputs + slots.num_cotangents


def _layer_work(config: RunConfig, share: DeviceShare) -> int:
    whole = sum(saved_activations(config.model, config.transport, share).values())
    if share.experts_again:
        whole += experts_at_once(config.model, config.transport, share)
    return round(LAYER_WORK[config.execution.rematerialize] * whole)


def _loss(config: RunConfig, share: DeviceShare, *, fused: bool) -> Parts:
    model = config.model
    logits = 0 if fused else 2 * share.tokens * model.vocab_size * WIDE
    return {"logits": logits, "head_gradient": model.vocab_size * model.hidden_dim * _param_bytes(config)}


def _evaluation(config: RunConfig, share: DeviceShare, *, fused: bool) -> Parts:
    logits = 0 if fused else share.tokens * config.model.vocab_size * WIDE
    forward = dataclasses.replace(share, experts_again=False)  # there is no backward pass
    work = round(EVALUATION_WORK * sum(saved_activations(config.model, config.transport, forward).values()))
    return {"logits": logits} if logits > work else {"layer_work": work}


def _update_work(config: RunConfig, weights: Mapping[str, DeviceWeight]) -> int:
    muon, values = config.optimizer.name != "adamw", 0.0
    for name, weight in weights.items():
        if muon and is_matrix(name, weight.shape):
            values += weight.part * (MUON_COPIES + MUON_SQUARES * square_share(name, weight.shape))
        else:
            values += weight.part * ADAM_COPIES
    return round(WIDE * values)


def _buffers(config: RunConfig, share: DeviceShare) -> TransportBuffers:
    transport, width = config.transport, config.model.routed_dim
    rows = rows_of(config.model, transport, share)
    travelling = row_bytes(transport, width=width, itemsize=share.itemsize)
    once = transport.name in ("dropless", "ragged")
    back = rows.received if transport.name == "dropless" else rows.sent_at_once
    return TransportBuffers(
        waves=1 if once or transport.num_ranks == 1 else transport.num_waves,
        send=travelling * rows.sent_at_once,
        receive=travelling * (rows.received if once else rows.sent_at_once),
        back=travelling * back,
        expert_rows=share.itemsize * rows.computed_at_once * 2 * (width + config.model.expert_dim),
    )
