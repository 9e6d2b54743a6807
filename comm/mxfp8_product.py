"""Grouped matrix products of MXFP8 operands: the hardware's own operation where it exists, else its exact meaning.

The forward product sees quantised rows and weights. The backward pass uses the operands as they came: a weight gradient
in MXFP8 costs more time than it saves (Olmo-core 3 measured 3 to 4.5 times).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rungwise.comm.mxfp8 import Quantized, dequantize, quantize

_FIRST_CAPABILITY = 10.0
"""Compute capability of the first NVIDIA devices that multiply block-scaled numbers."""


def has_native_product() -> bool:
    """Whether the default device multiplies block-scaled numbers itself."""
    if jax.default_backend() != "gpu":
        return False
    capability: Any = getattr(jax.devices()[0], "compute_capability", None)
    return capability is not None and float(capability) >= _FIRST_CAPABILITY


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def mxfp8_matmul(
    rows: Float[Array, "groups rows width"],
    weights: Float[Array, "groups width features"],
    scale: str = "rceil",
    native: bool | None = None,
) -> Float[Array, "groups rows features"]:
    """rows · weights by group, both quantised in blocks along `width`, added up in float32.

    Args:
        scale: rule of the scales, `rceil` or `floor`.
        native: `jax.nn.scaled_matmul` or its emulation; None: as the device can.
    """
    left, right = quantize(rows, scale=scale), quantize(jnp.swapaxes(weights, 1, 2), scale=scale)
    if has_native_product() if native is None else native:
        product = jax.nn.scaled_matmul(
            left.values, right.values, left.scales, right.scales, preferred_element_type=jnp.float32
        )
    else:
        product = jnp.einsum("grw,gfw->grf", _wide(left), _wide(right))
    return product.astype(rows.dtype)


def _wide(quantized: Quantized) -> Array:
    return dequantize(quantized, width=quantized.values.shape[-1], dtype=jnp.float32)


def _forward(rows, weights, scale, native):
    return mxfp8_matmul(rows, weights, scale, native), (rows, weights)


def _backward(scale, native, operands, cotangent):
    rows, weights = operands
    return jnp.einsum("grf,gwf->grw", cotangent, weights), jnp.einsum("grw,grf->gwf", rows, cotangent)


mxfp8_matmul.defvjp(_forward, _backward)
