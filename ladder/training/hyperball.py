"""The hyperball step: a matrix moves along a direction and keeps its Frobenius norm."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from rungwise.comm.mesh import Axes, add_over

TINY = 1e-30
"""Least squared norm divided by: a zero direction then moves nothing, and a zero matrix stays zero."""


def hyperball_update(
    param: Float[Array, "..."],
    direction: Float[Array, "..."],
    *,
    rate: Float[ArrayLike, ""],
    axes: tuple[int, ...],
    spread: Axes = (),
) -> Float[Array, "..."]:
    """What to add to each matrix of a stack so that it turns by about `rate` radians and keeps its norm.

    With ‖·‖ over `axes`, in float32 at least: q = p − rate · ‖p‖ · d / ‖d‖, and the update is q · ‖p‖ / ‖q‖ − p.
    The length of d does not matter. A matrix of zeros stays one: what starts at zero needs another rule.

    Args:
        spread: mesh axes over whose ranks the parts of each matrix lie.

    Source: Wen et al. 2025 (hyperball optimization: MuonH, AdamH); marin-community/marin,
    experiments/grug/moe_hero_ep/optimizer.py, whose first version shared one norm among the experts of a layer.
    """
    wide = jnp.promote_types(param.dtype, jnp.float32)
    start, along = param.astype(wide), direction.astype(wide)
    radius = _norm(start, axes, spread)
    moved = start - rate * radius * along / _norm(along, axes, spread)
    return (moved * (radius / _norm(moved, axes, spread)) - start).astype(param.dtype)


def _norm(array: Float[Array, "..."], axes: tuple[int, ...], spread: Axes) -> Float[Array, "..."]:
    """Euclidean norm over axes that stay, at least √TINY."""
    square = add_over(jnp.sum(jnp.square(array), axis=axes, keepdims=True), spread)
    return jnp.sqrt(jnp.maximum(square, TINY))
