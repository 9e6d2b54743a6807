"""The collectives of the transports, each result tagged for rematerialisation.

`jax.checkpoint(…, policy=save_only_these_names(COLLECTIVE))` then recomputes arithmetic in the backward
pass but sends nothing twice.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

COLLECTIVE = "moe_collective"
"""`checkpoint_name` of everything that crossed a rank."""


def all_to_all(blocks: jax.Array, axis: str) -> jax.Array:
    """`blocks[d]` goes to rank d; the result's block s came from rank s."""
    return checkpoint_name(jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0, tiled=True), COLLECTIVE)


def all_gather(values: jax.Array, axis: str) -> jax.Array:
    """Every rank's values, one after the other along the first dimension."""
    return checkpoint_name(jax.lax.all_gather(values, axis, tiled=True), COLLECTIVE)


def sum_scatter(values: jax.Array, axis: str) -> jax.Array:
    """Sum over ranks of the block that belongs to this rank."""
    return checkpoint_name(jax.lax.psum_scatter(values, axis, scatter_dimension=0, tiled=True), COLLECTIVE)


def total(values: Any, axis: str) -> Any:
    """Sum over ranks, alike on every rank."""
    return checkpoint_name(jax.lax.psum(values, axis), COLLECTIVE)


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
