"""The transports' rules on given routes, in NumPy: who is sent, who is kept. No rows, no devices; imports no jax.

Exactly the kept sets of the transports, rank by rank, so that 64 ranks of 65,536 tokens take seconds. The sender's
part sees one rank at a time; what the receivers do needs only what arrived at each of their bins.
"""

from dataclasses import dataclass

import numpy as np

from rungwise.comm.buffers import cell_slots, pool_room, ragged_room
from rungwise.comm.capacity import logical_capacity
from rungwise.comm.config import TransportConfig

_ANY_WIDTH = 1 << 20
"""Header rows do not matter to who is kept."""


@dataclass(frozen=True)
class Claims:
    """Where one rank's assignments stand before anything is sent; arrays over items t * top_k + k."""

    expert: np.ndarray
    """Expert that is to compute it; num_experts or beyond where the assignment is not valid."""
    rank: np.ndarray
    """Position in its bin."""
    placed: np.ndarray
    turn: np.ndarray | None
    """How many choices further than its own; None where nothing can spill."""


@dataclass(frozen=True)
class Kept:
    """All ranks' assignments, [ranks, tokens, top_k]."""

    valid: np.ndarray
    sent: np.ndarray
    kept: np.ndarray
    turn: np.ndarray


def rank_within(bins: np.ndarray, num_bins: int) -> np.ndarray:
    """Number of earlier items in the same bin; bins are below 65,536, those from `num_bins` on count together."""
    small = np.minimum(bins, num_bins).astype(np.uint16)
    order = np.argsort(small, kind="stable")  # a radix sort, for 16 bits
    counts = np.bincount(small, minlength=num_bins + 1)
    rank = np.empty(len(bins), np.int32)
    rank[order] = np.arange(len(bins), dtype=np.int32) - np.repeat(
        (np.cumsum(counts) - counts).astype(np.int32), counts
    )
    return rank


def bin_size(config: TransportConfig) -> int:
    """Experts that share a bin at the sender."""
    return config.experts_per_rank if config.name == "pooled_wave" else 1


def sender_limit(config: TransportConfig, num_valid: int, *, num_tokens: int) -> int:
    """Slots of a sender's bin, all waves of a pool together, for this many valid assignments of one rank."""
    waves = config.num_waves if config.name == "pooled_wave" else 1
    if config.name == "pooled_wave":
        physical = pool_room(config, num_tokens=num_tokens, width=_ANY_WIDTH).pool
    else:
        physical = cell_slots(config, num_tokens=num_tokens)
    num_bins = config.num_experts // bin_size(config) * waves
    return waves * _logical(num_valid, num_bins, config.sender_capacity_factor, physical)


def receiver_limit(config: TransportConfig, num_valid: int, *, num_tokens: int) -> int:
    """Rows of an expert and wave (`pooled_wave`) or of a destination (`ragged`), for all ranks' valid assignments."""
    if config.name == "ragged":
        physical, num_bins = ragged_room(config, num_tokens=num_tokens).pool, config.num_ranks
    else:
        physical = pool_room(config, num_tokens=num_tokens, width=_ANY_WIDTH).expert
        num_bins = config.num_experts * config.num_waves
    return _logical(num_valid, num_bins, config.receiver_capacity_factor, physical)


def _logical(num_valid: int, num_bins: int, factor: float, physical: int) -> int:
    return int(logical_capacity(np.int64(num_valid), num_bins=num_bins, capacity_factor=factor, physical=physical))


def claim_slots(expert: np.ndarray, config: TransportConfig, limit: int, *, rank: np.ndarray | None = None) -> Claims:
    """First come, first served in each bin, then the rounds of spill; the rule of `comm/claims.py`.

    Args:
        expert: of one rank's items; num_experts or beyond where not valid.
        rank: `rank_within` of the items' bins, where the caller has it already.
    """
    num_experts, size = config.num_experts, bin_size(config)
    num_bins = num_experts // size
    rank = rank_within(expert // size, num_bins) if rank is None else rank
    placed = (rank < limit) & (expert < num_experts)
    if not config.spill:
        return Claims(expert, rank, placed, None)
    used, rank, turn = expert.copy(), rank.copy(), np.zeros(len(expert), np.int8)
    choices = expert.reshape(-1, config.top_k)
    for step in range(1, config.spill + 1):
        taken = np.bincount(used[placed] // size, minlength=num_bins)
        waiting = np.flatnonzero(~placed & (expert < num_experts))
        token, choice = np.divmod(waiting, config.top_k)
        offered = choices[token, (choice + step) % config.top_k]
        waiting, offered = waiting[offered < num_experts], offered[offered < num_experts]
        position = taken[offered // size] + rank_within(offered // size, num_bins)
        won = position < limit
        used[waiting[won]], rank[waiting[won]] = offered[won], position[won]
        placed[waiting[won]], turn[waiting[won]] = True, step
    return Claims(used, rank, placed, turn)


def accept(requested: np.ndarray, config: TransportConfig, limit: int) -> np.ndarray:
    """Acceptance table of `ragged`, [sources, experts], from the assignments requested of each source and expert."""
    ranks = config.num_ranks
    in_order = requested.reshape(ranks, ranks, -1).transpose(1, 2, 0).reshape(ranks, -1)
    after = np.minimum(np.cumsum(in_order, axis=1), limit)
    before = np.minimum(np.cumsum(in_order, axis=1) - in_order, limit)
    return (after - before).reshape(ranks, -1, ranks).transpose(2, 0, 1).reshape(ranks, -1)


def kept_set(expert_ids: np.ndarray, config: TransportConfig, *, valid: np.ndarray | None = None) -> Kept:
    """Which assignments the transport sends and computes.

    Args:
        expert_ids: [ranks, tokens, top_k]; an expert outside 0..num_experts−1 is no valid assignment.
        valid: [ranks, tokens], False for padding.
    """
    real = np.ones(expert_ids.shape[:2], bool) if valid is None else valid
    usable = (expert_ids >= 0) & (expert_ids < config.num_experts) & real[..., None]
    expert = np.where(usable, expert_ids, config.num_experts).reshape(len(expert_ids), -1)
    num_tokens, still = expert_ids.shape[1], np.zeros(expert_ids.shape, np.int8)
    if config.name == "dropless":
        return Kept(usable, usable, usable, still)
    if config.name == "ragged":
        load = np.stack([np.bincount(row, minlength=config.num_experts + 1)[:-1] for row in expert])
        accepted = accept(load, config, receiver_limit(config, int(load.sum()), num_tokens=num_tokens))
        room = np.pad(accepted, ((0, 0), (0, 1)))
        rank = np.stack([rank_within(row, config.num_experts) for row in expert])
        kept = (rank < np.take_along_axis(room, expert, axis=1)).reshape(usable.shape)
        return Kept(usable, kept, kept, still)
    limits = [sender_limit(config, int(row.sum()), num_tokens=num_tokens) for row in usable]
    claims = [claim_slots(row, config, limit) for row, limit in zip(expert, limits, strict=True)]
    sent = np.stack([claim.placed for claim in claims]).reshape(usable.shape)
    turn = still if not config.spill else np.stack([claim.turn for claim in claims]).reshape(usable.shape)
    if config.name == "expert_cell":
        return Kept(usable, sent, sent, turn)
    limit = receiver_limit(config, int(usable.sum()), num_tokens=num_tokens)
    kept = _first_arrivals(claims, config, limit).reshape(usable.shape)
    return Kept(usable, sent, kept, turn)


def _first_arrivals(claims: list[Claims], config: TransportConfig, limit: int) -> np.ndarray:
    """Items that find a row at their expert and wave: slot by slot, and within a slot source by source."""
    sent = [np.flatnonzero(claim.placed) for claim in claims]
    source = np.repeat(np.arange(len(claims)), [len(items) for items in sent])
    item = np.concatenate(sent)
    expert = np.concatenate([claim.expert[items] for claim, items in zip(claims, sent, strict=True)])
    rank = np.concatenate([claim.rank[items] for claim, items in zip(claims, sent, strict=True)])
    wave, slot = rank % config.num_waves, rank // config.num_waves
    bins = expert.astype(np.int64) * config.num_waves + wave
    order = np.lexsort((source, slot, bins))
    counts = np.bincount(bins, minlength=config.num_experts * config.num_waves)
    position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.zeros((len(claims), len(claims[0].placed)), bool)
    first = order[position < limit]
    kept[source[first], item[first]] = True
    return kept
