"""Transport `dropless`: every assignment is computed. The reference, and the rule of evaluation.

Each rank gathers all ranks' tokens, computes its own experts on them and the sum over ranks brings results
home. Any expert may be chosen by any number of tokens, so rows are sorted by expert into blocks of one
expert each: the number of blocks is static though their owners are not.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.comm import collectives
from rungwise.comm.buffers import BLOCK, num_blocks
from rungwise.comm.config import TransportConfig
from rungwise.comm.drops import TransportResult, count_drops, read_assignments
from rungwise.comm.permute import combine_rows, dispatch_rows
from rungwise.comm.placement import Placement, block_rows, count_within, lookup, place, rank_within
from rungwise.comm.waves import served

_BLOCK = BLOCK


def dropless(
    tokens: Float[Array, "tokens width"],
    expert_ids: Int[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    expert_fn: Callable[..., Array],
    *,
    axis: str | None,
    config: TransportConfig,
    valid: Bool[Array, " tokens"] | None = None,
) -> TransportResult:
    """Sum over each token's experts of gate times expert output. Capacities and waves of `config` are not used.

    Args:
        expert_fn: (rows [groups, block, width], expert of each group [groups]) → rows of the same shape; see
            `comm.grouped.grouped_matmul`.
        axis: name of the rank axis; unused on one rank.
        valid: False marks padding, which is not computed and counts nowhere.
    Raises:
        ValueError: `num_ranks` is not the axis size.
    """
    collectives.check_axis(axis, config.num_ranks)
    assignments = read_assignments(expert_ids, valid, num_experts=config.num_experts)
    weights = jnp.where(assignments.valid, gates, 0)
    if axis is None or config.num_ranks == 1:
        output, clipped = _compute(tokens, assignments.expert, weights, expert_fn, num_local=config.num_experts)
    else:
        gather = (collectives.all_gather(values, axis) for values in (tokens, assignments.expert, weights))
        all_tokens, expert, all_weights = gather
        own = expert - jax.lax.axis_index(axis) * config.experts_per_rank
        share, clipped = _compute(all_tokens, own, all_weights, expert_fn, num_local=config.experts_per_rank)
        output = collectives.sum_scatter(share, axis)
    kept = assignments.valid
    return TransportResult(output, count_drops(assignments, sent=kept, kept=kept, config=config, clipped=clipped), kept)


def _compute(tokens, expert, weights, expert_fn, *, num_local):
    """Outputs of experts 0..num_local−1 for all tokens, other experts contribute zero; and what those clipped."""
    placement, group_expert = _sort_into_blocks(expert, num_local)
    rows = dispatch_rows(tokens, placement).reshape(-1, _BLOCK, tokens.shape[1])
    outputs, clipped = served(expert_fn(rows, group_expert))
    return combine_rows(outputs.reshape(-1, tokens.shape[1]), weights, placement), clipped


def _sort_into_blocks(expert: Int[Array, " items"], num_local: int) -> tuple[Placement, Int[Array, " groups"]]:
    """Items to rows of [groups, block] sorted by expert, and the expert of each group (never decreasing)."""
    own = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
    num_groups = num_blocks(own.shape[0], block=_BLOCK, num_experts=num_local)
    first_row, group_expert = block_rows(count_within(own, num_local), block=_BLOCK, num_blocks=num_groups)
    num_rows = num_groups * _BLOCK
    row = lookup(first_row, own, missing=num_rows) + rank_within(own, num_local)
    return place(jnp.where(own < num_local, row, num_rows), num_rows), group_expert
