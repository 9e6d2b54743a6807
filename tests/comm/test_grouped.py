import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.grouped import FORMS, MANY_ROWS, choose_form, grouped_matmul, measure_forms

RANDOM = np.random.default_rng(0)
ROWS = jnp.asarray(RANDOM.normal(size=(5, 6, 4)), jnp.float32)
WEIGHTS = jnp.asarray(RANDOM.normal(size=(5, 4, 3)), jnp.float32)
GROUP_EXPERT = jnp.array([0, 0, 2, 3, 3], jnp.int32)  # experts 1 and 4 own no group


def loop(owners):
    return np.stack([np.asarray(ROWS[group]) @ np.asarray(WEIGHTS[owner]) for group, owner in enumerate(owners)])


@pytest.mark.parametrize("form", FORMS)
def test_grouped_matmul_uses_each_groups_own_weights(form):
    np.testing.assert_allclose(FORMS[form](ROWS, WEIGHTS), loop(range(5)), rtol=1e-5)
    np.testing.assert_allclose(FORMS[form](ROWS, WEIGHTS, GROUP_EXPERT), loop(GROUP_EXPERT), rtol=1e-5)
    np.testing.assert_allclose(grouped_matmul(ROWS, WEIGHTS, GROUP_EXPERT), loop(GROUP_EXPERT), rtol=1e-5)


@pytest.mark.parametrize("owner", [None, GROUP_EXPERT])
def test_grouped_matmul_forms_agree_in_gradients(owner):
    def loss(form, rows, weights):
        return jnp.sum(jnp.sin(form(rows, weights, owner)))

    for argument in (1, 2):
        got = jax.grad(loss, argument)(FORMS["ragged"], ROWS, WEIGHTS)
        want = jax.grad(loss, argument)(FORMS["batched"], ROWS, WEIGHTS)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.asarray(got)[[1, 4]].any() == (owner is None)


@pytest.mark.parametrize(
    ("backend", "rows", "named", "form"),
    [
        ("cpu", 1, False, "batched"),
        ("cpu", 100_000, True, "batched"),
        ("gpu", MANY_ROWS, False, "ragged"),
        ("gpu", MANY_ROWS - 1, False, "batched"),
        ("gpu", 8, True, "ragged"),
        ("tpu", 8, True, "ragged"),
    ],
)
def test_grouped_matmul_form_by_backend(backend, rows, named, form):
    assert choose_form(backend, rows_per_group=rows, named=named) == form


def test_grouped_matmul_ragged_form_computes_every_expert_on_every_row_on_cpu():
    # Why CPU takes the batched form: counted, not timed.
    def flops(form, groups):
        shapes = (
            jax.ShapeDtypeStruct((groups, 16, 32), jnp.float32),
            jax.ShapeDtypeStruct((groups, 32, 32), jnp.float32),
        )
        cost = jax.jit(FORMS[form]).lower(*shapes).compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    assert flops("ragged", 8) > 7 * flops("batched", 8)
    assert flops("ragged", 16) > 15 * flops("batched", 16)


def test_grouped_matmul_measures_both_forms():
    taken = measure_forms(groups=2, rows=4, width=8, features=8, repeats=1)
    assert set(taken) == set(FORMS)
    assert all(0 < seconds < 60 for seconds in taken.values())
