"""MXFP8 numbers: blocks of 32 values as e4m3 with one e8m0 (power of two) scale a block.

Two rules for the scale 2^s of a block whose largest magnitude is a: `floor` takes s = floor(log2 a) − 8 and clips what
lies beyond 448, the largest e4m3 number; `rceil` takes s = ceil(log2(a / 448)), so that nothing is clipped. Both are
computed from the bits of a, without logarithms. Clipped values are counted and never become NaN; a NaN stays NaN in
its own place, since hiding it would hide the fault, and an infinity is clipped and counted.

Source: OCP Microscaling Formats 1.0 (format, floor rule); facts of Olmo-core 3 for rceil.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rungwise.comm.buffers import MXFP8_BLOCK

_LARGEST = 448.0
_BEYOND = 448.0 * 2.0**119
"""The largest finite float32 whose scale keeps it finite; more is clipped."""
_MANTISSA_OF_LARGEST = 0x600000
"""Fraction bits of 1.75, the mantissa of 448."""


class Quantized(NamedTuple):
    """Rows in MXFP8; the last block of a row is padded with zeros."""

    values: Float[Array, "*rows padded"]
    """float8_e4m3fn."""
    scales: Float[Array, "*rows blocks"]
    """float8_e8m0fnu."""


def quantize(rows: Float[Array, "*rows width"], *, scale: str) -> Quantized:
    """Nearest MXFP8 numbers under a scale rule, `rceil` or `floor`; beyond ±448 · scale: clipped."""
    scaled, byte = _scale(rows, scale)
    values = jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(byte[..., 0].astype(jnp.uint8), jnp.float8_e8m0fnu)
    return Quantized(values.reshape(*rows.shape[:-1], -1), scales)


def dequantize(quantized: Quantized, *, width: int, dtype: Any) -> Float[Array, "*rows width"]:
    """values · scales, without the padding."""
    lead = quantized.values.shape[:-1]
    byte = lax.bitcast_convert_type(quantized.scales, jnp.uint8).astype(jnp.int32)
    blocks = quantized.values.astype(jnp.float32).reshape(*lead, -1, MXFP8_BLOCK) * _power_of_two(byte)[..., None]
    return blocks.reshape(*lead, -1)[..., :width].astype(dtype)


def count_clipped(rows: Float[Array, "*rows width"], *, scale: str) -> Int[Array, ""]:
    """Values of `rows` that `quantize` clips."""
    return jnp.sum(clipped_by_row(rows, scale=scale), dtype=jnp.int32)


def clipped_by_row(rows: Float[Array, "*rows width"], *, scale: str) -> Int[Array, "*rows"]:
    """The same of each row."""
    beyond = jnp.abs(_scale(lax.stop_gradient(rows), scale)[0]) > _LARGEST
    return jnp.sum(beyond, axis=(-2, -1), dtype=jnp.int32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_trip(rows: Float[Array, "*rows width"], scale: str) -> Float[Array, "*rows width"]:
    """What a receiver of quantised rows sees. Its gradient passes straight through."""
    return dequantize(quantize(rows, scale=scale), width=rows.shape[-1], dtype=rows.dtype)


@round_trip.defjvp
def _(scale, primals, tangents):
    return round_trip(primals[0], scale), tangents[0]


def _scale(rows, rule):
    """Rows in blocks over their scale, float32, and the scale's byte [*rows, blocks, 1] (exponent + 127)."""
    wide = rows.astype(jnp.float32)
    short = -rows.shape[-1] % MXFP8_BLOCK
    blocks = jnp.pad(wide, [(0, 0)] * (rows.ndim - 1) + [(0, short)]).reshape(*rows.shape[:-1], -1, MXFP8_BLOCK)
    known = jnp.where(jnp.isnan(blocks), 0, jnp.minimum(jnp.abs(blocks), _BEYOND))
    bits = lax.bitcast_convert_type(jnp.max(known, axis=-1, keepdims=True), jnp.int32)
    beyond = ((bits & 0x7FFFFF) > _MANTISSA_OF_LARGEST).astype(jnp.int32) if rule == "rceil" else 0
    byte = jnp.clip((bits >> 23) - 8 + beyond, 1, 254)
    return blocks * _power_of_two(254 - byte), byte


def _power_of_two(byte: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2^(byte − 127), exactly; 0 for byte 0."""
    return lax.bitcast_convert_type(byte << 23, jnp.float32)
