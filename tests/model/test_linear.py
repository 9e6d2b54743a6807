import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model.linear import swiglu


def _plain(gate_up, down, x):
    hidden = jnp.einsum("...ch,...hgi->...cgi", x, gate_up)
    return jnp.einsum("...ci,...ih->...ch", jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :], down)


@pytest.mark.parametrize("experts", [(), (3,), (2, 3)])
def test_swiglu_equals_automatic_gradient(experts: tuple[int, ...]):
    rng = np.random.default_rng(0)
    gate_up = jnp.asarray(rng.normal(size=(*experts, 5, 2, 4)))
    down = jnp.asarray(rng.normal(size=(*experts, 4, 5)))
    x = jnp.asarray(rng.normal(size=(*experts, 7, 5)))
    target = jnp.asarray(rng.normal(size=x.shape))
    np.testing.assert_allclose(swiglu(gate_up, down, x), _plain(gate_up, down, x), rtol=1e-5, atol=1e-5)
    ours = jax.grad(lambda *args: jnp.sum(swiglu(*args) * target), argnums=(0, 1, 2))(gate_up, down, x)
    theirs = jax.grad(lambda *args: jnp.sum(_plain(*args) * target), argnums=(0, 1, 2))(gate_up, down, x)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
