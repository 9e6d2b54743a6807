"""Transport `ragged`: each rank sends exactly the rows the destination has room for, row by row.

All ranks gather the number of assignments per (source, expert) and derive the same acceptance table: a destination's
experts share one pool of rows; local experts in order, and for each the sources in order, take what they ask for until
the pool is full. What is not accepted is dropped before transport and counted at the sender. Rows arrive sorted by
expert, each expert from a new block on, so nothing is permuted at the receiver; the way back mirrors the way out.

Late experts and late sources lose first, unlike `pooled_wave`. With equal rows this pool never drops more than a limit
per expert would. Forward: one gather of counts and two ragged exchanges.

Source: the rule of Olmo-core 3's row-wise expert parallelism, and marin-community/marin #8549.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm import collectives
from rungwise.comm.buffers import RaggedRoom, ragged_room
from rungwise.comm.capacity import logical_capacity
from rungwise.comm.collectives import RaggedTables
from rungwise.comm.config import TransportConfig
from rungwise.comm.drops import TransportResult, count_drops, read_assignments
from rungwise.comm.payload import ragged_exchange
from rungwise.comm.permute import combine_rows, dispatch_rows
from rungwise.comm.placement import block_rows, count_within, lookup, place, rank_within
from rungwise.comm.waves import served


class _Plan(NamedTuple):
    """What every rank knows of all ranks. Destination d's expert l is expert d * experts_per_rank + l."""

    accepted: Int[Array, "sources experts"]
    region: Int[Array, "sources experts"]
    """First row of a source's rows for an expert in the pool of the expert's rank."""
    sorted_row: Int[Array, "sources experts"]
    """First row of an expert's assignments in the source's own buffer, sorted by expert."""
    block_expert: Int[Array, "ranks blocks"]
    """Local expert of each block of a rank's pool."""


def ragged(
    tokens: Float[Array, "tokens width"],
    expert_ids: Int[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    expert_fn: Callable[..., Array],
    *,
    axis: str | None,
    config: TransportConfig,
    valid: Bool[Array, " tokens"] | None = None,
) -> TransportResult:
    """Sends accepted assignments to their expert's rank and sums what comes back.

    A dropped assignment contributes zero and the other gates are not renormalised. Among one source's assignments to
    one expert the later drop. The pool shrinks with the mean number of valid assignments of a rank. The sender
    capacity factor and the waves of `config` are not used.

    Args:
        expert_fn: (rows [groups, block, width], expert of each group [groups]) → rows of the same shape.
        axis: name of the rank axis; unused on one rank.
        valid: False marks padding, which takes no slot and counts nowhere.
    Raises:
        ValueError: `num_ranks` is not the axis size.
    """
    collectives.check_axis(axis, config.num_ranks)
    assignments = read_assignments(expert_ids, valid, num_experts=config.num_experts)
    room = ragged_room(config, num_tokens=tokens.shape[0])
    load = count_within(assignments.expert, config.num_experts)[None]
    if axis is None or config.num_ranks == 1:
        alone, rank, plan = True, 0, _plan(load, room, config)
    else:
        alone, rank, plan = False, jax.lax.axis_index(axis), _plan(collectives.all_gather(load, axis), room, config)
    order = rank_within(assignments.expert, config.num_experts)
    kept = order < lookup(plan.accepted[rank], assignments.expert, missing=0)
    first, num_rows = (plan.region, room.block * room.num_blocks) if alone else (plan.sorted_row, order.shape[0])
    row = lookup(first[rank], assignments.expert, missing=0) + order
    placement = place(jnp.where(kept, row, num_rows), num_rows)
    rows = dispatch_rows(tokens, placement)
    if alone:
        outputs, clipped = _run_experts(rows, expert_fn, plan.block_expert[0], room)
    else:
        outputs, clipped = _across_ranks(rows, expert_fn, plan, axis=axis, room=room, config=config)
    kept = kept.reshape(gates.shape)
    output = combine_rows(outputs, jnp.where(kept, gates, 0), placement)
    return TransportResult(output, count_drops(assignments, sent=kept, kept=kept, config=config, clipped=clipped), kept)


def _plan(requested: Int[Array, "sources experts"], room: RaggedRoom, config: TransportConfig) -> _Plan:
    """The acceptance table and every rank's layout, alike on all ranks."""
    ranks, local = config.num_ranks, config.experts_per_rank
    limit = logical_capacity(
        jnp.sum(requested, dtype=jnp.int32),
        num_bins=ranks,
        capacity_factor=config.receiver_capacity_factor,
        physical=room.pool,
    )
    in_order = jnp.transpose(requested.reshape(ranks, ranks, local), (1, 2, 0))  # [destination, local expert, source]
    filled = jnp.minimum(_before(in_order.reshape(ranks, -1)), limit)
    after = jnp.minimum(_before(in_order.reshape(ranks, -1)) + in_order.reshape(ranks, -1), limit)
    accepted = (after - filled).reshape(in_order.shape)
    first_row, block_expert = block_rows(
        jnp.sum(accepted, axis=-1, dtype=jnp.int32), block=room.block, num_blocks=room.num_blocks
    )
    region = first_row[..., None] + _before(accepted)

    def by_source(table: Array) -> Array:
        return jnp.transpose(table, (2, 0, 1)).reshape(ranks, -1)

    return _Plan(by_source(accepted), by_source(region), _before(requested), block_expert)


def _before(counts: Int[Array, "*lead entries"]) -> Int[Array, "*lead entries"]:
    """Sum of all earlier entries."""
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts


def _run_experts(rows, expert_fn, block_expert, room):
    outputs, clipped = served(expert_fn(rows.reshape(room.num_blocks, room.block, -1), block_expert))
    return outputs.reshape(rows.shape), clipped


def _across_ranks(rows, expert_fn, plan, *, axis, room, config):
    """Sorted rows out, experts, rows back to where they were; and how many values were clipped on the way."""
    rank, ranks = jax.lax.axis_index(axis), config.num_ranks

    def served(table: Array) -> Array:
        """Entries of this rank's experts, source by source."""
        return jnp.take(table.reshape(ranks, ranks, -1), rank, axis=1).reshape(-1)

    out = RaggedTables(plan.sorted_row[rank], plan.accepted[rank], plan.region[rank], served(plan.accepted))
    back = RaggedTables(served(plan.region), served(plan.accepted), served(plan.sorted_row), plan.accepted[rank])
    arrived, lost_out = ragged_exchange(rows, room.block * room.num_blocks, out, axis, config=config)
    outputs, lost_here = _run_experts(arrived, expert_fn, jnp.take(plan.block_expert, rank, axis=0), room)
    returned, lost_back = ragged_exchange(outputs, rows.shape[0], back, axis, config=config)
    return returned, lost_out + lost_here + lost_back
