"""Transport `pooled_wave`: one fixed pool of rows per destination rank, sent in equal waves with the ids inside.

Rank r of an assignment among this rank's assignments to one destination gives wave r mod W and slot r div
W. A wave's payload is [ranks, header + slots, width]: header rows hold local expert id + 1 for each slot
(0: empty), as values of the activation type, so nothing but payloads is exchanged. The receiver gives each
local expert a fixed number of rows per wave, filled slot by slot and within a slot source by source, so
that a full expert drops evenly from all sources. The payload back has the same shape, its header saying
which slots were kept. Forward: 2 W all-to-alls and one scalar sum.

Source: marin-community/marin #8289 (rule), #8347 (fair order), #8348 (two capacity factors).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm import collectives
from rungwise.comm.buffers import PoolRoom, pool_room
from rungwise.comm.capacity import logical_capacity
from rungwise.comm.claims import Claims, claim_slots, claimed_gates
from rungwise.comm.config import TransportConfig
from rungwise.comm.drops import TransportResult, count_drops, read_assignments
from rungwise.comm.payload import exchange
from rungwise.comm.permute import combine_rows, dispatch_rows
from rungwise.comm.placement import Placement, lookup, place, rank_within
from rungwise.comm.waves import each_wave, served


def pooled_wave(
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
    """Sends each token to the ranks of its experts and sums what comes back; full pools and full experts drop.

    A dropped assignment contributes zero and the other gates are not renormalised. Who is dropped: at the
    sender, the later of a destination's assignments in token order, unless `spill` finds room in the pool of another
    of their token's experts; at the receiver, the later slots of an
    expert. Capacities shrink with the number of valid assignments: this rank's at the sender, the mean over
    ranks at the receiver.

    Args:
        expert_fn: [local experts, rows, width] → same shape, by this rank's expert weights.
        axis: name of the rank axis; unused on one rank.
        valid: False marks padding, which takes no slot and counts nowhere.
        in_turn: waves in a loop, as `comm/waves.py`.
    Raises:
        ValueError: `num_ranks` is not the axis size, or a rank owns more experts than the activation type
            can number.
    """
    collectives.check_axis(axis, config.num_ranks)
    _check_header(config, tokens.dtype)
    assignments = read_assignments(expert_ids, valid, num_experts=config.num_experts)
    room = pool_room(config, num_tokens=tokens.shape[0], width=tokens.shape[1])
    num_valid = jnp.sum(assignments.valid, dtype=jnp.int32)
    claims = _claim(assignments.expert, num_valid, room, config)
    pool = _fill_pools(claims, room, config)
    sent = claims.placed.reshape(gates.shape)
    if axis is None or config.num_ranks == 1:
        move = functools.partial(_on_one_rank, num_valid=num_valid)
    else:
        num_valid = collectives.total(num_valid, axis)
        move = functools.partial(_across_ranks, num_valid=num_valid, axis=axis, in_turn=in_turn)
    rows, placement, kept, clipped = move(tokens, claims.expert, pool, expert_fn, room=room, config=config)
    kept = sent & kept.reshape(gates.shape)
    weights = claimed_gates(gates, claims, spill=config.spill)
    output = combine_rows(rows, jnp.where(kept, weights, 0), placement)
    turn = claims.turn.reshape(gates.shape)
    counts = count_drops(assignments, sent=sent, kept=kept, config=config, turn=turn, clipped=clipped)
    return TransportResult(output, counts, kept)


def _check_header(config: TransportConfig, dtype: jnp.dtype) -> None:
    exact = 2 ** (jnp.finfo(dtype).nmant + 1)
    if config.experts_per_rank > exact:
        raise ValueError(
            f"experts per rank {config.experts_per_rank} exceed {exact}, what {dtype.name} can number; use more ranks"
        )


def _claim(expert: Int[Array, " items"], num_valid: Int[Array, ""], room: PoolRoom, config: TransportConfig) -> Claims:
    """Ranks of the assignments in the pools of their destinations, all waves of a pool together."""
    waves, ranks = config.num_waves, config.num_ranks
    limit = logical_capacity(
        num_valid, num_bins=ranks * waves, capacity_factor=config.sender_capacity_factor, physical=room.pool
    )
    return claim_slots(
        expert,
        num_experts=config.num_experts,
        experts_per_bin=config.experts_per_rank,
        limit=limit * waves,
        top_k=config.top_k,
        spill=config.spill,
    )


def _fill_pools(claims: Claims, room: PoolRoom, config: TransportConfig) -> Placement:
    """Items to rows of the payloads [waves, ranks, header + pool]; header rows stay empty."""
    waves, ranks = config.num_waves, config.num_ranks
    wave, slot = claims.rank % waves, claims.rank // waves
    destination = claims.expert // config.experts_per_rank
    row = (wave * ranks + destination) * (room.header + room.pool) + room.header + slot
    num_rows = waves * ranks * (room.header + room.pool)
    return place(jnp.where(claims.placed, row, num_rows), num_rows)


def _fill_experts(
    expert: Int[Array, " items"],
    num_valid: Int[Array, ""],
    *,
    num_bins: int,
    room: PoolRoom,
    config: TransportConfig,
) -> Int[Array, " items"]:
    """Row of each item in [num_bins, rows of an expert], in the order given; num_bins × rows where there is none.

    Args:
        expert: bin of each item, num_bins or beyond for none.
        num_valid: valid assignments of all ranks.
    """
    limit = logical_capacity(
        num_valid,
        num_bins=config.num_experts * config.num_waves,
        capacity_factor=config.receiver_capacity_factor,
        physical=room.expert,
    )
    rank = rank_within(expert, num_bins)
    return jnp.where((expert < num_bins) & (rank < limit), expert * room.expert + rank, num_bins * room.expert)


def _on_one_rank(tokens, expert, pool, expert_fn, *, num_valid, room, config):
    """The same rules where sender and receiver are one: both placements compose into a single gather each way."""
    waves, num_experts = config.num_waves, config.num_experts
    num_bins = num_experts * waves
    wave = pool.slot // room.pool  # no header rows on one rank
    bins = jnp.where(wave < waves, expert * waves + wave, num_bins)
    row = _fill_experts(bins, num_valid, num_bins=num_bins, room=room, config=config)
    placement = place(row, num_bins * room.expert)
    rows = dispatch_rows(tokens, placement).reshape(num_experts, waves * room.expert, -1)
    outputs, clipped = served(expert_fn(rows))
    return outputs.reshape(-1, tokens.shape[1]), placement, row < num_bins * room.expert, clipped


def _across_ranks(tokens, expert, pool, expert_fn, *, num_valid, axis, room, config, in_turn):
    """Payloads out, experts, payloads back.

    Returns all waves' rows, where each item's row is, which came back, and how many values were clipped on the way.
    """
    local_id = jnp.where(
        pool.item < expert.shape[0], lookup(expert, pool.item, missing=0) % config.experts_per_rank + 1, 0
    )
    shape = (config.num_waves, config.num_ranks, room.header + room.pool)
    payloads = _with_header(
        dispatch_rows(tokens, pool).reshape(*shape, -1), local_id.reshape(shape)[..., room.header :], room
    )
    move = functools.partial(exchange, axis=axis, config=config, header_rows=room.header)

    def wave(payload):
        arrived, lost_out = move(payload)
        reply, lost_here = _serve(arrived, expert_fn, num_valid=num_valid, room=room, config=config)
        back, lost_back = move(reply)
        return back, lost_out + lost_here + lost_back

    returned, clipped = each_wave(wave, payloads, in_turn=in_turn)
    rows = jnp.stack(returned)
    flags = jnp.pad(_read_header(rows, room), ((0, 0), (0, 0), (room.header, 0)))
    kept = lookup(flags.reshape(-1), pool.slot, missing=0) > 0
    return rows.reshape(-1, tokens.shape[1]), pool, kept, clipped


def _serve(arrived, expert_fn, *, num_valid, room, config):
    """One wave at the receiver: arrived payload → payload to send back, its header 1 where the slot was kept; and how
    many values experts clipped."""
    ranks, _, width = arrived.shape
    num_local = config.experts_per_rank
    local = _read_header(arrived, room) - 1  # [source, slot]; -1 for an empty slot
    by_slot = jnp.where(local < 0, num_local, local).T.reshape(-1)
    row = _fill_experts(by_slot, num_valid, num_bins=num_local, room=room, config=config).reshape(room.pool, ranks).T
    nowhere = num_local * room.expert
    placement = place(jnp.pad(row, ((0, 0), (room.header, 0)), constant_values=nowhere).reshape(-1), nowhere)
    rows = dispatch_rows(arrived.reshape(-1, width), placement)
    outputs, clipped = served(expert_fn(rows.reshape(num_local, room.expert, width)))
    reply = dispatch_rows(outputs.reshape(-1, width), placement.inverse()).reshape(arrived.shape)
    return _with_header(reply, row < nowhere, room), clipped


def _with_header(payload: Float[Array, "*lead rows width"], values: Array, room: PoolRoom) -> Array:
    """Writes one small integer per slot over the header rows."""
    *lead, _, width = payload.shape
    spare = room.header * width - room.pool
    header = jnp.pad(values.astype(payload.dtype), [(0, 0)] * len(lead) + [(0, spare)])
    return jnp.concatenate([header.reshape(*lead, room.header, width), payload[..., room.header :, :]], axis=-2)


def _read_header(payload: Float[Array, "*lead rows width"], room: PoolRoom) -> Int[Array, "*lead slots"]:
    header = jax.lax.stop_gradient(payload[..., : room.header, :])
    return header.reshape(*payload.shape[:-2], -1)[..., : room.pool].astype(jnp.int32)
