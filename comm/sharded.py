"""Dealing an array out among ranks: each sums, owns and updates a part, then all gather the whole (ZeRO stage 1).

An array is cut into equal pieces along its first dimensions: single elements, or whole matrices of a stack, whose
update needs them whole. Every rank owns as many pieces, zeros at the end where they do not divide; zeros stay zeros
under every update rule, and are cut off again.

Source: Rajbhandari et al. 2020 (ZeRO).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rungwise.comm.mesh import Axes

MOST_PADDING = 2.0
"""Pieces with padding over pieces, at most, for an axis to be used: a reduce-scatter sends the padding too."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How an array of `shape` is dealt out among the ranks of `axes`. Without axes it stays whole, in its own shape.

    Attributes:
        stack: leading dimensions whose entries are the pieces; all of them: single elements.
    """

    shape: tuple[int, ...]
    stack: int
    axes: Axes = ()
    num_ranks: int = 1

    @property
    def num_pieces(self) -> int:
        """Pieces without padding."""
        return math.prod(self.shape[: self.stack])

    @property
    def chunk(self) -> int:
        """Pieces of one rank."""
        return -(-self.num_pieces // self.num_ranks)

    @property
    def owned_shape(self) -> tuple[int, ...]:
        """Shape of a rank's part: pieces along the first dimension, ones for the stack's others, then a piece."""
        if not self.axes:
            return self.shape
        piece = self.shape[self.stack :]
        return (self.chunk, *(1,) * (self.stack - 1), *piece) if piece else (self.chunk,)

    def deal(self, array: Array) -> Array:
        """All parts one after the other, padded: [num_ranks · chunk, …]."""
        tail = self.owned_shape[1:]
        pieces = array.reshape(self.num_pieces, *tail)
        padding = self.num_ranks * self.chunk - self.num_pieces
        return jnp.pad(pieces, [(0, padding)] + [(0, 0)] * len(tail)) if padding else pieces

    def join(self, parts: Array) -> Array:
        """Inverse of `deal`."""
        return parts[: self.num_pieces].reshape(self.shape)

    def reduce(self, array: Array) -> Array:
        """This rank's part of the sum over all ranks: one reduce-scatter."""
        if not self.axes:
            return array
        return jax.lax.psum_scatter(self.deal(array), self.axes, scatter_dimension=0, tiled=True)

    def own(self, array: Array) -> Array:
        """This rank's part of an array that all ranks hold alike; nothing is sent."""
        if not self.axes:
            return array
        start = jax.lax.axis_index(self.axes) * self.chunk
        return jax.lax.dynamic_slice_in_dim(self.deal(array), start, self.chunk)

    def gather(self, part: Array) -> Array:
        """The whole array from every rank's part: one all-gather."""
        return self.join(jax.lax.all_gather(part, self.axes, tiled=True)) if self.axes else part


def shard_over(shape: tuple[int, ...], sizes: dict[str, int], *, stack: int) -> Shards:
    """Deals an array out over as many of the axes, in order, as its pieces are enough for.

    Args:
        sizes: ranks of each axis that holds the array alike.

    >>> shard_over((48, 6144, 6144), {"data": 11, "expert": 64}, stack=1).axes
    ('data',)
    """
    chosen, ranks = [], 1
    pieces = math.prod(shape[:stack])
    for axis, size in sizes.items():
        chunk = -(-pieces // (ranks * size))
        if chunk * ranks * size <= MOST_PADDING * pieces:
            chosen.append(axis)
            ranks *= size
    return Shards(shape=shape, stack=stack, axes=tuple(chosen), num_ranks=ranks)


def to_whole_rows(parts: Array, axis: str, num_ranks: int) -> Array:
    """[rows, n], a slice of every row on each rank → [rows / ranks, ranks · n], whole rows, zeros at the end.

    One all-to-all. `num_ranks` is the size of `axis`.
    """
    chunk = -(-len(parts) // num_ranks)
    padded = jnp.pad(parts, ((0, chunk * num_ranks - len(parts)), (0, 0)))
    return jax.lax.all_to_all(padded, axis, split_axis=0, concat_axis=1, tiled=True)


def to_row_slices(rows: Array, axis: str, num_rows: int) -> Array:
    """Inverse of `to_whole_rows` for `num_rows` rows in all."""
    return jax.lax.all_to_all(rows, axis, split_axis=1, concat_axis=0, tiled=True)[:num_rows]
