"""What a transport returns, and honest accounting of what it dropped.

Counts are one rank's, int32; the caller adds them over ranks (and micro-steps) before dividing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm.config import TransportConfig
from rungwise.comm.placement import count_within


class DropCounts(NamedTuple):
    """kept + sender_dropped + receiver_dropped = valid. Padding tokens count nowhere."""

    valid: Int[Array, ""]
    """Assignments of real tokens to existing experts."""
    spilled: Int[Array, ""]
    """Kept assignments computed by another of their token's experts."""
    clipped_values: Int[Array, ""]
    """Values this rank sent or multiplied that the number format of its payload or of its experts could not hold."""
    sender_dropped: Int[Array, ""]
    """Assignments that found no slot before they were sent."""
    receiver_dropped: Int[Array, ""]
    """Assignments of this rank's tokens that arrived and found their expert full."""
    out_of_range: Int[Array, ""]
    """Assignments of real tokens to an expert outside 0..num_experts−1: always a fault, so a run must stop unless 0."""
    tokens_valid: Int[Array, ""]
    tokens_lost_all_routes: Int[Array, ""]
    """Real tokens none of whose assignments was computed."""
    expert_load: Int[Array, " experts"]
    """Valid assignments by chosen expert, before any drop."""
    rank_load: Int[Array, " ranks"]
    """The same by owning rank."""


class TransportResult(NamedTuple):
    """Combined expert outputs of this rank's tokens, and how they came about."""

    output: Float[Array, "tokens width"]
    counts: DropCounts
    kept: Bool[Array, "tokens top_k"]
    """Which assignments were computed, by the chosen expert or after a spill by another."""


class Assignments(NamedTuple):
    """Routes with everything that must not travel taken out."""

    expert: Int[Array, " items"]
    """Expert of item t * top_k + k; num_experts where the assignment is not valid."""
    valid: Bool[Array, "tokens top_k"]
    real: Bool[Array, " tokens"]
    """Tokens that are not padding."""


def read_assignments(
    expert_ids: Int[Array, "tokens top_k"], valid: Bool[Array, " tokens"] | None, *, num_experts: int
) -> Assignments:
    """An assignment is valid when its token is no padding and its expert exists."""
    real = jnp.ones(expert_ids.shape[0], bool) if valid is None else valid
    usable = (expert_ids >= 0) & (expert_ids < num_experts) & real[:, None]
    expert = jnp.where(usable, expert_ids, num_experts).astype(jnp.int32)
    return Assignments(expert.reshape(-1), usable, real)


def count_drops(
    assignments: Assignments,
    *,
    sent: Bool[Array, "tokens top_k"],
    kept: Bool[Array, "tokens top_k"],
    config: TransportConfig,
    turn: Int[Array, "tokens top_k"] | int = 0,
    clipped: Int[Array, ""] | int = 0,
) -> DropCounts:
    """Counts of one rank from which assignments were sent and which of those were computed.

    Args:
        turn: above 0 where an assignment was placed by a spill.
        clipped: values clipped on this rank's way out and by its experts.
    """
    _, valid, real = assignments
    load = count_within(assignments.expert, config.num_experts)

    def count(mask: Array) -> Int[Array, ""]:
        return jnp.sum(mask, dtype=jnp.int32)

    return DropCounts(
        valid=count(valid),
        spilled=count(kept & (jnp.asarray(turn) > 0)),
        clipped_values=jnp.asarray(clipped, jnp.int32),
        sender_dropped=count(valid & ~sent),
        receiver_dropped=count(sent & ~kept),
        out_of_range=count(real[:, None] & ~valid),
        tokens_valid=count(real),
        tokens_lost_all_routes=count(real & ~jnp.any(kept, axis=-1)),
        expert_load=load,
        rank_load=jnp.sum(load.reshape(config.num_ranks, -1), axis=-1, dtype=jnp.int32),
    )
