"""Who gets a slot: first come, first served within a bin; the rest is offered to their token's other experts.

A bin is whatever fills up on its own at the sender: an expert's cell, a destination's pool. Small int32 tables only.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm.placement import lookup, rank_within


class Claims(NamedTuple):
    """Where each assignment of one rank stands before anything is sent."""

    expert: Int[Array, " items"]
    """Expert that is to compute it: the chosen one, or another of the token's after a spill."""
    rank: Int[Array, " items"]
    """Position in its bin; meaningless where not placed."""
    placed: Bool[Array, " items"]
    turn: Int[Array, " items"]
    """How many choices further than its own: 0 for the chosen expert."""


def claim_slots(
    expert: Int[Array, " items"],
    *,
    num_experts: int,
    experts_per_bin: int,
    limit: Int[Array, ""],
    top_k: int,
    spill: int = 0,
) -> Claims:
    """Places the first `limit` assignments of each bin, in item order, then `spill` rounds for the others.

    In round j an unplaced choice k of a token is offered to the expert of choice (k + j) mod top_k of the same token,
    behind what its bin holds already; a token may so use one expert twice.

    Args:
        expert: of item t * top_k + k; num_experts or beyond where the assignment is not valid. Such an item is neither
            placed nor offered to.
    Source: marin-community/marin, commit 93ac9499 (the rule; there for cells).
    """
    num_bins = num_experts // experts_per_bin
    bins = expert // experts_per_bin
    rank = rank_within(bins, num_bins)
    placed = (expert < num_experts) & (rank < limit)
    claims = Claims(expert, rank, placed, jnp.zeros_like(expert))
    for turn in range(1, spill + 1):
        taken = jnp.zeros(num_bins, jnp.int32).at[claims.expert // experts_per_bin].add(claims.placed, mode="drop")
        other = jnp.roll(expert.reshape(-1, top_k), -turn, axis=1).reshape(-1)
        offered = jnp.where(claims.placed | (expert >= num_experts), num_experts, other)
        bins = offered // experts_per_bin
        rank = lookup(taken, bins, missing=0) + rank_within(bins, num_bins)
        won = (offered < num_experts) & (rank < limit)
        claims = Claims(
            jnp.where(won, offered, claims.expert),
            jnp.where(won, rank, claims.rank),
            claims.placed | won,
            jnp.where(won, turn, claims.turn),
        )
    return claims


def claimed_gates(gates: Float[Array, "tokens top_k"], claims: Claims, *, spill: int) -> Float[Array, "tokens top_k"]:
    """Combine weight of each assignment: that of the choice whose expert computes it; zero where none does."""
    turn = jnp.where(claims.placed, claims.turn, -1).reshape(gates.shape)
    chosen = jnp.where(turn == 0, gates, 0)
    for step in range(1, spill + 1):
        chosen = chosen + jnp.where(turn == step, jnp.roll(gates, -step, axis=1), 0)
    return chosen
