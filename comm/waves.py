"""Waves of a transport: all at the compiler's discretion, or one after the other; and what experts give back.

Side by side, a compiler may let the exchange of one wave overlap the experts of another, and holds what several of them
compute. In turn, a loop holds one wave's at a time, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Clipped = Int[Array, ""] | int


def each_wave(wave: Callable[[Any], tuple[Array, Clipped]], inputs: Any, *, in_turn: bool) -> tuple[list[Any], Clipped]:
    """Results of all waves in order, and the sum of what they report as clipped.

    Args:
        wave: of one entry of `inputs`, whose arrays have the waves as leading dimension.
        in_turn: in a loop. What a wave's backward pass needs is kept for all of them.
    """
    (count,) = {len(leaf) for leaf in jax.tree.leaves(inputs)}
    if in_turn and count > 1:
        stacked, lost = jax.lax.map(wave, inputs)
        return list(stacked), jnp.sum(lost)
    results = [wave(jax.tree.map(lambda leaf, index=index: leaf[index], inputs)) for index in range(count)]
    return [result for result, _ in results], sum(lost for _, lost in results)


def served(given: Any) -> tuple[Array, Clipped]:
    """Outputs of experts and how many values they clipped: none where they do not say."""
    return given if isinstance(given, tuple) else (given, 0)
