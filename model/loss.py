"""What is minimised: next-token cross-entropy plus weighted penalties, each kept apart.

A mean is the sum over counted tokens over their number in the whole batch. Sums are what ranks and microbatches hand
on, so a token weighs the same wherever it lies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
    """Sums over the counted tokens of a part of a batch; they add up, `logit_abs_max` by maximum."""

    loss: Float[Array, ""]
    """Cross-entropy, nats."""
    logit_z: Float[Array, ""]
    """Squared log-partition."""
    log_z: Float[Array, ""]
    count: Float[Array, ""]
    logit_abs_max: Float[Array, ""]


class LossParts(NamedTuple):
    """Means over counted tokens, nats; NaN where no token is counted."""

    loss: Float[Array, ""]
    """Cross-entropy alone: what ladders are fitted on."""
    logit_z_loss: Float[Array, ""]
    """Mean squared log-partition, unweighted."""
    balance_loss: Float[Array, ""]
    """Sum over layers, unweighted; zero unless balance is an auxiliary loss."""
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


def loss_sums(
    logits: Float[Array, "batch seq vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"] | None = None,
) -> LossSums:
    """Sums over counted tokens.

    Args:
        weights: 1 for a counted token, 0 for one that is not; all counted when absent.
    """
    losses, log_z = token_losses(logits, targets)
    counted = jnp.ones_like(losses) if weights is None else weights
    frozen = jax.lax.stop_gradient(log_z)
    return LossSums(
        loss=jnp.sum(losses * counted),
        logit_z=jnp.sum(jnp.square(log_z) * counted),
        log_z=jnp.sum(frozen * counted),
        count=jnp.sum(counted),
        logit_abs_max=jnp.max(jnp.abs(jax.lax.stop_gradient(logits))),
    )


def objective_of(sums: LossSums, count: Float[Array, ""] | float, *, z_loss_weight: float) -> Float[Array, ""]:
    """loss + z_loss_weight · logit z-loss of a part, as its share of the whole batch's `count` tokens.

    Source: Chowdhery et al. 2022 (PaLM) for the z-loss.
    """
    return (sums.loss + z_loss_weight * sums.logit_z) / jnp.maximum(count, 1.0)


def loss_parts(
    sums: LossSums, *, z_loss_weight: float, balance_loss: Float[Array, ""] | float, penalty: Float[Array, ""] | float
) -> LossParts:
    """Means of a whole batch.

    Args:
        penalty: weighted router z-loss and balance loss, both added over layers.
    """
    loss, logit_z = sums.loss / sums.count, sums.logit_z / sums.count
    return LossParts(
        loss=loss,
        logit_z_loss=logit_z,
        balance_loss=jnp.asarray(balance_loss, jnp.float32),
        objective=loss + z_loss_weight * logit_z + penalty,
        logit_abs_max=sums.logit_abs_max,
        log_z_mean=sums.log_z / sums.count,
    )
