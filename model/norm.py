"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch dim"], scale: Float[Array, " dim"], *, epsilon: float
) -> Float[Array, "*batch dim"]:
    """x · scale / √(mean(x²) + ε), the mean over the last axis, in float32.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype)


def rms(x: Float[Array, "*batch dim"]) -> Float[Array, ""]:
    """Root mean square over every axis, a scalar in float32."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
