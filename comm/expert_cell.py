"""Transport `expert_cell`: one fixed cell of slots per (sender, expert), nothing but rows is exchanged.

The place of a row says whose it is. A full cell drops although a neighbour is idle, unless `spill` offers the rest to
other experts of the same token. All drops happen at the sender. With W waves the local experts go in W equal groups,
one after the other: 2 W all-to-alls forward, and W = local experts is the published form, one expert at a time.

Source: marin-community/marin #7780.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm import collectives
from rungwise.comm.buffers import cell_slots
from rungwise.comm.capacity import logical_capacity
from rungwise.comm.claims import Claims, claim_slots, claimed_gates
from rungwise.comm.config import TransportConfig
from rungwise.comm.drops import TransportResult, count_drops, read_assignments
from rungwise.comm.payload import exchange
from rungwise.comm.permute import combine_rows, dispatch_rows
from rungwise.comm.placement import Placement, place
from rungwise.comm.waves import each_wave, served


def expert_cell(
    tokens: Float[Array, "tokens width"],
    expert_ids: Int[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    expert_fn: Callable[..., Array],
    *,
    axis: str | None,
    config: TransportConfig,
    valid: Bool[Array, " tokens"] | None = None,
    in_turn: bool = False,
) -> TransportResult:
    """Sends each token to its experts' cells and sums what comes back; the later assignments of a full cell drop.

    A dropped assignment contributes zero and the other gates are not renormalised. Cells shrink with the number of
    this rank's valid assignments. The receiver capacity factor is not used.

    Args:
        expert_fn: (rows [groups, rows, width], expert of each group, absent where group g is local expert g) → same
            shape, by this rank's expert weights.
        axis: name of the rank axis; unused on one rank.
        valid: False marks padding, which takes no slot and counts nowhere.
        in_turn: waves in a loop, as `comm/waves.py`.
    Raises:
        ValueError: `num_ranks` is not the axis size.
    """
    collectives.check_axis(axis, config.num_ranks)
    assignments = read_assignments(expert_ids, valid, num_experts=config.num_experts)
    slots = cell_slots(config, num_tokens=tokens.shape[0])
    limit = logical_capacity(
        jnp.sum(assignments.valid, dtype=jnp.int32),
        num_bins=config.num_experts,
        capacity_factor=config.sender_capacity_factor,
        physical=slots,
    )
    claims = claim_slots(
        assignments.expert,
        num_experts=config.num_experts,
        experts_per_bin=1,
        limit=limit,
        top_k=config.top_k,
        spill=config.spill,
    )
    placement = _fill_cells(claims, slots, config)
    rows = dispatch_rows(tokens, placement)
    if axis is None or config.num_ranks == 1:
        outputs, clipped = served(expert_fn(rows.reshape(config.num_experts, slots, -1)))
        outputs = outputs.reshape(rows.shape)
    else:
        outputs, clipped = _across_ranks(rows, expert_fn, axis=axis, slots=slots, config=config, in_turn=in_turn)
    output = combine_rows(outputs, claimed_gates(gates, claims, spill=config.spill), placement)
    kept = claims.placed.reshape(gates.shape)
    turn = claims.turn.reshape(gates.shape)
    return TransportResult(
        output, count_drops(assignments, sent=kept, kept=kept, config=config, turn=turn, clipped=clipped), kept
    )


def _num_waves(config: TransportConfig) -> int:
    return config.num_waves if config.num_ranks > 1 else 1


def _fill_cells(claims: Claims, slots: int, config: TransportConfig) -> Placement:
    """Items to rows of [waves, destinations, experts of a wave, slots]."""
    group = config.experts_per_rank // _num_waves(config)
    destination, local = claims.expert // config.experts_per_rank, claims.expert % config.experts_per_rank
    cell = (local // group * config.num_ranks + destination) * group + local % group
    num_rows = config.num_experts * slots
    return place(jnp.where(claims.placed, cell * slots + claims.rank, num_rows), num_rows)


def _across_ranks(rows, expert_fn, *, axis, slots, config, in_turn):
    """Cells out, experts, cells back: rows of the same layout, and how many values were clipped on the way."""
    waves, ranks, width = config.num_waves, config.num_ranks, rows.shape[1]
    group = config.experts_per_rank // waves
    owners = jnp.arange(config.experts_per_rank, dtype=jnp.int32).reshape(waves, group)

    def wave(inputs):
        cells, own = inputs
        arrived, lost_out = exchange(cells, axis, config=config)
        by_expert = jnp.swapaxes(arrived.reshape(ranks, group, slots, width), 0, 1).reshape(group, -1, width)
        outputs, lost_here = served(expert_fn(by_expert, *(() if waves == 1 else (own,))))
        by_source = jnp.swapaxes(outputs.reshape(group, ranks, slots, width), 0, 1)
        back, lost_back = exchange(by_source.reshape(cells.shape), axis, config=config)
        return back, lost_out + lost_here + lost_back

    cells = rows.reshape(waves, ranks, group * slots, width)
    returned, clipped = each_wave(wave, (cells, owners), in_turn=in_turn)
    return jnp.concatenate(returned).reshape(-1, width), clipped
