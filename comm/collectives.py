"""The collectives of the transports, each result tagged for rematerialisation.

`jax.checkpoint(…, policy=save_only_these_names(COLLECTIVE))` then recomputes arithmetic in the backward
pass but sends nothing twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rungwise.comm.permute import dispatch_rows
from rungwise.comm.placement import Placement, place

Axis = str | tuple[str, ...]
"""Name of the ranks' axis; of two where each device of a mesh axis holds several virtual ranks, the mesh's first."""

COLLECTIVE = "moe_collective"
"""`checkpoint_name` of everything that crossed a rank."""


def all_to_all(blocks: jax.Array, axis: Axis) -> jax.Array:
    """`blocks[d]` goes to rank d; the result's block s came from rank s."""
    return checkpoint_name(tangent_all_to_all(blocks, axis), COLLECTIVE)


def tangent_all_to_all(blocks: jax.Array, axis: Axis) -> jax.Array:
    """`all_to_all` without a name, which JAX could not transpose: for tangents."""
    return jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0, tiled=True)


def all_gather(values: jax.Array, axis: Axis) -> jax.Array:
    """Every rank's values, one after the other along the first dimension."""
    for name in reversed(_names(axis)):  # one by one: jax has no batching rule for several at once
        values = jax.lax.all_gather(values, name, tiled=True)
    return checkpoint_name(values, COLLECTIVE)


def sum_scatter(values: jax.Array, axis: Axis) -> jax.Array:
    """Sum over ranks of the block that belongs to this rank."""
    for name in _names(axis):
        values = jax.lax.psum_scatter(values, name, scatter_dimension=0, tiled=True)
    return checkpoint_name(values, COLLECTIVE)


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def total(values: Any, axis: Axis) -> Any:
    """Sum over ranks, alike on every rank."""
    return checkpoint_name(jax.lax.psum(values, axis), COLLECTIVE)


class RaggedTables(NamedTuple):
    """Which rows go where: entry d * n + i is this rank's i-th slice for rank d (recv_sizes: from rank d)."""

    input_offsets: Int[Array, " slices"]
    """First row of the slice in this rank's operand."""
    send_sizes: Int[Array, " slices"]
    output_offsets: Int[Array, " slices"]
    """First row of the slice in the *receiver's* output."""
    recv_sizes: Int[Array, " slices"]


def ragged_all_to_all(
    operand: Float[Array, "rows width"],
    output: Float[Array, "out_rows width"],
    tables: RaggedTables,
    axis: str,
    *,
    native: bool,
) -> Float[Array, "out_rows width"]:
    """Slices of rows to every rank; what no slice covers keeps the value of `output`.

    Args:
        native: `jax.lax.ragged_all_to_all`, which needs a mesh and an accelerator; else `emulated_ragged_all_to_all`.
    """
    exchange = jax.lax.ragged_all_to_all if native else emulated_ragged_all_to_all
    return checkpoint_name(exchange(operand, output, *tables, axis_name=axis), COLLECTIVE)


def emulated_ragged_all_to_all(
    operand: Float[Array, "rows width"],
    output: Float[Array, "out_rows width"],
    input_offsets: Int[Array, " slices"],
    send_sizes: Int[Array, " slices"],
    output_offsets: Int[Array, " slices"],
    recv_sizes: Int[Array, " slices"],
    *,
    axis_name: str,
) -> Float[Array, "out_rows width"]:
    """`jax.lax.ragged_all_to_all` from gathers, for backends without it and for virtual ranks.

    All rows and tables are gathered and each output row looks its source up, so it moves as many times more rows as
    there are ranks. A row may go to one place of each receiver; slices of one receiver must not overlap.
    """
    del recv_sizes  # the senders' tables say it already
    num_rows, num_out = operand.shape[0], output.shape[0]
    own = jax.lax.axis_index(axis_name)
    num_ranks = jax.lax.axis_size(axis_name)
    sent = all_gather(jnp.stack([input_offsets, send_sizes, output_offsets])[None], axis_name)
    arriving = jnp.take(sent.reshape(num_ranks, 3, num_ranks, -1), own, axis=2)
    source_row, size, first = (arriving[:, part] for part in range(3))
    source_row = (source_row + num_rows * jnp.arange(num_ranks, dtype=jnp.int32)[:, None]).reshape(-1)
    size, first = size.reshape(-1), jnp.where(size > 0, first, num_out).reshape(-1)
    order = jnp.argsort(first)
    row = jnp.arange(num_out, dtype=jnp.int32)
    slice_of_row = order[jnp.maximum(jnp.searchsorted(first[order], row, side="right") - 1, 0)]
    inside = row - first[slice_of_row]
    covered = (inside >= 0) & (inside < size[slice_of_row])
    item = jnp.where(covered, source_row[slice_of_row] + inside, num_ranks * num_rows).astype(jnp.int32)
    placement: Placement = place(item, num_ranks * num_rows).inverse()
    arrived = dispatch_rows(all_gather(operand, axis_name), placement)
    return jnp.where(covered[:, None], arrived, output)


def on_mesh(axis: Axis) -> bool:
    """Whether the axis is one of a mesh; else its ranks are virtual, all or some of them."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def check_axis(axis: str | None, num_ranks: int) -> None:
    """Refuses a configuration made for another number of ranks than the axis has. One rank needs no axis.

    Raises:
        ValueError: the named axis has another size, or more than one rank and no name.
    """
    if num_ranks == 1:
        return
    size = None if axis is None else jax.lax.axis_size(axis)
    if size != num_ranks:
        raise ValueError(
            f"num_ranks {num_ranks} does not match axis {axis!r} of size {size}; plan for the ranks that run"
        )
