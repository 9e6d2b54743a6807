"""Matrix products of grouped rows with their own expert's weights: the one operation an expert layer is made of."""

import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Form = Literal["batched", "ragged"]

MANY_ROWS = 512
"""Rows of a group from which `ragged_dot` beats a batched product on an accelerator. Published for B300 (Olmo-core 3):
equal at 256 to 512 rows an expert, the batched product 29% slower at 128 thousand."""


def grouped_matmul(
    rows: Float[Array, "groups rows width"],
    weights: Float[Array, "experts width features"],
    group_expert: Int[Array, " groups"] | None = None,
) -> Float[Array, "groups rows features"]:
    """Rows of group g times the weights of expert `group_expert[g]`; without it, group g belongs to expert g.

    Args:
        group_expert: never decreasing, as `ragged_dot` wants an expert's rows side by side.
    """
    form = choose_form(jax.default_backend(), rows_per_group=rows.shape[1], named=group_expert is not None)
    return FORMS[form](rows, weights, group_expert)


def choose_form(backend: str, *, rows_per_group: int, named: bool) -> Form:
    """The faster of two equal forms, by measurement.

    CPU: batched, always. `ragged_dot` computes every expert on every row there: `measure_forms` gives 31 times the time
    at 8 experts, 246 times at 32 (4,096 rows, width 64), and the compiler's count of FLOPs is 8 and 32 times as high. A
    loop over experts took twice.
    Accelerators: `ragged_dot` for named groups, whose weights a batched product would copy once a group, and for equal
    groups of at least `MANY_ROWS` rows; a batched product for smaller ones.
    """
    if backend == "cpu":
        return "batched"
    return "ragged" if named or rows_per_group >= MANY_ROWS else "batched"


def _batched(rows, weights, group_expert=None):
    own = weights if group_expert is None else jnp.take(weights, group_expert, axis=0, mode="clip")
    return jnp.einsum("grw,gwf->grf", rows, own)


def _ragged(rows, weights, group_expert=None):
    groups, size, width = rows.shape
    owner = jnp.arange(groups, dtype=jnp.int32) if group_expert is None else group_expert
    sizes = size * jnp.zeros(weights.shape[0], jnp.int32).at[owner].add(1)
    return jax.lax.ragged_dot(rows.reshape(groups * size, width), weights, sizes).reshape(groups, size, -1)


FORMS: dict[Form, Callable[..., Array]] = {"batched": _batched, "ragged": _ragged}


def measure_forms(
    *, groups: int, rows: int, width: int, features: int, repeats: int = 5, dtype: str = "float32"
) -> dict[Form, float]:
    """Median seconds of each form, forward and backward, on random values (kernels are faster on zeros).

    Wall time, so compare the two of one call, on a quiet machine.
    """
    random = np.random.default_rng(0)
    left = jnp.asarray(random.normal(size=(groups, rows, width)), dtype)
    right = jnp.asarray(random.normal(size=(groups, width, features)), dtype)
    steps: dict[Form, Any] = {
        name: jax.jit(jax.value_and_grad(lambda a, b, form=form: jnp.sum(form(a, b) ** 2), (0, 1)))
        for name, form in FORMS.items()
    }
    taken: dict[Form, list[float]] = {name: [] for name in FORMS}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(left, right))
            if turn:  # the first compiles
                taken[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in taken.items()}
