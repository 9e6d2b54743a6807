"""Rotary positions on the first dimensions of each head."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def rotary_angles(seq_len: int, *, rotary_dim: int, theta: float) -> Float[np.ndarray, "seq half"]:
    """Angle position × theta^(−2i/rotary_dim) for each pair i, radians, float32."""
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / max(rotary_dim, 1))
    return np.outer(np.arange(seq_len), frequencies).astype(np.float32)


def rotate(
    x: Float[Array, "batch seq *heads dim"], angles: Float[Array, "seq half"]
) -> Float[Array, "batch seq *heads dim"]:
    """Turns pair (i, i + half) of the first 2·half dimensions by its angle; the rest passes through.

    Zero angles leave `x` unchanged, which is how a layer without rotary positions is expressed as data.

    Source: Su et al. 2021, RoFormer; partial rotary as in GPT-NeoX and the reference run's half-rotary layers.
    """
    half = angles.shape[-1]
    shape = (angles.shape[0], *(1,) * (x.ndim - 3), half)
    cos, sin = (turn(angles).reshape(shape).astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)
