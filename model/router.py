"""Which experts a token goes to, and with what weight. Float32 whatever the compute type.

Selection uses the biased logits; gates use the unbiased ones, so the balancing bias never enters the output.
Ties go to the expert with the lower id.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Routes(NamedTuple):
    """Where each token goes."""

    experts: Int[Array, "*tokens top_k"]
    """Chosen expert ids, best first."""
    gates: Float[Array, "*tokens top_k"]
    """Weights of the chosen experts; they add up to the family's gate sum."""
    threshold: Float[Array, "*tokens"]
    """Biased logit of the first rejected expert (−∞ where every expert is chosen)."""
    margin: Float[Array, "*tokens"]
    """Biased logit of the last chosen expert minus `threshold`."""


def top_logits(
    logits: Float[Array, "*tokens experts"], count: int
) -> tuple[Float[Array, "*tokens count"], Int[Array, "*tokens count"]]:
    """The `count` largest logits and their ids, largest first, ties to the lower id.

    Repeated arg-max: for the few choices of an MoE router this is cheaper on CPU than a sort, and every backend
    agrees on ties.
    """
    lanes = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    values, ids = [], []
    for _ in range(count):
        value = jnp.max(logits, axis=-1)
        index = jnp.min(jnp.where(logits == value[..., None], lanes, logits.shape[-1]), axis=-1)
        index = jnp.minimum(index, logits.shape[-1] - 1)  # a NaN row equals nothing, not even its own maximum
        values.append(value)
        ids.append(index)
        logits = jnp.where(lanes == index[..., None], -jnp.inf, logits)
    return jnp.stack(values, axis=-1), jnp.stack(ids, axis=-1)


def choose_experts(
    logits: Float[Array, "*tokens experts"], bias: Float[Array, " experts"], *, top_k: int, gate_sum: float
) -> Routes:
    """Top-k of the biased logits; sigmoid gates of the unbiased ones, renormalised to `gate_sum`.

    gate_k = gate_sum · σ(logit_k) / Σ_j σ(logit_j) over the chosen j.

    Source: Wang et al. 2024 (loss-free balancing by a bias that only selects); the reference run's fixed gate sum.
    """
    num_experts = logits.shape[-1]
    biased = jax.lax.stop_gradient(logits + bias)
    values, ids = top_logits(biased, min(top_k + 1, num_experts))
    chosen = ids[..., :top_k]
    onehot = chosen[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
    score = jax.nn.sigmoid(jnp.sum(jnp.where(onehot, logits[..., None, :], 0.0), axis=-1))
    gates = gate_sum * score / (jnp.sum(score, axis=-1, keepdims=True) + 1e-20)
    threshold = values[..., top_k] if top_k < num_experts else jnp.full_like(values[..., 0], -jnp.inf)
    return Routes(chosen, gates, threshold, values[..., top_k - 1] - threshold)
