"""What travels between ranks, in the number format the configuration names.

`compute`: rows as they are. `mxfp8`: e4m3 values, e8m0 scales and unquantised header rows, side by side as bytes of one
exchange. The way back of the gradient is not quantised. Virtual ranks, which move no bytes, quantise and dequantise
before a plain exchange, with equal values.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rungwise.comm import collectives
from rungwise.comm.buffers import MXFP8_BLOCK
from rungwise.comm.collectives import RaggedTables
from rungwise.comm.config import TransportConfig
from rungwise.comm.mxfp8 import Quantized, count_clipped, dequantize, quantize, round_trip


def exchange(
    blocks: Float[Array, "ranks rows width"], axis: str, *, config: TransportConfig, header_rows: int = 0
) -> tuple[Float[Array, "ranks rows width"], Int[Array, ""] | int]:
    """`blocks[d]` goes to rank d; block s of the result came from rank s.

    Args:
        header_rows: rows at the start of each block that must arrive exactly.
    Returns:
        The arrived blocks, and how many values this rank sent clipped.
    """
    if config.payload == "compute":
        return collectives.all_to_all(blocks, axis), 0
    clipped = count_clipped(blocks[:, header_rows:], scale=config.payload_scale)
    if collectives.on_mesh(axis):
        return _exchange_bytes(blocks, axis, header_rows, config.payload_scale), clipped
    body = round_trip(blocks[:, header_rows:], config.payload_scale)
    return collectives.all_to_all(jnp.concatenate([blocks[:, :header_rows], body], axis=1), axis), clipped


def ragged_exchange(
    rows: Float[Array, "rows width"], num_out: int, tables: RaggedTables, axis: str, *, config: TransportConfig
) -> tuple[Float[Array, "out_rows width"], Int[Array, ""] | int]:
    """Slices of rows to every rank by `tables`, zero where none arrives; and how many values were sent clipped.

    Counted are all `rows`: those that no slice covers must be zero.
    """
    native = collectives.on_mesh(axis) and _is_native(config)
    if config.payload == "compute":
        return _move_slices(rows, num_out, tables, axis, native), 0
    clipped = count_clipped(rows, scale=config.payload_scale)
    if native:
        return _exchange_slice_bytes(rows, tables, num_out, axis, config.payload_scale), clipped
    return _move_slices(round_trip(rows, config.payload_scale), num_out, tables, axis, native), clipped


def _is_native(config: TransportConfig) -> bool:
    if config.ragged_exchange == "by_backend":
        return jax.default_backend() != "cpu"
    return config.ragged_exchange == "native"


def _move_slices(rows, num_out, tables, axis, native):
    # Zeros that depend on the rows: else XLA hoists the buffer out of a loop over layers and keeps one for each.
    zeros, rows = lax.optimization_barrier((jnp.zeros_like(rows, shape=(num_out, *rows.shape[1:])), rows))
    return collectives.ragged_all_to_all(rows, zeros, tables, axis, native=native)


def _send_bytes(blocks, axis, header_rows, scale):
    """Blocks as bytes: header rows as they are, the others in MXFP8."""
    ranks, num_rows, width = blocks.shape
    header = _to_bytes(blocks[:, :header_rows]).reshape(ranks, -1)
    body = _pack(quantize(blocks[:, header_rows:], scale=scale)).reshape(ranks, -1)
    arrived = collectives.all_to_all(jnp.concatenate([header, body], axis=1), axis)
    head, tail = arrived[:, : header.shape[1]], arrived[:, header.shape[1] :]
    exact = _from_bytes(head, blocks[:, :header_rows].shape, blocks.dtype)
    rows = _unpack(tail.reshape(ranks, num_rows - header_rows, -1), width=width, dtype=blocks.dtype)
    return jnp.concatenate([exact, rows], axis=1)


def _send_slice_bytes(rows, tables, num_out, axis, scale):
    """`_move_slices` of MXFP8 bytes."""
    arrived = _move_slices(_pack(quantize(rows, scale=scale)), num_out, tables, axis, True)
    return _unpack(arrived, width=rows.shape[1], dtype=rows.dtype)


# The derivative of both is the plain exchange of rows as they are, which JAX transposes. A collective in a tangent rule
# is safe on a mesh, whose axis stays bound, though not among virtual ranks. The rules call the functions themselves: a
# call of the wrapped ones would hide the collective's name from a rematerialisation policy.
_exchange_bytes = jax.custom_jvp(_send_bytes, nondiff_argnums=(1, 2, 3))
_exchange_slice_bytes = jax.custom_jvp(_send_slice_bytes, nondiff_argnums=(2, 3, 4))


@_exchange_bytes.defjvp
def _(axis, header_rows, scale, primals, tangents):
    return _send_bytes(primals[0], axis, header_rows, scale), collectives.tangent_all_to_all(tangents[0], axis)


@_exchange_slice_bytes.defjvp
def _(num_out, axis, scale, primals, tangents):
    rows, tables = primals
    zeros = jnp.zeros_like(rows, shape=(num_out, rows.shape[1]))
    moved = lax.ragged_all_to_all(tangents[0], zeros, *tables, axis_name=axis)
    return _send_slice_bytes(rows, tables, num_out, axis, scale), moved


def _pack(quantized: Quantized) -> Array:
    """Bytes of each row: its values, then its scales."""
    parts = (lax.bitcast_convert_type(part, jnp.uint8) for part in quantized)
    return jnp.concatenate(list(parts), axis=-1)


def _unpack(packed, *, width, dtype):
    num_values = -(-width // MXFP8_BLOCK) * MXFP8_BLOCK
    values = lax.bitcast_convert_type(packed[..., :num_values], jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(packed[..., num_values:], jnp.float8_e8m0fnu)
    return dequantize(Quantized(values, scales), width=width, dtype=dtype)


def _to_bytes(values):
    return lax.bitcast_convert_type(lax.stop_gradient(values), jnp.uint8)


def _from_bytes(packed, shape, dtype):
    return lax.bitcast_convert_type(packed.reshape(*shape, jnp.dtype(dtype).itemsize), dtype)
