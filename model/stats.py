"""What a layer reports: sums that add up over microbatches and ranks, and the figures made of them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LayerSums(NamedTuple):
    """Additive figures of one layer, but for `rank_load`; none is differentiated."""

    tokens: Int[Array, "*layers"]
    valid: Int[Array, "*layers"]
    """Assignments that had a right to be computed."""
    sender_dropped: Int[Array, "*layers"]
    receiver_dropped: Int[Array, "*layers"]
    tokens_lost_all_routes: Int[Array, "*layers"]
    expert_load: Int[Array, "*layers experts"]
    """Assignments addressed to each expert, dropped ones included."""
    rank_load: Int[Array, "*layers replicas ranks"]
    """Assignments addressed to each rank of each data replica; parts of a batch hold other replicas, in order."""
    probability: Float[Array, "*layers experts"]
    """Softmax router probability, added over tokens."""
    margin: Float[Array, "*layers"]
    router_z: Float[Array, "*layers"]
    """Squared log-sum-exp of router logits, added over tokens."""
    residual_square: Float[Array, "*layers"]
    """Mean square of the residual stream, added over tokens."""
    clipped_values: Float[Array, "*layers"] | None = None
    """Values of rows that MXFP8 could not hold; None where no row is in MXFP8."""


class LayerStats(NamedTuple):
    """Figures of one layer and step. Names are those of the metric vocabulary."""

    drop_fraction: Float[Array, "*layers"]
    sender_drop_fraction: Float[Array, "*layers"]
    receiver_drop_fraction: Float[Array, "*layers"]
    expert_load_max_over_mean: Float[Array, "*layers"]
    rank_load_max_over_mean: Float[Array, "*layers"]
    dead_experts: Float[Array, "*layers"]
    router_entropy: Float[Array, "*layers"]
    router_bias_abs_max: Float[Array, "*layers"]
    topk_margin: Float[Array, "*layers"]
    tokens_lost_all_routes: Float[Array, "*layers"]
    balance_inner_product: Float[Array, "*layers"]
    frequency_deviation: Float[Array, "*layers"]
    probability_deviation: Float[Array, "*layers"]
    router_z_loss: Float[Array, "*layers"]
    attention_logit_max: Float[Array, "*layers"]
    residual_rms: Float[Array, "*layers"]


def layer_stats(
    sums: LayerSums, *, bias: Float[Array, "*layers experts"], attention_logit_max: Float[Array, "*layers"]
) -> LayerStats:
    """Figures of a whole batch.

    With f the fraction of assignments and P the mean router probability of each of E experts, a balance loss E·Σ f·P is
    one plus `balance_inner_product`; the two deviations √E·‖f − 1/E‖ and √E·‖P − 1/E‖ say what it hides.

    Args:
        bias: that chose the experts of this batch.
    """
    tokens, valid = jnp.maximum(sums.tokens, 1), jnp.maximum(sums.valid, 1)
    num_experts = sums.expert_load.shape[-1]
    uniform, scale = 1.0 / num_experts, num_experts**0.5
    probability = sums.probability / tokens[..., None]
    frequency = sums.expert_load / jnp.maximum(jnp.sum(sums.expert_load, axis=-1, keepdims=True), 1)
    sender, receiver = sums.sender_dropped / valid, sums.receiver_dropped / valid
    off_frequency, off_probability = frequency - uniform, probability - uniform
    return LayerStats(
        drop_fraction=sender + receiver,
        sender_drop_fraction=sender,
        receiver_drop_fraction=receiver,
        expert_load_max_over_mean=jnp.max(frequency, axis=-1) * num_experts,
        rank_load_max_over_mean=_rank_load_max_over_mean(sums.rank_load),
        dead_experts=jnp.sum(sums.expert_load == 0, axis=-1).astype(jnp.float32),
        router_entropy=-jnp.sum(probability * jnp.log(jnp.maximum(probability, 1e-30)), axis=-1),
        router_bias_abs_max=jnp.max(jnp.abs(bias), axis=-1),
        topk_margin=sums.margin / tokens,
        tokens_lost_all_routes=sums.tokens_lost_all_routes / tokens,
        balance_inner_product=num_experts * jnp.sum(off_frequency * off_probability, axis=-1),
        frequency_deviation=scale * jnp.linalg.norm(off_frequency, axis=-1),
        probability_deviation=scale * jnp.linalg.norm(off_probability, axis=-1),
        router_z_loss=sums.router_z / tokens,
        attention_logit_max=attention_logit_max,
        residual_rms=jnp.sqrt(sums.residual_square / tokens),
    )


def _rank_load_max_over_mean(load: Int[Array, "*layers replicas ranks"]) -> Float[Array, "*layers"]:
    """Load of the busiest rank over the mean rank's, mean over replicas."""
    wide = load.astype(jnp.float32)
    ratio = jnp.max(wide, axis=-1) / jnp.maximum(jnp.mean(wide, axis=-1), 1.0)
    return jnp.sum(ratio, axis=-1) / load.shape[-2]


def added(sums: LayerSums, add: Callable[[jax.Array], jax.Array], rank_load: jax.Array) -> LayerSums:
    """Sums of a whole batch.

    Args:
        add: adds the parts of one field up.
        rank_load: of all replicas, [*layers, replicas, ranks].
    """
    total = jax.tree.map(add, sums._replace(rank_load=None))
    return total._replace(rank_load=rank_load)


def token_sums(logits: Float[Array, "*tokens experts"], margin: Float[Array, "*tokens"]) -> dict[str, jax.Array]:
    """The router's part of `LayerSums`."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    probability = jnp.exp(logits - log_z[..., None]).reshape(-1, logits.shape[-1])
    return {
        "tokens": jnp.asarray(log_z.size, jnp.int32),
        "probability": jnp.sum(probability, axis=0),
        "margin": jnp.sum(margin),
        "router_z": jnp.sum(jnp.square(log_z)),
    }
