"""Static shapes of each transport's buffers: what it reserves, sends and computes whatever the routes are.

Imports no jax. The transports shape their arrays by these functions, so that what is predicted is what is allocated.
"""

from dataclasses import dataclass

from rungwise.comm.capacity import capacity
from rungwise.comm.config import TransportConfig

BLOCK, _MIN_BLOCK = 128, 8
"""Rows of a block of one expert. Larger wastes rows in each expert's last block, smaller copies weights more often."""

MXFP8_BLOCK = 32
"""Values that share a scale in an MXFP8 payload (OCP MX 1.0)."""


@dataclass(frozen=True)
class PoolRoom:
    """Rows of `pooled_wave`'s buffers."""

    pool: int
    """Slots of a pool: per (sender, destination, wave)."""
    header: int
    """Header rows in front of them."""
    expert: int
    """Rows of a local expert per wave."""


@dataclass(frozen=True)
class RaggedRoom:
    """Rows of `ragged`'s buffers."""

    pool: int
    """Rows a destination accepts, shared by its experts."""
    block: int
    """Rows of a block, all of one expert."""
    num_blocks: int
    """Blocks that hold any split of the pool among the experts."""


@dataclass(frozen=True)
class BufferRows:
    """Rows of one rank, one layer and one forward pass; a row has the width that travels."""

    sent: int
    """Rows of all payloads out, header rows included, own rank's share included; as many come back."""
    received: int
    """Rows of all payloads in."""
    computed: int
    """Rows the experts work on, filled or not."""
    sent_at_once: int
    """The largest payload: what one exchange moves."""
    computed_at_once: int
    """The most rows the experts hold at once."""


def pool_room(config: TransportConfig, *, num_tokens: int, width: int) -> PoolRoom:
    """Physical capacities of `pooled_wave` for `num_tokens` of one rank, cut where a buffer could never fill."""
    num_items, waves, ranks = num_tokens * config.top_k, config.num_waves, config.num_ranks
    pool = capacity(num_items, num_bins=ranks * waves, capacity_factor=config.sender_capacity_factor)
    pool = min(pool, -(-num_items // waves))
    expert_bins = config.experts_per_rank * waves
    expert = capacity(num_items, num_bins=expert_bins, capacity_factor=config.receiver_capacity_factor)
    header = -(-pool // width) if ranks > 1 else 0
    return PoolRoom(pool, header, min(expert, ranks * pool))


def cell_slots(config: TransportConfig, *, num_tokens: int) -> int:
    """Physical slots of one cell of `expert_cell`: per (sender, expert)."""
    num_items = num_tokens * config.top_k
    cell = capacity(num_items, num_bins=config.num_experts, capacity_factor=config.sender_capacity_factor)
    return min(cell, num_items)


def ragged_room(config: TransportConfig, *, num_tokens: int) -> RaggedRoom:
    """Physical pool of `ragged` at one destination, and the blocks that hold it."""
    num_items = num_tokens * config.top_k
    pool = capacity(num_items, num_bins=1, capacity_factor=config.receiver_capacity_factor)
    pool = min(pool, config.num_ranks * num_items)
    per_expert = max(1, pool // config.experts_per_rank)
    block = min(BLOCK, max(_MIN_BLOCK, 1 << (per_expert.bit_length() - 1)))
    return RaggedRoom(pool, block, num_blocks(pool, block=block, num_experts=config.experts_per_rank))


def num_blocks(num_rows: int, *, block: int, num_experts: int) -> int:
    """Blocks that hold `num_rows` rows split among the experts in any way."""
    return -(-num_rows // block) + num_experts


def buffer_rows(config: TransportConfig, *, num_tokens: int, width: int) -> BufferRows:
    """Rows one rank sends, receives and computes; on one rank nothing is sent."""
    ranks, waves = config.num_ranks, config.num_waves
    num_items = num_tokens * config.top_k
    if config.name == "pooled_wave":
        room = pool_room(config, num_tokens=num_tokens, width=width)
        wave, expert = ranks * (room.header + room.pool), config.experts_per_rank * room.expert
        made = BufferRows(waves * wave, waves * wave, waves * expert, wave, expert)
    elif config.name == "expert_cell":
        rows = config.num_experts * cell_slots(config, num_tokens=num_tokens)
        made = BufferRows(rows, rows, rows, rows // waves, rows // waves)
    elif config.name == "ragged":
        room = ragged_room(config, num_tokens=num_tokens)
        rows = room.block * room.num_blocks
        made = BufferRows(num_items, rows, rows, num_items, rows)
    else:
        rows = BLOCK * num_blocks(ranks * num_items, block=BLOCK, num_experts=config.experts_per_rank)
        made = BufferRows(num_tokens, ranks * num_tokens, rows, num_tokens, rows)
    if ranks == 1:
        whole = waves * made.computed_at_once if config.name == "pooled_wave" else made.computed
        return BufferRows(0, 0, whole, 0, whole)
    return made


def row_bytes(config: TransportConfig, *, width: int, itemsize: int) -> int:
    """Bytes of one travelling row: `width` values of `itemsize`, or MXFP8's one byte a value and one a block."""
    return width * itemsize if config.payload == "compute" else mxfp8_bytes(width)


def mxfp8_bytes(width: int) -> int:
    """Bytes of a row in MXFP8: one a value, the last block filled up, and one a block.

    >>> mxfp8_bytes(64), mxfp8_bytes(65)
    (66, 99)
    """
    return -(-width // MXFP8_BLOCK) * (MXFP8_BLOCK + 1)
