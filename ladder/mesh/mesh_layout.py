"""How parameters, gradients and optimizer state lie on the ranks of a mesh, and what crosses ranks between them.

Expert weights lie on the ranks of `expert`, layers on those of `pipe`; everything else is the same on all ranks, or
dense weights are cut into slices over `data` and gathered layer by layer. A gradient is added over every axis its
parameter does not lie on, in float32. The optimizer sees *parts* of parameters under their own names: all of one
where every rank updates it, or what this rank owns of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, tree_map_with_path
from jaxtyping import Array

from rungwise.comm.mesh import DATA, EXPERT, PIPE, Axes, add_over
from rungwise.comm.sharded import Shards, shard_over, to_row_slices, to_whole_rows
from rungwise.ladder.training.optimizer import update_rule
from rungwise.ladder.training.parameter_groups import MATRIX_AXES, Tree, frobenius_axes, parameter_name
from rungwise.model.stages import Stages


class Leaf(Protocol):
    """One parameter on a mesh. `rest`: as it lies between steps; `part`: what the optimizer of a rank sees of it."""

    @property
    def rest_spec(self) -> PartitionSpec: ...
    @property
    def part_spec(self) -> PartitionSpec: ...
    @property
    def whole_spec(self) -> PartitionSpec:
        """Where a whole parameter lies before it is cut and after it is joined, and the same of what it is made of."""
        ...

    @property
    def gathered_rest_spec(self) -> PartitionSpec: ...
    @property
    def gathered_part_spec(self) -> PartitionSpec: ...
    @property
    def spread(self) -> Axes:
        """Axes over which the parts of the parameter lie."""
        ...

    def reduce(self, grad: Array) -> Array:
        """Part of the sum of all ranks' gradients."""
        ...

    def own(self, rest: Array) -> Array:
        """Part of a parameter at rest."""
        ...

    def gather(self, part: Array) -> Array:
        """Inverse of `own`."""
        ...

    def to_rest(self, whole: Array) -> Array:
        """A whole parameter, as a checkpoint holds it, as it lies on all ranks together; outside `shard_map`."""
        ...

    def from_rest(self, rest: Array) -> Array: ...
    def to_parts(self, whole: Array) -> Array:
        """The same of the parts of all ranks together."""
        ...

    def from_parts(self, parts: Array) -> Array: ...


def _wide(grad: Array) -> Array:
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


@dataclass(frozen=True, kw_only=True)
class ResidentLeaf:
    """A parameter whole on every rank, but for the dimensions that lie on axes of their own.

    Attributes:
        shape: of the whole parameter.
        rest: (dimension, axis, ranks), the dimensions dealt out at rest.
        stages: how layers lie at rest on the stages of a pipeline; None where all are here.
        reduced: axes over which gradients add up.
        shards: how the part at rest on one rank is dealt out for the update.
    """

    shape: tuple[int, ...]
    rest: tuple[tuple[int, str, int], ...]
    reduced: Axes
    shards: Shards
    stages: Stages | None = None

    @property
    def rest_spec(self) -> PartitionSpec:
        names: list[str | None] = [None] * len(self.shape)
        for dim, axis, _ in self.rest:
            names[dim] = axis
        return PartitionSpec(*names)

    @property
    def part_spec(self) -> PartitionSpec:
        return PartitionSpec(self.spread) if self.shards.axes else self.rest_spec

    @property
    def whole_spec(self) -> PartitionSpec:
        if self.stages is None:
            return self.rest_spec
        return PartitionSpec(None, *self.rest_spec[1:])

    @property
    def gathered_rest_spec(self) -> PartitionSpec:
        return self.whole_spec

    @property
    def gathered_part_spec(self) -> PartitionSpec:
        kept = tuple(axis for _, axis, _ in self.rest)
        return PartitionSpec(kept or None) if self.shards.axes else self.whole_spec

    @property
    def spread(self) -> Axes:
        return (*(axis for _, axis, _ in self.rest), *self.shards.axes)

    def reduce(self, grad: Array) -> Array:
        others = tuple(axis for axis in self.reduced if axis not in self.shards.axes)
        return add_over(self.shards.reduce(_wide(grad)), others)

    def own(self, rest: Array) -> Array:
        return self.shards.own(rest)

    def gather(self, part: Array) -> Array:
        return self.shards.gather(part)

    def to_rest(self, whole: Array) -> Array:
        return whole if self.stages is None else self.stages.stacked(whole)

    def from_rest(self, rest: Array) -> Array:
        return rest if self.stages is None else self.stages.unstacked(rest)

    def to_parts(self, whole: Array) -> Array:
        rest = self.to_rest(whole)
        if not self.shards.axes:
            return rest
        parts = jax.vmap(self.shards.deal)(self._by_rank(rest))
        return parts.reshape(-1, *parts.shape[2:])

    def from_parts(self, parts: Array) -> Array:
        if not self.shards.axes:
            return self.from_rest(parts)
        ranks = math.prod(size for _, _, size in self.rest)
        blocks = jax.vmap(self.shards.join)(parts.reshape(ranks, -1, *parts.shape[1:]))
        return self.from_rest(self._from_ranks(blocks))

    def _by_rank(self, rest: Array) -> Array:
        """[*padded shape] → [ranks at rest, *shape on one rank]."""
        split, front = [], []
        for dim, size in enumerate(rest.shape):
            ranks = next((ranks for where, _, ranks in self.rest if where == dim), None)
            if ranks is not None:
                front.append(len(split))
                split.append(ranks)
            split.append(size // (ranks or 1))
        blocks = jnp.moveaxis(rest.reshape(split), front, range(len(front)))
        return blocks.reshape(-1, *self.shards.shape)

    def _from_ranks(self, blocks: Array) -> Array:
        """Inverse of `_by_rank`."""
        ranks = [ranks for _, _, ranks in self.rest]
        blocks = blocks.reshape(*ranks, *self.shards.shape)
        for index, (dim, _, size) in enumerate(self.rest):
            # the index-th of the leading axes goes right before its dimension, past those still in front
            blocks = jnp.moveaxis(blocks, 0, len(self.rest) - index - 1 + dim)
            where = len(self.rest) - index - 1 + dim
            merged = size * blocks.shape[where + 1]
            blocks = blocks.reshape(*blocks.shape[:where], merged, *blocks.shape[where + 2 :])
        return blocks


@dataclass(frozen=True, kw_only=True)
class SlicedLeaf:
    """A dense parameter of which every rank of `data` holds a slice: of each layer's elements, or of all.

    Layers lie on the stages of a pipeline as they do for any other parameter, and their slices on the ranks of a stage.
    Where an update needs whole matrices, one all-to-all of the gradient makes whole layers of slices, another brings
    the update back.

    Attributes:
        shape: of the whole parameter.
        num_slices: ranks of `data`.
        stacked: the first dimension is that of layers.
        matrices: the update needs whole layers.
        reduced: axes over which gradients add up, once the backward pass has added them over `data`.
        stages: how layers lie at rest on the stages of a pipeline; None where all are here.
    """

    shape: tuple[int, ...]
    num_slices: int
    stacked: bool
    matrices: bool
    reduced: Axes
    stages: Stages | None = None

    @property
    def _layer(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def _slice(self) -> int:
        return -(-math.prod(self._layer) // self.num_slices)

    @property
    def _rows(self) -> int:
        """Layers of one stage, padding included."""
        return self.shape[0] if self.stages is None else len(self.stages.rows) // self.stages.num_stages

    @property
    def rest_spec(self) -> PartitionSpec:
        if not self.stacked:
            return PartitionSpec(DATA)
        return PartitionSpec(None if self.stages is None else PIPE, DATA)

    @property
    def part_spec(self) -> PartitionSpec:
        return PartitionSpec(self.spread) if self.matrices else self.rest_spec

    @property
    def whole_spec(self) -> PartitionSpec:
        return PartitionSpec()

    @property
    def gathered_rest_spec(self) -> PartitionSpec:
        return PartitionSpec()

    @property
    def gathered_part_spec(self) -> PartitionSpec:
        return PartitionSpec()

    @property
    def spread(self) -> Axes:
        return (DATA,) if self.stages is None else (PIPE, DATA)

    def gather_layer(self, own: Array) -> Array:
        """The slice of one layer → the layer; its transpose is a reduce-scatter of the gradient."""
        flat = jax.lax.all_gather(own, DATA, tiled=True)
        return flat[: math.prod(self._layer)].reshape(self._layer)

    def reduce(self, grad: Array) -> Array:
        return self.own(add_over(_wide(grad), self.reduced))

    def own(self, rest: Array) -> Array:
        if not self.matrices:
            return rest
        rows = to_whole_rows(rest, DATA, self.num_slices)
        return rows[:, : math.prod(self._layer)].reshape(-1, *self._layer)

    def gather(self, part: Array) -> Array:
        if not self.matrices:
            return part
        return to_row_slices(self._padded(part.reshape(len(part), -1)), DATA, self._rows)

    def _padded(self, rows: Array) -> Array:
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, self.num_slices * self._slice - rows.shape[-1])])

    def to_rest(self, whole: Array) -> Array:
        rows = self._stacked(whole)
        return self._padded(rows.reshape(len(rows), -1) if self.stacked else rows.reshape(-1))

    def from_rest(self, rest: Array) -> Array:
        return self._unstacked(rest[..., : math.prod(self._layer)].reshape(-1, *self.shape[1:]))

    def to_parts(self, whole: Array) -> Array:
        if not self.matrices:
            return self.to_rest(whole)
        by_stage = self._stacked(whole).reshape(-1, self._rows, *self._layer)
        padding = [(0, 0), (0, -self._rows % self.num_slices)] + [(0, 0)] * len(self._layer)
        return jnp.pad(by_stage, padding).reshape(-1, *self._layer)

    def from_parts(self, parts: Array) -> Array:
        if not self.matrices:
            return self.from_rest(parts)
        by_stage = parts.reshape(-1, self._rows + -self._rows % self.num_slices, *self._layer)
        return self._unstacked(by_stage[:, : self._rows].reshape(-1, *self._layer))

    def _stacked(self, whole: Array) -> Array:
        return whole if self.stages is None else self.stages.stacked(whole)

    def _unstacked(self, rows: Array) -> Array:
        return rows if self.stages is None else self.stages.unstacked(rows)


@dataclass(frozen=True)
class MeshLayout:
    """Every parameter of a run on a mesh, by name."""

    leaves: Mapping[str, Leaf]

    def spread(self, name: str) -> Axes:
        return self.leaves[name].spread

    def map(self, method: Callable[[Leaf, Any], Any], tree: Tree) -> Tree:
        """Applies a method of `Leaf` to every array of a tree."""
        return tree_map_with_path(lambda path, leaf: method(self.leaves[parameter_name(path)], leaf), tree)

    def reduce(self, grads: Tree) -> Tree:
        return self.map(lambda leaf, grad: leaf.reduce(grad), grads)

    def own(self, params: Tree) -> Tree:
        return self.map(lambda leaf, rest: leaf.own(rest), params)

    def gather(self, parts: Tree) -> Tree:
        return self.map(lambda leaf, part: leaf.gather(part), parts)

    def gather_weights(self, prefix: str, weights: Tree) -> Tree:
        def whole(path: tuple[Any, ...], array: Array) -> Array:
            leaf = self.leaves[prefix + ".".join(key.key for key in path)]
            if isinstance(leaf, SlicedLeaf) and leaf.stacked == bool(prefix):
                return leaf.gather_layer(array)
            return array

        return tree_map_with_path(whole, weights)

    def map_state(self, method: Callable[[Leaf, Any], Any], state: Tree, *, other: Callable[[Any], Any]) -> Tree:
        """Applies a method of `Leaf` to every array of an optimizer's state that belongs to a parameter."""

        def one(path: tuple[Any, ...], array: Any) -> Any:
            name = _owner(path)
            return method(self.leaves[name], array) if name else other(array)

        return tree_map_with_path(one, state)


def _owner(path: tuple[Any, ...]) -> str | None:
    """Parameter to which an array of an optimizer's state belongs, by the keys at the end of its path."""
    keys: list[str] = []
    for key in reversed(path):
        if not isinstance(key, DictKey):
            break
        keys.insert(0, key.key)
    return ".".join(keys) or None


def build_layout(
    params: Tree,
    sizes: Mapping[str, int],
    *,
    optimizer: str,
    weights: str = "replicated",
    optimizer_state: str = "replicated",
    stages: Stages | None = None,
) -> MeshLayout:
    """Places every parameter.

    Args:
        params: shapes of the whole parameters.
        sizes: ranks of each mesh axis.
        optimizer: name of the rule, which says what updates whole matrices.
        weights: `replicated`, or `sharded`: dense weights cut into slices over `data`.
        optimizer_state: `replicated`, or `sharded`: dealt out over the ranks that hold a parameter alike.
        stages: how layers lie on the ranks of `pipe`; in equal parts when absent.
    """
    used = {axis: size for axis, size in sizes.items() if size > 1}
    leaves: dict[str, Leaf] = {}

    def place(path: tuple[Any, ...], leaf: Any) -> None:
        name = parameter_name(path)
        matrices = update_rule(name, optimizer).startswith("muon")
        own = _stages_of(name, leaf.shape, used, stages)
        if weights == "sharded" and DATA in used and is_sliced(name, leaf.shape):
            at_rest = (DATA,) if own is None else (PIPE, DATA)
            leaves[name] = SlicedLeaf(
                shape=leaf.shape,
                num_slices=used[DATA],
                stacked=name.startswith("layers."),
                matrices=matrices,
                reduced=tuple(axis for axis in used if axis not in at_rest),
                stages=own,
            )
        else:
            sharded = optimizer_state == "sharded"
            leaves[name] = _resident(name, leaf.shape, used, sharded=sharded, matrices=matrices, stages=own)

    tree_map_with_path(place, params)
    return MeshLayout(leaves)


def _stages_of(name: str, shape: tuple[int, ...], used: Mapping[str, int], stages: Stages | None) -> Stages | None:
    """How a parameter's layers lie on stages; None where it belongs to no layer or there are none."""
    if PIPE not in used or not name.startswith("layers."):
        return None
    return stages or Stages(num_layers=shape[0], num_stages=used[PIPE], axis=PIPE)


def is_sliced(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is cut into slices where dense weights are: all matrices that are no expert's."""
    dims = len(shape) - name.startswith("layers.")
    stack = min(axis % len(shape) for axis in frobenius_axes(MATRIX_AXES[name])) if name in MATRIX_AXES else 0
    return dims >= 2 and not name.startswith("layers.moe.experts.") and (name not in MATRIX_AXES or stack == 1)


def _resident(
    name: str,
    shape: tuple[int, ...],
    used: Mapping[str, int],
    *,
    sharded: bool,
    matrices: bool,
    stages: Stages | None,
) -> ResidentLeaf:
    rest = []
    local = list(shape)
    if stages is not None:
        rest.append((0, PIPE, used[PIPE]))
        local[0] = len(stages.rows)
    if EXPERT in used and name.startswith("layers.moe.experts."):
        rest.append((1, EXPERT, used[EXPERT]))
    at_rest = {axis for _, axis, _ in rest}
    for dim, _, ranks in rest:
        local[dim] //= ranks
    stack = len(shape)
    if matrices:
        stack = min(axis % len(shape) for axis in frobenius_axes(MATRIX_AXES[name]))
    candidates = {axis: size for axis, size in used.items() if axis not in at_rest and axis != PIPE}
    whole = Shards(shape=tuple(local), stack=stack)
    return ResidentLeaf(
        shape=shape,
        rest=tuple(rest),
        reduced=tuple(axis for axis in used if axis not in at_rest),
        shards=shard_over(tuple(local), candidates, stack=stack) if sharded and stack else whole,
        stages=stages,
    )
