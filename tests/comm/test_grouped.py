import jax
import jax.numpy as jnp
import numpy as np

from rungwise.comm import grouped

RANDOM = np.random.default_rng(0)
ROWS = jnp.asarray(RANDOM.normal(size=(5, 6, 4)), jnp.float32)
WEIGHTS = jnp.asarray(RANDOM.normal(size=(5, 4, 3)), jnp.float32)
GROUP_EXPERT = jnp.array([0, 0, 2, 3, 3], jnp.int32)  # experts 1 and 4 own no group


def loop(owners):
    return np.stack([np.asarray(ROWS[group]) @ np.asarray(WEIGHTS[owner]) for group, owner in enumerate(owners)])


def test_grouped_matmul_uses_each_groups_own_weights():
    np.testing.assert_allclose(grouped.grouped_matmul(ROWS, WEIGHTS), loop(range(5)), rtol=1e-5)
    np.testing.assert_allclose(grouped.grouped_matmul(ROWS, WEIGHTS, GROUP_EXPERT), loop(GROUP_EXPERT), rtol=1e-5)


def test_grouped_matmul_accelerator_form_agrees_in_values_and_gradients():
    def loss(form, rows, weights):
        return jnp.sum(jnp.sin(form(rows, weights, GROUP_EXPERT)))

    for argument in (1, 2):
        got = jax.grad(loss, argument)(grouped._ragged, ROWS, WEIGHTS)
        want = jax.grad(loss, argument)(grouped.grouped_matmul, ROWS, WEIGHTS)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(got)[[1, 4]].any()
