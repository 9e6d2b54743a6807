"""Load balance without an auxiliary loss: a bias that makes every expert win its share of the batch.

The bias computed from one step selects experts at the next. It is state: checkpointed, and untouched by evaluation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BISECTIONS = 26
"""Halvings of the margin range: its 2⁻²⁶ is below float32 resolution for any usable router."""


def upper_quantile(values: Float[Array, "tokens experts"], count: Int[Array, ""] | int) -> Float[Array, " experts"]:
    """Per column, a level exceeded by at most `count` entries, by bisection on counts.

    Counting needs no sort, and across ranks only sums of counts, so every rank finds the same level.
    """
    low, high = jnp.min(values, axis=0) - 1e-6, jnp.max(values, axis=0)

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = jnp.sum(values > middle, axis=0, dtype=jnp.int32)
        too_many = above > count
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    _, high = jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return high


def quantile_bias(
    logits: Float[Array, "tokens experts"], threshold: Float[Array, " tokens"], *, top_k: int
) -> Float[Array, " experts"]:
    """Bias for the next step, from this step's unbiased logits and selection thresholds.

    margin = logit − threshold; β_e = the level that a fraction top_k / num_experts of the tokens' margins exceeds;
    bias_e = mean(β) − β_e.

    Source: the reference run's quantile balancing (marin-community/marin, experiments/grug/moe_hero_ep/model.py).
    """
    num_tokens, num_experts = logits.shape
    margin = jax.lax.stop_gradient(logits - threshold[:, None])
    level = upper_quantile(margin, num_tokens * top_k // num_experts)
    return jnp.mean(level) - level
