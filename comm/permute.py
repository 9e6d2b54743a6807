"""Moves rows of activations between tokens and slots: gathers forward, gathers backward.

Autodiff would turn each gather into a scatter-add of activations, the slow half of a small MoE layer. A
`Placement` knows both directions, so every backward pass here is a gather too. No collective inside: a
`custom_vjp` that held one would fail under `grad(vmap(…, axis_name))`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rungwise.comm.placement import Placement

_ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


def _gather(rows: Float[Array, "rows width"], index: Int[Array, " picks"]) -> Float[Array, "picks width"]:
    """`rows[index]`, zero where the index lies past the end."""
    return lax.gather(
        rows, index[:, None], _ROWS, (1, rows.shape[1]), mode=lax.GatherScatterMode.FILL_OR_DROP, fill_value=0
    )


def _accumulator(*arrays: Array) -> jnp.dtype:
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def _choices(placement: Placement, num_tokens: int) -> Int[Array, "tokens top_k"]:
    return placement.slot.reshape(num_tokens, -1)


def _no_gradient(placement: Placement) -> Placement:
    return jax.tree.map(lambda table: np.zeros(table.shape, jax.dtypes.float0), placement)


@jax.custom_vjp
def dispatch_rows(rows: Float[Array, "tokens width"], placement: Placement) -> Float[Array, "slots width"]:
    """Copies token rows into slots; empty slots are zero.

    Item t * top_k + k of the placement is choice k of token t; top_k is items / tokens, so one item a row
    is a plain permutation. Backward: each token sums the cotangents of its slots, in float32 or wider.
    """
    top_k = placement.slot.shape[0] // rows.shape[0]
    return _gather(rows, placement.item // top_k)


def _dispatch_forward(rows, placement):
    return dispatch_rows(rows, placement), (placement, rows.shape[0])


def _dispatch_backward(residuals, cotangent):
    placement, num_tokens = residuals
    choices = _choices(placement, num_tokens)
    picked = (_gather(cotangent, choices[:, k]).astype(_accumulator(cotangent)) for k in range(choices.shape[1]))
    return functools.reduce(jnp.add, picked).astype(cotangent.dtype), _no_gradient(placement)


dispatch_rows.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine_rows(
    rows: Float[Array, "slots width"], gates: Float[Array, "tokens top_k"], placement: Placement
) -> Float[Array, "tokens width"]:
    """Weighted sum of each token's slots: Σ_k gates[t, k] · rows[slot of (t, k)]; zero for a choice without slot.

    Accumulated choice by choice in float32 or wider, so that [tokens, top_k, width] never exists.
    """
    kind = _accumulator(rows, gates)
    choices = _choices(placement, gates.shape[0])
    terms = (_gather(rows, choices[:, k]).astype(kind) * gates[:, k, None].astype(kind) for k in range(gates.shape[1]))
    return functools.reduce(jnp.add, terms).astype(rows.dtype)


def _combine_forward(rows, gates, placement):
    return combine_rows(rows, gates, placement), (rows, gates, placement)


def _combine_backward(residuals, cotangent):
    rows, gates, placement = residuals
    kind = _accumulator(rows, gates)
    num_tokens, top_k = gates.shape
    weight = gates.reshape(-1).at[placement.item].get(mode="fill", fill_value=0).astype(kind)
    d_rows = (_gather(cotangent, placement.item // top_k).astype(kind) * weight[:, None]).astype(rows.dtype)
    choices = _choices(placement, num_tokens)
    wide = cotangent.astype(kind)
    products = (wide * _gather(rows, choices[:, k]).astype(kind) for k in range(top_k))
    d_gates = [_row_sums(product) for product in products]
    return d_rows, jnp.stack(d_gates, axis=-1).astype(gates.dtype), _no_gradient(placement)


def _row_sums(values: Float[Array, "rows width"]) -> Float[Array, " rows"]:
    """A product with ones: XLA adds along a short last dimension one by one on CPU, which takes twice as long."""
    return jnp.dot(values, jnp.ones(values.shape[1], values.dtype), precision=lax.Precision.HIGHEST)


combine_rows.defvjp(_combine_forward, _combine_backward)
