"""Grouped matrix products of MXFP8 operands: the hardware's own operation where it exists, else its exact meaning.

Each operand is quantised in blocks along the dimension that is summed, by the rule `rceil`, which clips nothing finite:

    outputs = Q(rows) · Q(weights)             along width
    d rows  = Q(d outputs) · Q(weights)ᵀ       along features
    d weights = Q(rows)ᵀ · d outputs           with Q(rows) as plain numbers of the compute type

The backward pass keeps rows in MXFP8, 33/32 bytes a value. Its weight gradient multiplies plain numbers, since in MXFP8
it costs more time than it saves; and as it takes d outputs as they come, an infinity there stays visible in it.

Source: facts of Olmo-core 3, which measured 3 to 4.5 times the time for weight gradients in MXFP8.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.mxfp8 import Quantized, dequantize, quantize

SCALE = "rceil"

_FIRST_CAPABILITY = 10.0
"""Compute capability of the first NVIDIA devices that multiply block-scaled numbers."""


def has_native_product() -> bool:
    """Whether the default device multiplies block-scaled numbers itself."""
    if jax.default_backend() != "gpu":
        return False
    capability: Any = getattr(jax.devices()[0], "compute_capability", None)
    return capability is not None and float(capability) >= _FIRST_CAPABILITY


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mxfp8_matmul(
    rows: Float[Array, "groups rows width"],
    weights: Float[Array, "experts width features"],
    group_expert: Int[Array, " groups"] | None = None,
    native: bool | None = None,
) -> Float[Array, "groups rows features"]:
    """Rows of group g times the weights of its expert, as `grouped_matmul`, added up in float32.

    Args:
        native: `jax.nn.scaled_matmul` or its emulation; None: as the device can.
    """
    return _forward(rows, weights, group_expert, native)[0]


def _forward(rows, weights, group_expert, native):
    left = quantize(rows, scale=SCALE)
    product = _product(left, jnp.swapaxes(weights, 1, 2), group_expert, rows.shape[-1], rows.dtype, native)
    return product, (left, weights, group_expert)


def _backward(native, residuals, cotangent):
    left, weights, group_expert = residuals
    features, dtype = weights.shape[-1], cotangent.dtype
    d_rows = _product(quantize(cotangent, scale=SCALE), weights, group_expert, features, dtype, native)
    plain = dequantize(left, width=weights.shape[-2], dtype=dtype)
    _, by_weights = jax.vjp(lambda weights: grouped_matmul(plain, weights, group_expert), weights)
    return d_rows, *by_weights(cotangent), None


mxfp8_matmul.defvjp(_forward, _backward)


def _product(left: Quantized, right: Array, group_expert: Array | None, width: int, dtype: Any, native: bool | None):
    """Σ over the last dimension of both, `width` long: `left` [groups, rows, …], `right` [experts, features, …]."""
    quantized = quantize(right, scale=SCALE)
    if has_native_product() if native is None else native:
        if group_expert is not None:  # a copy a group, of bytes
            quantized = Quantized(*(jnp.take(part, group_expert, axis=0, mode="clip") for part in quantized))
        product = jax.nn.scaled_matmul(
            left.values, quantized.values, left.scales, quantized.scales, preferred_element_type=jnp.float32
        )
        return product.astype(dtype)
    plain = (dequantize(part, width=width, dtype=dtype) for part in (left, quantized))  # exact, in bfloat16 too
    rows, weights = plain
    return grouped_matmul(rows, jnp.swapaxes(weights, 1, 2), group_expert)
