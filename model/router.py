"""Which experts a token goes to, and with what weight. The caller gives float32 logits whatever the compute type.

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
    """Weights of the chosen experts; but for the softmax gate they add up to the family's gate sum."""
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
    logits: Float[Array, "*tokens experts"],
    bias: Float[Array, " experts"],
    *,
    top_k: int,
    gate_sum: float,
    gate: str = "sigmoid",
) -> Routes:
    """Top-k of the biased logits, and gates of the unbiased ones.

    Source: Wang et al. 2024 (loss-free balancing by a bias that only selects).
    """
    num_experts = logits.shape[-1]
    biased = jax.lax.stop_gradient(logits + bias)
    values, ids = top_logits(biased, min(top_k + 1, num_experts))
    chosen = ids[..., :top_k]
    threshold = values[..., top_k] if top_k < num_experts else jnp.full_like(values[..., 0], -jnp.inf)
    gates = gates_of(logits, chosen, gate_sum=gate_sum, gate=gate)
    return Routes(chosen, gates, threshold, values[..., top_k - 1] - threshold)


def assign_experts(
    logits: Float[Array, "*tokens experts"],
    key: jax.Array,
    *,
    routing: str,
    top_k: int,
    gate_sum: float,
    gate: str = "sigmoid",
) -> Routes:
    """Routes that do not ask the router, for benchmarks; its gates at the assigned experts stay differentiable.

    `random`: `top_k` distinct experts a token, all equally likely. `uniform`: choice k of token t goes to expert
    (t · top_k + k) mod experts, so that every expert gets its exact share. There is no threshold and no margin.

    Args:
        key: of a random generator; unused with `uniform`.
    """
    num_experts = logits.shape[-1]
    if routing == "random":
        _, chosen = top_logits(jax.random.uniform(key, logits.shape), top_k)
    else:
        flat = jnp.arange(logits[..., 0].size * top_k, dtype=jnp.int32) % num_experts
        chosen = flat.reshape(*logits.shape[:-1], top_k)
    nothing = jnp.zeros(logits.shape[:-1], logits.dtype)
    gates = gates_of(logits, chosen, gate_sum=gate_sum, gate=gate)
    return Routes(chosen, gates, jnp.full_like(nothing, -jnp.inf), nothing)


def gates_of(
    logits: Float[Array, "*tokens experts"], chosen: Int[Array, "*tokens top_k"], *, gate_sum: float, gate: str
) -> Float[Array, "*tokens top_k"]:
    """Weight of each chosen expert, from the unbiased logits.

    `sigmoid`: s · σ(l_k) / Σ_j σ(l_j) over the chosen j, as the reference run. `topk_softmax`: s · softmax over the
    chosen. `softmax`: s times the probability among all experts, so that gates tell how sure the router is.

    Source: Shazeer et al. 2017 (softmax over the chosen); Fedus et al. 2021 (probability among all).
    """
    onehot = chosen[..., None] == jnp.arange(logits.shape[-1], dtype=jnp.int32)
    picked = jnp.sum(jnp.where(onehot, logits[..., None, :], 0.0), axis=-1)
    if gate == "sigmoid":
        return gate_sum * jax.nn.softmax(jax.nn.log_sigmoid(picked), axis=-1)  # in logs: σ itself underflows
    if gate == "topk_softmax":
        return gate_sum * jax.nn.softmax(picked, axis=-1)
    return gate_sum * jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
