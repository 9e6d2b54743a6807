"""Matrix products of grouped rows with their own expert's weights: the one operation an expert layer is made of."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    rows: Float[Array, "groups rows width"],
    weights: Float[Array, "experts width features"],
    group_expert: Int[Array, " groups"] | None = None,
) -> Float[Array, "groups rows features"]:
    """Rows of group g times the weights of expert `group_expert[g]`; without it, group g belongs to expert g.

    A batched product of equal groups is the fastest form on CPU (about half the speed of one large matrix
    product; a loop over experts took twice, `ragged_dot` many times as long). Elsewhere named groups go to
    `ragged_dot`.

    Args:
        group_expert: never decreasing, as `ragged_dot` wants an expert's rows side by side.
    """
    if group_expert is None:
        return _batched(rows, weights)
    if jax.default_backend() == "cpu":
        return _batched(rows, jnp.take(weights, group_expert, axis=0, mode="clip"))
    return _ragged(rows, weights, group_expert)


def _batched(rows, weights):
    return jnp.einsum("grw,gwf->grf", rows, weights)


def _ragged(rows, weights, group_expert):
    groups, size, width = rows.shape
    sizes = size * jnp.zeros(weights.shape[0], jnp.int32).at[group_expert].add(1)
    return jax.lax.ragged_dot(rows.reshape(groups * size, width), weights, sizes).reshape(groups, size, -1)
