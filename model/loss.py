"""What is minimised: next-token cross-entropy plus the logit z-loss, each kept apart."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossParts(NamedTuple):
    """Means over counted tokens, nats."""

    loss: Float[Array, ""]
    """Cross-entropy alone: what ladders are fitted on."""
    logit_z_loss: Float[Array, ""]
    """Mean squared log-partition, unweighted."""
    objective: Float[Array, ""]
    """What is differentiated."""
    logit_abs_max: Float[Array, ""]
    log_z_mean: Float[Array, ""]


def token_losses(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"]
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Cross-entropy and log-partition of every token, nats: log Σ exp(logits) − logit[target]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_z - picked, log_z


def language_model_loss(
    logits: Float[Array, "batch seq vocab"],
    targets: Int[Array, "batch seq"],
    *,
    z_loss_weight: float,
    weights: Float[Array, "batch seq"] | None = None,
) -> LossParts:
    """Sum over counted tokens divided by their count, for the loss and for the z-loss.

    objective = loss + z_loss_weight · mean(log_z²)

    Args:
        weights: 1 for a counted token, 0 for padding; all counted when absent.
    Source: Chowdhery et al. 2022 (PaLM) for the z-loss.
    """
    losses, log_z = token_losses(logits, targets)
    counted = jnp.ones_like(losses) if weights is None else weights
    count = jnp.maximum(jnp.sum(counted), 1.0)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * counted) / count

    loss, z_loss = mean(losses), mean(jnp.square(log_z))
    frozen = jax.lax.stop_gradient(logits)
    return LossParts(
        loss=loss,
        logit_z_loss=z_loss,
        objective=loss + z_loss_weight * z_loss,
        logit_abs_max=jnp.max(jnp.abs(frozen)),
        log_z_mean=mean(jax.lax.stop_gradient(log_z)),
    )
