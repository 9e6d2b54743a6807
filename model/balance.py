"""How experts are kept busy: a bias that only selects, or a loss that asks for balance.

A bias computed from one step selects experts at the next. It is state: checkpointed, and untouched by evaluation and
rematerialisation, because it is computed once a step from what the layers hand out.

* `quantile`: the bias with which every expert would have won its share of this step's tokens.
* `loss_free_bias`: a small step up for experts below the mean load, down for those above it.
* `auxiliary_loss`: no bias, a term of the objective.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.comm.mesh import Axes, add_over, max_over, min_over, ranks_of
from rungwise.model.config import Architecture

BISECTIONS = 26
"""Halvings of the margin range: its 2⁻²⁶ is below float32 resolution for any usable router."""

HISTOGRAM_BINS = 10_000
"""Bins over the range of a step's margins, as the reference run."""


def upper_quantile(
    values: Float[Array, "tokens experts"], count: Int[Array, ""] | int, *, axes: Axes = ()
) -> Float[Array, " experts"]:
    """Per column, a level exceeded by at most `count` entries, by bisection on counts.

    Counting needs no sort, and across ranks only sums of counts, so every rank finds the same level.

    Args:
        axes: of the mesh, over which the rows are dealt out; so in all functions of this file.
    """
    low = min_over(jnp.min(values, axis=0), axes) - 1e-6
    high = max_over(jnp.max(values, axis=0), axes)

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = add_over(jnp.sum(values > middle, axis=0, dtype=jnp.int32), axes)
        too_many = above > count
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    _, high = jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return high


def histogram_quantile(
    values: Float[Array, "tokens experts"], count: float, *, num_bins: int = HISTOGRAM_BINS, axes: Axes = ()
) -> Float[Array, " experts"]:
    """Per column, the level that `count` entries reach, from counts in equal bins over the range of all columns.

    Linear within the bin in which the count is crossed; off by at most a bin's width, (max − min) / bins.

    Source: the reference run's histogram estimator (marin-community/marin, experiments/grug/moe_hero_ep/model.py).
    """
    num_columns = values.shape[1]
    low = min_over(jnp.min(values), axes)
    width = jnp.maximum(max_over(jnp.max(values), axes) - low, 1e-6) / num_bins
    bins = jnp.clip(((values - low) / width).astype(jnp.int32), 0, num_bins - 1)
    flat = (jnp.arange(num_columns, dtype=jnp.int32) * num_bins + bins).reshape(-1)
    counts = jnp.zeros(num_columns * num_bins, jnp.int32).at[flat].add(1).reshape(num_columns, num_bins)
    counts = add_over(counts, axes)
    reaching = jnp.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # entries in this bin or a higher one
    crossing = jnp.maximum(jnp.sum(reaching >= count, axis=1, dtype=jnp.int32) - 1, 0)[:, None]
    excess = jnp.take_along_axis(reaching, crossing, axis=1) - count
    within = jnp.maximum(jnp.take_along_axis(counts, crossing, axis=1), 1)
    return low + width * (crossing + excess / within)[:, 0]


def topk_quantile(
    values: Float[Array, "tokens experts"], *, num_ranks: int, top_k: int, axes: Axes = ()
) -> Float[Array, " experts"]:
    """Per column, the mean over ranks of each rank's max(1, tokens · top_k // experts)-th largest entry.

    Args:
        num_ranks: equal parts of these rows, in order.
    Source: the reference run's cheaper estimator, one small collective a layer.
    """
    by_rank = values.reshape(num_ranks, -1, values.shape[1])
    count = max(1, by_rank.shape[1] * top_k // values.shape[1])
    return _mean_over(jnp.mean(jax.lax.top_k(jnp.swapaxes(by_rank, 1, 2), count)[0][..., -1], axis=0), axes)


def _mean_over(values: Array, axes: Axes) -> Array:
    return add_over(values, axes) / ranks_of(axes) if axes else values


def margins(
    logits: Float[Array, "*tokens experts"], threshold: Float[Array, "*tokens"]
) -> Float[Array, "tokens experts"]:
    """How far each unbiased logit lies above its token's selection threshold; no gradient flows through it."""
    return jax.lax.stop_gradient(logits - threshold[..., None]).reshape(-1, logits.shape[-1])


def quantile_level(
    margin: Float[Array, "tokens experts"], *, config: Architecture, num_ranks: int, axes: Axes = ()
) -> Float[Array, " experts"]:
    """β_e: the level that a fraction top_k / num_experts of the tokens' margins exceeds.

    Args:
        num_ranks: equal parts of these rows, in order.
    """
    tokens, top_k = len(margin) * ranks_of(axes), config.top_k
    if config.quantile_estimator == "topk":
        return topk_quantile(margin, num_ranks=num_ranks, top_k=top_k, axes=axes)
    if config.quantile_estimator == "histogram":
        return histogram_quantile(margin, tokens * top_k / config.num_experts, axes=axes)
    return upper_quantile(margin, tokens * top_k // config.num_experts, axes=axes)


def quantile_bias(level: Float[Array, "*layers experts"]) -> Float[Array, "*layers experts"]:
    """bias_e = mean(β) − β_e.

    Source: the reference run's quantile balancing (marin-community/marin, experiments/grug/moe_hero_ep/model.py).
    """
    return jnp.mean(level, axis=-1, keepdims=True) - level


def loss_free_bias(
    bias: Float[Array, "*layers experts"], load: Int[Array, "*layers experts"], *, step: float
) -> Float[Array, "*layers experts"]:
    """bias_e + step · sign(mean load − load_e); an expert with exactly the mean load keeps its bias.

    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts.
    """
    wide = load.astype(jnp.float32)
    return bias + step * jnp.sign(jnp.mean(wide, axis=-1, keepdims=True) - wide)


def balance_loss(
    logits: Float[Array, "batch seq experts"],
    experts: Int[Array, "batch seq top_k"],
    *,
    scope: str,
    num_ranks: int,
    axes: Axes = (),
) -> Float[Array, ""]:
    """E · Σ_e f_e P_e, f the fraction of assignments and P the mean router probability of expert e.

    It is 1 + E · (f − u)·(P − u), u uniform: only an inner product is asked to fall, so f and P may be skewed in
    opposite directions, and a low value is no proof of balance. The gradient flows through P alone.

    Args:
        scope: which tokens are compared: a rank's (`local`), all (`global`), one `sequence`'s; mean over the parts.
        num_ranks: equal parts of the batch, in order.
        axes: with the scope `global`; else the mean over their ranks is left to the caller.
    Source: Fedus et al. 2021 (Switch Transformer); Qiu et al. 2025 for the scope.
    """
    num_experts = logits.shape[-1]
    parts = {"local": num_ranks, "global": 1, "sequence": logits.shape[0]}[scope]
    probability = jnp.mean(jax.nn.softmax(logits, axis=-1).reshape(parts, -1, num_experts), axis=1)
    chosen = experts.reshape(parts, -1)[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
    frequency = jnp.mean(chosen.astype(jnp.float32), axis=1)
    if scope == "global":
        probability, frequency = _mean_over(probability, axes), _mean_over(frequency, axes)
    return num_experts * jnp.mean(jnp.sum(frequency * probability, axis=-1))
