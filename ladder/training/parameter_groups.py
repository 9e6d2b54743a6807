"""Every parameter of the model by name: the group its norms count in, and which of its axes form a matrix.

A parameter that is not named here is refused: no rule may reach a weight by accident.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, tree_flatten_with_path, tree_map_with_path
from optax.contrib import MuonDimensionNumbers

from rungwise.comm.mesh import Axes, add_over

Tree = Any

Spread = Callable[[str], Axes]
"""Mesh axes over which the parts of the parameter of this name lie; none where every rank holds all of it."""


class Parameter(NamedTuple):
    """What the optimizer knows of a parameter besides its values."""

    group: str
    """Group whose gradient, update and parameter norms it counts in."""
    axes: MuonDimensionNumbers | None = None
    """Axes a product sums over, and those it yields; all others are a stack of matrices. None: not a matrix."""


_NORM_GATE = Parameter("norms", MuonDimensionNumbers(reduction_axis=-2, output_axis=-1))
_PROJECTION = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
_HEADS = Parameter("attention", MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)))

PARAMETERS: Mapping[str, Parameter] = {
    "embed": Parameter("embed"),
    "embed_norm": Parameter("norms"),
    "embed_norm_gate.down": _NORM_GATE,
    "embed_norm_gate.up": _NORM_GATE,
    "layers.attention_norm": Parameter("norms"),
    "layers.attention_norm_gate.down": _NORM_GATE,
    "layers.attention_norm_gate.up": _NORM_GATE,
    "layers.attention.query": _HEADS,
    "layers.attention.key": _HEADS,
    "layers.attention.value": _HEADS,
    "layers.attention.out": Parameter("attention", MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3)),
    "layers.attention.query_norm": Parameter("norms"),
    "layers.attention.key_norm": Parameter("norms"),
    "layers.attention.gate": Parameter("gates"),
    "layers.conv.key": Parameter("attention"),
    "layers.conv.value": Parameter("attention"),
    "layers.conv.attention": Parameter("attention"),
    "layers.conv.moe": Parameter("experts"),
    "layers.moe_norm": Parameter("norms"),
    "layers.moe_norm_gate.down": _NORM_GATE,
    "layers.moe_norm_gate.up": _NORM_GATE,
    "layers.moe.router": Parameter("router"),
    "layers.moe.latent_down": Parameter("experts", _PROJECTION),
    "layers.moe.latent_norm": Parameter("norms"),
    "layers.moe.latent_up": Parameter("experts", _PROJECTION),
    "layers.moe.experts.gate_up": Parameter("experts", MuonDimensionNumbers(reduction_axis=2, output_axis=4)),
    "layers.moe.experts.down": Parameter("experts", MuonDimensionNumbers(reduction_axis=2, output_axis=3)),
    "layers.moe.shared.gate_up": Parameter("shared", MuonDimensionNumbers(reduction_axis=1, output_axis=3)),
    "layers.moe.shared.down": Parameter("shared", _PROJECTION),
    "final_norm": Parameter("norms"),
    "final_norm_gate.down": _NORM_GATE,
    "final_norm_gate.up": _NORM_GATE,
    "head": Parameter("head"),
}

MATRIX_AXES: Mapping[str, MuonDimensionNumbers] = {
    name: parameter.axes for name, parameter in PARAMETERS.items() if parameter.axes is not None
}
"""Axes of every parameter that is a matrix or a stack of them, without the head, which no Muon moves."""


def frobenius_axes(axes: MuonDimensionNumbers) -> tuple[int, ...]:
    """All axes of one matrix of a stack."""
    return (*_as_tuple(axes.reduction_axis), *_as_tuple(axes.output_axis))


def fans(shape: tuple[int, ...], axes: MuonDimensionNumbers) -> tuple[int, int]:
    """Rows and columns of one matrix of a stack: what a product sums over, and what it yields."""
    rows, columns = (
        math.prod(shape[axis] for axis in _as_tuple(part)) for part in (axes.reduction_axis, axes.output_axis)
    )
    return rows, columns


def _as_tuple(axes: Sequence[int] | int) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def parameter_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a parameter from its place in the tree.

    Raises:
        ValueError: the name is not in `PARAMETERS`.
    """
    name = ".".join(str(key.key) for key in path if isinstance(key, DictKey))
    if name not in PARAMETERS:
        raise ValueError(f"parameter {name!r} has no group and no rule; name it in ladder/training/parameter_groups.py")
    return name


def parameter_group(path: tuple[Any, ...]) -> str:
    """Group whose norms a parameter counts in, by its place in the tree."""
    return PARAMETERS[parameter_name(path)].group


def matrix_axes(params: Tree) -> Tree:
    """Axes of the matrices of every parameter, None for one that is not a matrix."""
    return tree_map_with_path(lambda path, _: PARAMETERS[parameter_name(path)].axes, params)


def whole(name: str) -> Axes:
    """Spread of parameters on one device."""
    return ()


def group_norms(tree: Tree, spread: Spread = whole) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Euclidean norm of a whole tree named like the parameters, and of each parameter group.

    Args:
        spread: a square is added over the ranks that hold the parts of a leaf, and counted once where all hold it.
    """
    squares = added_by_group(
        ((path, jnp.sum(jnp.square(leaf.astype(jnp.float32)))) for path, leaf in tree_flatten_with_path(tree)[0]),
        spread,
    )
    total = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
    return total, {group: jnp.sqrt(square) for group, square in squares.items()}


def added_by_group(
    figures: Iterable[tuple[tuple[Any, ...], jax.Array]], spread: Spread = whole
) -> dict[str, jax.Array]:
    """Sum of a figure of every parameter by group, over all ranks: one sum over ranks for every set of axes.

    Args:
        figures: place in the tree, and this rank's figure of its part.
    """
    own: dict[Axes, dict[str, jax.Array]] = {}
    groups: dict[str, jax.Array] = {}
    for path, figure in figures:
        name = parameter_name(path)
        group, sums = PARAMETERS[name].group, own.setdefault(spread(name), {})
        groups.setdefault(group, jnp.zeros((), figure.dtype))
        sums[group] = sums[group] + figure if group in sums else groups[group] + figure
    totals = [add_over(sums, axes) for axes, sums in own.items()]
    for group in groups:
        first, *others = (sums[group] for sums in totals if group in sums)
        groups[group] = functools.reduce(operator.add, others, first)
    return groups
