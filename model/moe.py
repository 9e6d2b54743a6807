"""The MoE branch: router on the full width, routed experts in the latent width, shared experts on every token.

How routed tokens reach their experts is a `MoeMethod`, built in `model/methods.py`; this file is the mathematics
around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.comm.mesh import Axes
from rungwise.model.balance import balance_loss, margins
from rungwise.model.config import ModelConfig
from rungwise.model.linear import gated, linear, side_by_side
from rungwise.model.norm import rms_norm
from rungwise.model.router import Routes, assign_experts, choose_experts
from rungwise.model.short_conv import short_conv
from rungwise.model.stats import LayerSums, token_sums


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
    rank_load: Int[Array, "replicas ranks"]
    """Assignments of this part of the batch addressed to each rank of each of its data replicas."""
    clipped_values: Float[Array, ""] | None = None
    """Values that MXFP8 could not hold, sent or multiplied; None where neither is in MXFP8."""


@dataclass(frozen=True, kw_only=True)
class MoeMethod:
    """How routed tokens reach their experts, and over how many ranks a batch is dealt out in order."""

    run: Callable[[jax.Array, jax.Array, jax.Array, dict[str, Any]], RoutedOutput]
    """(latent [batch, seq, latent], experts [batch, seq, top_k], gates, expert weights) → `RoutedOutput`."""
    data_replicas: int
    num_ranks: int
    """Ranks of one replica; on a mesh, those of this device."""
    axes: Axes = ()
    """Axes of the mesh over which the batch is dealt out before; each device then runs its own part of it."""


class MoeResult(NamedTuple):
    """Output of one MoE branch, without its residual, and what the step needs to know of it."""

    output: Float[Array, "batch seq hidden"]
    sums: LayerSums
    margins: Float[Array, "tokens experts"] | None
    """Of every logit to its token's threshold, where quantile balancing needs them."""
    router_z_loss: Float[Array, ""]
    """Mean squared log-sum-exp of the router logits, differentiable."""
    balance_loss: Float[Array, ""]
    """Differentiable; zero unless balance is an auxiliary loss."""


def moe(
    params: dict[str, Any],
    bias: Float[Array, " experts"],
    x: Float[Array, "batch seq hidden"],
    *,
    config: ModelConfig,
    method: MoeMethod,
    key: jax.Array | None = None,
    conv: Float[Array, "kernel hidden"] | None = None,
) -> MoeResult:
    """routed experts (latent, by `method`) + shared experts (full width, never cross ranks).

    Args:
        key: of a random generator, for random routing.
        conv: taps of a short convolution on the branch's output.
    """
    rows = x.reshape(-1, config.hidden_dim)
    logits = linear(rows.astype(jnp.float32), params["router"].astype(jnp.float32)).reshape(*x.shape[:2], -1)
    routes = _routes(logits, bias, key, config)
    latent, hidden = _entering(params, rows, config)
    routed = method.run(
        latent.reshape(*x.shape[:2], -1), routes.experts, routes.gates.astype(x.dtype), params["experts"]
    )
    output = routed.output.reshape(len(rows), -1)
    if config.latent_dim is not None:
        output = linear(output, params["latent_up"])
    if hidden is not None:
        output = output + gated(hidden, params["shared"]["down"])
    output = output.reshape(x.shape)
    if conv is not None:
        output = short_conv(output, conv)
    zero = jnp.zeros((), jnp.float32)
    z_loss = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))) if config.router_z_loss_weight else zero
    balance = zero
    if config.balance == "auxiliary_loss":
        parts = method.data_replicas * method.num_ranks
        scope = config.balance_scope
        balance = balance_loss(logits, routes.experts, scope=scope, num_ranks=parts, axes=method.axes)
    frozen = jax.lax.stop_gradient(logits)
    return MoeResult(
        output,
        _sums(frozen, jax.lax.stop_gradient(routes), routed),
        margins(frozen, routes.threshold) if config.balance == "quantile" else None,
        z_loss,
        balance,
    )


def _routes(logits: jax.Array, bias: jax.Array, key: jax.Array | None, config: ModelConfig) -> Routes:
    if config.routing == "learned":
        return choose_experts(logits, bias, top_k=config.top_k, gate_sum=config.gate_sum, gate=config.gate)
    assert key is not None, "routing without a router needs a key"
    return assign_experts(
        logits, key, routing=config.routing, top_k=config.top_k, gate_sum=config.gate_sum, gate=config.gate
    )


def _entering(
    params: dict[str, Any], rows: Float[Array, "tokens hidden"], config: ModelConfig
) -> tuple[Float[Array, "tokens routed"], Float[Array, "tokens inner"] | None]:
    """Routed experts' input, and shared experts' gate and up side by side, None where there are none.

    Both read the same rows, so they are one matrix product.
    """
    weights = []
    if config.latent_dim is not None:
        weights.append(params["latent_down"])
    if config.num_shared_experts:
        weights.append(side_by_side(params["shared"]["gate_up"]))
    entering = linear(rows, jnp.concatenate(weights, axis=1)) if weights else None
    if config.latent_dim is None:
        return rows, entering
    assert entering is not None
    latent, hidden = jnp.split(entering, [config.latent_dim], axis=1)
    latent = rms_norm(latent, params["latent_norm"], epsilon=config.norm_epsilon)
    return latent, hidden if config.num_shared_experts else None


def _sums(logits: jax.Array, routes: Routes, routed: RoutedOutput) -> LayerSums:
    counts = {field: getattr(routed, field) for field in RoutedOutput._fields if field != "output"}
    return LayerSums(
        **token_sums(logits, routes.margin),
        **counts,
        residual_square=jnp.zeros((), jnp.float32),
    )
