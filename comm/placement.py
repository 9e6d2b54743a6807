"""Which item goes to which slot: small int32 tables. The rows themselves are moved by `comm/permute.py`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

_BLOCK = 64
"""Items compared pairwise in `rank_within`. On CPU 32 to 128 are equally fast, a one-hot cumsum 3 times slower."""


class Placement(NamedTuple):
    """A partial one-to-one map of items to slots, kept in both directions."""

    slot: Int[Array, " items"]
    """Slot of each item; the number of slots for an item that has none."""
    item: Int[Array, " slots"]
    """Item in each slot; the number of items for an empty slot."""

    def inverse(self) -> "Placement":
        """Slots as items."""
        return Placement(slot=self.item, item=self.slot)


def place(slot: Int[Array, " items"], num_slots: int) -> Placement:
    """Placement of items whose slots are distinct; an item of slot `num_slots` or beyond is placed nowhere."""
    num_items = slot.shape[0]
    item = jnp.full(num_slots, num_items, jnp.int32)
    item = item.at[slot].set(jnp.arange(num_items, dtype=jnp.int32), mode="drop")
    return Placement(slot=jnp.minimum(slot, num_slots), item=item)


def block_rows(
    load: Int[Array, "*ranks experts"], *, block: int, num_blocks: int
) -> tuple[Int[Array, "*ranks experts"], Int[Array, "*ranks blocks"]]:
    """Rows sorted by expert, each expert starting a new block of `block` rows.

    Returns:
        The first row of each expert, and the expert of each block (never decreasing; of spare blocks the last).
    """
    needed = -(-load // block)
    last = jnp.cumsum(needed, axis=-1, dtype=jnp.int32)
    passed = last[..., None, :] <= jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    owner = jnp.minimum(jnp.sum(passed, axis=-1, dtype=jnp.int32), load.shape[-1] - 1)
    return (last - needed) * block, owner


def count_within(bins: Int[Array, " items"], num_bins: int) -> Int[Array, " bins"]:
    """Items of each bin; an item whose bin is `num_bins` or beyond counts nowhere."""
    return jnp.zeros(num_bins, jnp.int32).at[bins].add(1, mode="drop")


def lookup(table: Int[Array, " entries"], index: Int[Array, "*shape"], *, missing: int) -> Int[Array, "*shape"]:
    """`table[index]`, or `missing` where the index lies past the end."""
    return table.at[index].get(mode="fill", fill_value=missing)


def rank_within(bins: Int[Array, " items"], num_bins: int) -> Int[Array, " items"]:
    """Number of earlier items in the same bin. Meaningless for an item whose bin is outside 0..num_bins−1.

    In blocks: pairwise comparison inside a block plus the counts of all blocks before it, so that no
    [items, num_bins] array is scanned item by item.
    """
    (num_items,) = bins.shape
    blocks = jnp.pad(bins, (0, -num_items % _BLOCK), constant_values=num_bins).reshape(-1, _BLOCK)
    position = jnp.arange(_BLOCK, dtype=jnp.int32)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (position[None, :] < position[:, None])
    inside = jnp.sum(same, axis=-1, dtype=jnp.int32)
    lanes = jnp.arange(num_bins, dtype=jnp.int32)
    counts = jnp.sum(blocks[:, :, None] == lanes, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(counts, axis=0) - counts
    earlier = jnp.take_along_axis(before, blocks, axis=1, mode="clip")
    return (inside + earlier).reshape(-1)[:num_items]
