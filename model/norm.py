"""Root-mean-square normalisation, and the low-rank gate that may follow it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rungwise.model.linear import linear


def rms_norm(
    x: Float[Array, "*batch dim"], scale: Float[Array, " dim"] | None, *, epsilon: float
) -> Float[Array, "*batch dim"]:
    """x · scale / √(mean(x²) + ε), the mean over the last axis, in float32; `scale` None: no gain.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed if scale is None else normed * scale).astype(x.dtype)


def norm_gate(x: Float[Array, "*batch dim"], gate: dict[str, Any]) -> Float[Array, "*batch dim"]:
    """x ⊙ σ(silu(x · down) · up): each dimension of a normalised vector turned down by what the vector says.

    Args:
        gate: `down` [dim, rank], `up` [rank, dim].
    Source: the reference run's gated norms, rank 128 (experiments/grug/moe_hero_ep/model.py); Qiu et al. 2026,
        arXiv 2601.22966, for the reason: a norm-preserving optimizer bounds what weights alone can scale.
    """
    rows = x.reshape(-1, x.shape[-1])
    opening = linear(jax.nn.silu(linear(rows, gate["down"])), gate["up"])
    return x * jax.nn.sigmoid(opening.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)


def block_norm(
    x: Float[Array, "*batch dim"], params: dict[str, Any], name: str, *, epsilon: float
) -> Float[Array, "*batch dim"]:
    """The norm `name` of a parameter tree, and its gate where the tree has one."""
    normed = rms_norm(x, params[name], epsilon=epsilon)
    gate = params.get(f"{name}_gate")
    return normed if gate is None else norm_gate(normed, gate)
