"""The MoE branch: router on the full width, routed experts in the latent width, shared experts on every token.

How routed tokens reach their experts is a `MoeMethod`, built in `model/methods.py`; this file is the mathematics
around it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.model.balance import quantile_bias
from rungwise.model.config import ModelConfig
from rungwise.model.linear import gated, linear, side_by_side
from rungwise.model.norm import rms_norm
from rungwise.model.router import Routes, choose_experts


class RoutedOutput(NamedTuple):
    """What routed experts give back for a batch, counts added over ranks."""

    output: Float[Array, "batch seq latent"]
    valid: Int[Array, ""]
    """Assignments that had a right to be computed."""
    sender_dropped: Int[Array, ""]
    receiver_dropped: Int[Array, ""]
    tokens_lost_all_routes: Int[Array, ""]
    expert_load: Int[Array, " experts"]
    """Assignments addressed to each expert, dropped ones included."""
    rank_load_max_over_mean: Float[Array, ""]
    """Assignments addressed to the busiest rank over the mean rank, averaged over data replicas."""


MoeMethod = Callable[[jax.Array, jax.Array, jax.Array, dict[str, Any]], RoutedOutput]
"""(latent [batch, seq, latent], experts [batch, seq, top_k], gates, expert weights) → `RoutedOutput`."""


class LayerStats(NamedTuple):
    """Figures of one layer and step; none is differentiated. Names are those of the metric vocabulary."""

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


class MoeResult(NamedTuple):
    """Output of one MoE branch, without its residual."""

    output: Float[Array, "batch seq hidden"]
    stats: LayerStats
    next_bias: Float[Array, " experts"]


def moe(
    params: dict[str, Any],
    bias: Float[Array, " experts"],
    x: Float[Array, "batch seq hidden"],
    *,
    config: ModelConfig,
    method: MoeMethod,
) -> MoeResult:
    """routed experts (latent, by `method`) + shared experts (full width, never cross ranks)."""
    rows = x.reshape(-1, config.hidden_dim)
    logits = linear(rows.astype(jnp.float32), params["router"].astype(jnp.float32)).reshape(*x.shape[:2], -1)
    routes = choose_experts(logits, bias, top_k=config.top_k, gate_sum=config.gate_sum)
    weights = [params["latent_down"]]
    if config.num_shared_experts:
        weights.append(side_by_side(params["shared"]["gate_up"]))
    entering = linear(rows, jnp.concatenate(weights, axis=1))  # one product where two would read the same rows
    latent, hidden = jnp.split(entering, [config.latent_dim], axis=1)
    latent = rms_norm(latent, params["latent_norm"], epsilon=config.norm_epsilon).reshape(*x.shape[:2], -1)
    routed = method(latent, routes.experts, routes.gates, params["experts"])
    output = linear(routed.output.reshape(len(rows), -1), params["latent_up"])
    if config.num_shared_experts:
        output = output + gated(hidden, params["shared"]["down"])
    output = output.reshape(x.shape)
    frozen = jax.lax.stop_gradient(logits)
    return MoeResult(
        output,
        _layer_stats(frozen, bias, jax.lax.stop_gradient(routes), routed, config),
        _next_bias(frozen, bias, routes, config),
    )


def _next_bias(logits: jax.Array, bias: jax.Array, routes: Routes, config: ModelConfig) -> jax.Array:
    if config.balance == "none":
        return bias
    flat = logits.reshape(-1, config.num_experts)
    return quantile_bias(flat, routes.threshold.reshape(-1), top_k=config.top_k)


def _layer_stats(
    logits: jax.Array, bias: jax.Array, routes: Routes, routed: RoutedOutput, config: ModelConfig
) -> LayerStats:
    uniform = 1.0 / config.num_experts
    log_z = jax.nn.logsumexp(logits, axis=-1)
    probability = jnp.mean(jnp.exp(logits - log_z[..., None]), axis=(0, 1))
    load = routed.expert_load.astype(jnp.float32)
    frequency = load / jnp.maximum(jnp.sum(load), 1.0)
    valid = jnp.maximum(routed.valid, 1).astype(jnp.float32)
    sender, receiver = routed.sender_dropped / valid, routed.receiver_dropped / valid
    off_frequency, off_probability = frequency - uniform, probability - uniform
    scale = config.num_experts**0.5
    zero = jnp.zeros((), jnp.float32)
    return LayerStats(
        drop_fraction=sender + receiver,
        sender_drop_fraction=sender,
        receiver_drop_fraction=receiver,
        expert_load_max_over_mean=jnp.max(frequency) * config.num_experts,
        rank_load_max_over_mean=routed.rank_load_max_over_mean,
        dead_experts=jnp.sum(routed.expert_load == 0).astype(jnp.float32),
        router_entropy=-jnp.sum(probability * jnp.log(jnp.maximum(probability, 1e-30))),
        router_bias_abs_max=jnp.max(jnp.abs(bias)),
        topk_margin=jnp.mean(routes.margin),
        tokens_lost_all_routes=routed.tokens_lost_all_routes * config.top_k / valid,
        balance_inner_product=config.num_experts * jnp.sum(off_frequency * off_probability),
        frequency_deviation=scale * jnp.linalg.norm(off_frequency),
        probability_deviation=scale * jnp.linalg.norm(off_probability),
        router_z_loss=jnp.mean(jnp.square(log_z)),
        attention_logit_max=zero,
        residual_rms=zero,
    )
