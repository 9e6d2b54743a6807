"""Causal depthwise convolution over a few tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def short_conv(
    x: Float[Array, "batch seq channels"], taps: Float[Array, "kernel channels"]
) -> Float[Array, "batch seq channels"]:
    """out[t] = Σ_lag taps[lag] ⊙ x[t − lag], nothing before the sequence, in float32.

    Taps start as (1, 0, 0, …): at first the convolution passes its input through.

    Source: the reference run's short convolutions (experiments/grug/moe_hero_ep/model.py).
    """
    wide, weights = x.astype(jnp.float32), taps.astype(jnp.float32)  # a tap's gradient is a sum over all tokens
    out = weights[0] * wide
    for lag in range(1, len(taps)):
        out = out + weights[lag] * jnp.pad(wide, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]]
    return out.astype(x.dtype)
