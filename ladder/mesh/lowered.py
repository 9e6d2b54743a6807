"""Which collectives a lowered training step holds: by kind and mesh axis, times the trips of the loops around them.

Read off the StableHLO of `mesh_step.py`, whose step is manual over all axes, so that no partitioner adds any
later. Needs neither devices nor memory: the reference's hero on 704 ranks takes as long as a small model of its depth.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "collective_permute", "ragged_all_to_all")


@dataclass(frozen=True)
class Collective:
    """One collective of the text."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes whose ranks take part together."""
    trips: int
    """Times one step runs it: the product of the trip counts of the loops around it."""
    shape: tuple[int, ...]
    """Of the operand on one rank."""
    itemsize: int

    @property
    def bytes(self) -> int:
        """Of the operand, all trips together."""
        return self.trips * math.prod(self.shape) * self.itemsize


def collectives_of(lowered: Any, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of a lowered step, in the order of the text; a function called twice is read twice.

    Args:
        lowered: a `jax.stages.Lowered`.
        sizes: ranks of each mesh axis, the last fastest.
    Raises:
        ValueError: a loop whose trip count does not stand in the text, or ranks grouped along no axis.
    """
    module = lowered.compiler_ir("stablehlo")
    functions = {_name(op): op for op in module.body.operations if op.operation.name == "func.func"}
    return list(_walk(functions["main"], functions, dict(sizes), 1))


def count_collectives(found: list[Collective], *, floor: int = 0) -> dict[tuple[str, tuple[str, ...]], int]:
    """Calls of one step by kind and axes.

    Args:
        floor: operands of fewer bytes are left out: sums of single figures.
    """
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for item in found:
        if math.prod(item.shape) * item.itemsize >= floor:
            counts[item.kind, item.axes] = counts.get((item.kind, item.axes), 0) + item.trips
    return counts


def _name(function: Any) -> str:
    return str(function.attributes["sym_name"]).strip('"')


def _walk(holder: Any, functions: Mapping[str, Any], sizes: dict[str, int], trips: int) -> Iterator[Collective]:
    for region in holder.operation.regions:
        for block in region:
            for op in block.operations:
                name = op.operation.name
                if name in ("func.call", "call"):
                    callee = str(op.attributes["callee"]).lstrip("@").strip('"')
                    yield from _walk(functions[callee], functions, sizes, trips)
                elif name == "stablehlo.while":
                    yield from _in_loop(op, functions, sizes, trips)
                else:
                    yield from _read(op, name, sizes, trips)
                    yield from _walk(op, functions, sizes, trips)


def _in_loop(op: Any, functions: Mapping[str, Any], sizes: dict[str, int], trips: int) -> Iterator[Collective]:
    """Collectives of a loop's body, times its trips. Only where there are any need these be known."""
    condition, body = op.operation.regions
    inside = list(_walk(_Region(body), functions, sizes, 1))
    if not inside:
        return
    count = _trip_count(op, condition)
    for item in inside:
        yield Collective(item.kind, item.axes, item.trips * count * trips, item.shape, item.itemsize)


class _Region:
    """Makes a region look like an operation that holds it."""

    def __init__(self, region: Any) -> None:
        self.operation = self
        self.regions = (region,)


def _trip_count(op: Any, condition: Any) -> int:
    """Of a counting loop: i < n from a constant on, by one."""
    (block,) = list(condition)
    compare = next(inner for inner in block.operations if inner.operation.name == "stablehlo.compare")
    left, right = compare.operands
    limit = _constant(right)
    arguments = list(block.arguments)
    position = next((index for index, argument in enumerate(arguments) if argument == left), None)
    start = None if position is None else _constant(op.operands[position])
    if limit is None or start is None:
        raise ValueError("a loop around collectives has no trip count in its text; use scan or a fixed fori_loop")
    return limit - start


def _constant(value: Any) -> int | None:
    owner = value.owner
    operation = getattr(owner, "operation", owner)
    if getattr(operation, "name", None) != "stablehlo.constant":
        return None
    return int(np.array(operation.attributes["value"]).reshape(-1)[0])


def _read(op: Any, name: str, sizes: dict[str, int], trips: int) -> Iterator[Collective]:
    kind = name.removeprefix("stablehlo.")
    if kind == "custom_call":
        kind = str(op.attributes["call_target_name"]).strip('"')
    if kind not in KINDS:
        return
    operand = op.operands[0].type
    shape = tuple(operand.get_dim_size(dim) for dim in range(operand.rank))
    yield Collective(kind, _axes(op, kind, sizes), trips, shape, _itemsize(str(operand.element_type)))


def _itemsize(element: str) -> int:
    """Bytes of `bf16`, `f32`, `i1`, `ui8`, `f8E4M3FN`."""
    bits = re.match(r"[a-z]+(\d+)", element)
    return max(1, int(bits[1]) // 8) if bits else 1


def _axes(op: Any, kind: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """Mesh axes of a collective: by name where the text names them, else from the ranks of its first group."""
    attributes = op.operation.attributes
    if kind == "collective_permute":
        return _axes_of(np.array(attributes["source_target_pairs"])[0], sizes)
    groups = attributes["replica_groups"] if "replica_groups" in attributes else attributes["backend_config"]
    named = re.findall(r'axis_ref<name = "(\w+)"', str(groups)) if "replica_groups" in attributes else []
    if named:
        return tuple(named)
    if "replica_groups" not in attributes:
        groups = groups["replica_groups"]
    members = np.array(groups)[0]
    axes = _axes_of(members, sizes)
    if math.prod(sizes[axis] for axis in axes) != len(members):
        raise ValueError(f"{kind} over {len(members)} ranks, no axes of {sizes}; give the sizes of the step's own mesh")
    return axes


def _axes_of(members: np.ndarray, sizes: dict[str, int]) -> tuple[str, ...]:
    """Axes along which some ranks differ."""
    places = np.unravel_index(members.reshape(-1), tuple(sizes.values()))
    return tuple(axis for axis, place in zip(sizes, places, strict=True) if len(set(place.tolist())) > 1)
