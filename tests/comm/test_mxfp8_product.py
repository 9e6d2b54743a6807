import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from rungwise.comm.mxfp8 import round_trip
from rungwise.comm.mxfp8_product import has_native_product, mxfp8_matmul

RANDOM = np.random.default_rng(0)
ROWS = jnp.asarray(RANDOM.normal(size=(2, 48, 1024)), jnp.float32)
WEIGHTS = jnp.asarray(RANDOM.normal(size=(2, 1024, 24)), jnp.float32)


def test_mxfp8_product_multiplies_quantised_operands():
    left, right = round_trip(ROWS, "rceil"), jnp.swapaxes(round_trip(jnp.swapaxes(WEIGHTS, 1, 2), "rceil"), 1, 2)
    got = mxfp8_matmul(ROWS, WEIGHTS)
    np.testing.assert_allclose(got, jnp.einsum("grw,gwf->grf", left, right), rtol=1e-5, atol=1e-4)
    exact = jnp.einsum("grw,gwf->grf", ROWS, WEIGHTS)
    assert float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)) == pytest.approx(0.0377, abs=0.001)  # measured


def test_mxfp8_product_gradients_use_the_operands_as_they_came():
    def loss(product, rows, weights):
        return jnp.sum(product(rows, weights) * jnp.cos(jnp.arange(24.0)))

    for argument in (1, 2):
        got = jax.grad(loss, argument)(mxfp8_matmul, ROWS, WEIGHTS)
        want = jax.grad(loss, argument)(lambda rows, weights: jnp.einsum("grw,gwf->grf", rows, weights), ROWS, WEIGHTS)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_mxfp8_product_native_form_is_exported_for_cuda():
    assert not has_native_product()
    exported = export.export(
        jax.jit(lambda rows, weights: mxfp8_matmul(rows, weights, "rceil", True)),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("__op$block_scaled_dot")],
    )
    text = exported(*(jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in (ROWS, WEIGHTS))).mlir_module()
    assert "block_scaled_dot" in text
    assert "f8E4M3FN" in text
    assert "f8E8M0FNU" in text
