import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.mxfp8 import round_trip
from rungwise.comm.mxfp8_product import has_native_product, mxfp8_matmul

RANDOM = np.random.default_rng(0)
ROWS = jnp.asarray(RANDOM.normal(size=(2, 48, 1024)), jnp.float32)
WEIGHTS = jnp.asarray(RANDOM.normal(size=(2, 1024, 40)), jnp.float32)
COTANGENT = jnp.asarray(RANDOM.normal(size=(2, 48, 40)), jnp.float32)
OWNERS = jnp.asarray([0, 0, 1, 1])

exact = grouped_matmul


def along(weights, dim):
    """Quantised along a dimension and back."""
    return jnp.moveaxis(round_trip(jnp.moveaxis(weights, dim, -1), "rceil"), -1, dim)


def relative_error(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def gradients(product, rows=ROWS, weights=WEIGHTS, cotangent=COTANGENT):
    return jax.vjp(product, rows, weights)[1](cotangent)


def test_mxfp8_product_multiplies_quantised_operands():
    got = mxfp8_matmul(ROWS, WEIGHTS)
    np.testing.assert_allclose(got, exact(along(ROWS, 2), along(WEIGHTS, 1)), rtol=1e-5, atol=1e-4)
    assert relative_error(got, exact(ROWS, WEIGHTS)) == pytest.approx(0.0377, abs=0.001)  # measured


def test_mxfp8_product_gradient_of_rows_multiplies_operands_quantised_along_features():
    got, _ = gradients(mxfp8_matmul)
    want = jnp.einsum("grf,gwf->grw", along(COTANGENT, 2), along(WEIGHTS, 2))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_mxfp8_product_gradient_of_weights_multiplies_quantised_rows_and_the_cotangent_as_it_came():
    _, got = gradients(mxfp8_matmul)
    np.testing.assert_allclose(got, jnp.einsum("grw,grf->gwf", along(ROWS, 2), COTANGENT), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mxfp8_product_loses_four_percent_forward_and_backward(dtype):
    """Of normal values: two operands with errors of 2.7% each, but for the weight gradient, where one has."""
    operands = [array.astype(dtype) for array in (ROWS, WEIGHTS, COTANGENT)]
    rows, weights = gradients(mxfp8_matmul, *operands)
    exact_rows, exact_weights = gradients(exact)
    errors = relative_error(mxfp8_matmul(*operands[:2]), exact(ROWS, WEIGHTS)), relative_error(rows, exact_rows)
    assert all(0.03 < error < 0.045 for error in errors), errors
    assert 0.02 < relative_error(weights, exact_weights) < 0.03


def test_mxfp8_product_of_named_groups_is_that_of_their_experts_weights():
    rows, cotangent = (array.reshape(4, 24, -1) for array in (ROWS, COTANGENT))
    named = lambda rows, weights: mxfp8_matmul(rows, weights, OWNERS)  # noqa: E731
    np.testing.assert_allclose(
        named(rows, WEIGHTS), mxfp8_matmul(ROWS, WEIGHTS).reshape(4, 24, -1), rtol=1e-5, atol=1e-4
    )
    got, want = gradients(named, rows, WEIGHTS, cotangent), gradients(mxfp8_matmul)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-4)


def test_mxfp8_product_of_an_infinite_cotangent_leaves_a_trace():
    """The largest number that a block can hold would pass for a gradient in all weights whose rows are below 1."""
    _, weights = gradients(mxfp8_matmul, cotangent=COTANGENT.at[0, 0, 0].set(jnp.inf))
    assert not bool(jnp.any(jnp.isfinite(weights[0, :, 0])))
    assert bool(jnp.all(jnp.isfinite(weights[0, :, 1:])))


def test_mxfp8_product_native_form_is_exported_for_cuda_forward_and_backward():
    assert not has_native_product()
    exported = export.export(
        jax.jit(jax.value_and_grad(lambda *operands: jnp.sum(mxfp8_matmul(*operands, None, True)), (0, 1))),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("__op$block_scaled_dot")],
    )
    text = exported(*(jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in (ROWS, WEIGHTS))).mlir_module()
    assert text.count("custom_call @__op$block_scaled_dot") == 2
    assert "f8E4M3FN" in text
    assert "f8E8M0FNU" in text
