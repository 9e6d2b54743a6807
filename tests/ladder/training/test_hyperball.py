import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.training.hyperball import hyperball_update


def test_hyperball_update_of_a_worked_case():
    """p = (3, 4), d = (4, −3) at rate 0.75: q = p − 0.75 · 5 · (0.8, −0.6) = (0, 6.25), scaled to length 5: (0, 5)."""
    update = hyperball_update(jnp.array([[3.0, 4.0]]), jnp.array([[40.0, -30.0]]), rate=0.75, axes=(0, 1))
    np.testing.assert_allclose(update, [[-3.0, 1.0]], atol=1e-6)


def test_hyperball_keeps_the_norm_of_each_matrix_of_a_stack():
    """Not the norm of the stack: one expert a thousand times larger than its neighbour keeps that distance."""
    rng = np.random.default_rng(0)
    param = jnp.asarray(rng.normal(size=(2, 3, 8, 5)) * np.array([1.0, 1e3, 1e-3])[:, None, None], jnp.float32)
    direction = jnp.asarray(rng.normal(size=param.shape), jnp.float32)
    moved = param + hyperball_update(param, direction, rate=0.1, axes=(2, 3))
    before, after = (np.linalg.norm(np.asarray(leaf, np.float64), axis=(2, 3)) for leaf in (param, moved))
    np.testing.assert_allclose(after, before, rtol=1e-6)
    turned = np.linalg.norm(np.asarray(moved - param, np.float64), axis=(2, 3)) / before
    np.testing.assert_allclose(turned, 0.1, rtol=0.1)


@pytest.mark.parametrize(("scale", "direction"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_hyperball_leaves_a_zero_direction_or_matrix_where_it_is(scale: float, direction: float):
    param = scale * jnp.arange(6.0).reshape(2, 3)
    update = hyperball_update(param, jnp.full((2, 3), direction), rate=0.1, axes=(0, 1))
    np.testing.assert_allclose(update, jnp.zeros((2, 3)), atol=1e-6)


def test_hyperball_update_does_not_depend_on_the_length_of_the_direction():
    rng = np.random.default_rng(1)
    param, direction = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    short, long = (
        hyperball_update(param, length * direction, rate=0.05, axes=(0, 1)) for length in (2.0**-20, 2.0**10)
    )
    np.testing.assert_array_equal(short, long)
