"""How routed tokens reach their experts: a `comm` transport over ranks, around the model's expert weights.

On one device the ranks are virtual: the batch is cut into data replicas × ranks, and each rank runs the same per-rank
code with its own experts. Evaluation uses the same function with the `dropless` transport on one rank.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rungwise.comm.config import TransportConfig
from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.ranks import Ranks, over_ranks
from rungwise.comm.transports import route
from rungwise.model.linear import swiglu
from rungwise.model.moe import MoeMethod, RoutedOutput

AXIS = "expert"


def dropless_config(num_experts: int, top_k: int) -> TransportConfig:
    """Every assignment computed, on one rank: what evaluation uses."""
    return TransportConfig(name="dropless", num_experts=num_experts, top_k=top_k, num_ranks=1, num_waves=1)


def run_experts(weights: dict[str, jax.Array], rows: jax.Array, group_expert: jax.Array | None = None) -> jax.Array:
    """Each group of rows through its expert's SwiGLU: [groups, rows, width] → the same shape.

    Args:
        weights: `gate_up` [experts, width, 2, inner], `down` [experts, inner, width].
        group_expert: expert of each group; absent where group g belongs to expert g.
    """
    if group_expert is None:
        return swiglu(weights["gate_up"], weights["down"], rows)
    gate_up = weights["gate_up"]
    hidden = grouped_matmul(rows, gate_up.reshape(*gate_up.shape[:2], -1), group_expert)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return grouped_matmul(jax.nn.silu(gate) * up, weights["down"], group_expert)


@jax.custom_batching.custom_vmap
def _run_experts_of_ranks(weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    """`run_experts` that, mapped over data replicas, lays their rows end to end: weights are read and their gradient
    is summed once, in one matrix product, instead of once a replica."""
    return run_experts(weights, rows)


@_run_experts_of_ranks.def_vmap
def _(size: int, mapped: list[Any], weights: dict[str, jax.Array], rows: jax.Array) -> tuple[jax.Array, bool]:
    if all(jax.tree.leaves(mapped)):  # over ranks, each with experts of its own
        return _run_experts_of_ranks(weights, rows), True
    together = jnp.moveaxis(rows, 0, -3)
    merged = together.reshape(*together.shape[:-3], -1, together.shape[-1])
    return jnp.moveaxis(run_experts(weights, merged).reshape(together.shape), -3, 0), True


def build_method(transport: TransportConfig, *, data_replicas: int = 1) -> MoeMethod:
    """Routed experts over `data_replicas` groups of `transport.num_ranks` virtual ranks.

    The batch's sequences are dealt out in order: replica by replica, rank by rank.
    """
    ranks = Ranks(AXIS, transport.num_ranks)

    def one_rank(weights: dict[str, jax.Array], tokens: jax.Array, experts: jax.Array, gates: jax.Array) -> Any:
        def expert_fn(rows: jax.Array, group_expert: jax.Array | None = None) -> jax.Array:
            if group_expert is None:
                return _run_experts_of_ranks(weights, rows)
            return run_experts(weights, rows, group_expert)

        return route(tokens, experts, gates, expert_fn, axis=AXIS, config=transport)

    def run(latent: jax.Array, experts: jax.Array, gates: jax.Array, weights: dict[str, Any]) -> RoutedOutput:
        batch, seq_len, width = latent.shape
        group = (data_replicas, transport.num_ranks, batch * seq_len // (data_replicas * transport.num_ranks))
        if batch % (data_replicas * transport.num_ranks):
            raise ValueError(
                f"batch {batch} does not divide over {data_replicas} replicas × {transport.num_ranks} ranks; change one"
            )
        owned = jax.tree.map(lambda leaf: leaf.reshape(transport.num_ranks, -1, *leaf.shape[1:]), weights)
        every_replica = jax.vmap(over_ranks(one_rank, ranks), in_axes=(None, 0, 0, 0))
        result = every_replica(
            owned, latent.reshape(*group, width), experts.reshape(*group, -1), gates.reshape(*group, -1)
        )
        counts = result.counts
        rank_load = jnp.sum(counts.rank_load, axis=1).astype(jnp.float32)
        mean_load = jnp.maximum(jnp.mean(rank_load, axis=-1), 1.0)
        return RoutedOutput(
            output=result.output.reshape(batch, seq_len, width),
            valid=jnp.sum(counts.valid),
            sender_dropped=jnp.sum(counts.sender_dropped),
            receiver_dropped=jnp.sum(counts.receiver_dropped),
            tokens_lost_all_routes=jnp.sum(counts.tokens_lost_all_routes),
            expert_load=jnp.sum(counts.expert_load, axis=(0, 1)),
            rank_load_max_over_mean=jnp.sum(jnp.max(rank_load, axis=-1) / mean_load),
        )

    return MoeMethod(run=run, data_replicas=data_replicas, num_ranks=transport.num_ranks)
