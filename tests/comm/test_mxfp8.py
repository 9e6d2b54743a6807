import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rungwise.comm.mxfp8 import count_clipped, dequantize, quantize, round_trip

RULES = ("rceil", "floor")


def oracle(row, rule):
    """Block by block with logarithms and NumPy's own eight-bit numbers."""
    made, clipped = np.zeros_like(row), 0
    for start in range(0, len(row), 32):
        block = row[start : start + 32].astype(np.float64)
        largest = np.abs(block).max()
        exponent = math.floor(math.log2(largest)) - 8 if rule == "floor" else math.ceil(math.log2(largest / 448))
        scaled = block / 2.0**exponent
        clipped += (np.abs(scaled) > 448).sum()
        made[start : start + 32] = (
            np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**exponent
        )
    return made, clipped


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [32, 70])
def test_mxfp8_equals_the_definition(rule, width):
    random = np.random.default_rng(0)
    rows = (random.normal(size=(50, width)) * np.exp(4 * random.normal(size=(50, 1)))).astype(np.float32)
    got = np.asarray(round_trip(jnp.asarray(rows), rule))
    want = [oracle(row, rule) for row in rows]
    np.testing.assert_array_equal(got, np.stack([made for made, _ in want]))
    assert int(count_clipped(jnp.asarray(rows), scale=rule)) == sum(clipped for _, clipped in want)


@pytest.mark.parametrize(("rule", "scale", "value", "clipped"), [("floor", 1.0, 448.0, 1), ("rceil", 2.0, 512.0, 0)])
def test_mxfp8_published_case(rule, scale, value, clipped):
    row = jnp.array([[500.0] + [1.0] * 31])
    quantized = quantize(row, scale=rule)
    assert (quantized.values.dtype, quantized.scales.dtype) == (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
    assert float(quantized.scales.astype(jnp.float32)[0, 0]) == scale
    assert float(dequantize(quantized, width=32, dtype=jnp.float32)[0, 0]) == value
    assert int(count_clipped(row, scale=rule)) == clipped


@pytest.mark.parametrize("rule", RULES)
def test_mxfp8_is_exact_at_the_largest_number(rule):
    row = jnp.array([448.0, -448.0, 0.0])[None] * 2.0**5
    np.testing.assert_array_equal(round_trip(row, rule), row)
    assert float(quantize(row, scale=rule).scales.astype(jnp.float32)[0, 0]) == 2.0**5  # no larger than needed
    assert int(count_clipped(row, scale=rule)) == 0


@pytest.mark.parametrize(("rule", "error", "share"), [("rceil", 0.0265, 0.0), ("floor", 0.0294, 0.0086)])
def test_mxfp8_error_on_normal_numbers_is_the_measured_one(rule, error, share):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2000, 256)), jnp.float32)
    relative = jnp.linalg.norm(round_trip(rows, rule) - rows) / jnp.linalg.norm(rows)
    assert float(relative) == pytest.approx(error, abs=0.0003)
    assert int(count_clipped(rows, scale=rule)) / rows.size == pytest.approx(share, abs=0.0005)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mxfp8_makes_no_nan_and_hides_none(rule, dtype):
    extremes = [np.inf, -np.inf, 3e38, -3e38, 1e-40, 1e-38, 0.0, 1.0]
    rows = jnp.asarray([[value, *np.random.default_rng(0).normal(size=31)] for value in extremes], dtype)
    got = round_trip(rows, rule)
    assert bool(jnp.isfinite(got).all())
    assert int(count_clipped(rows, scale=rule)) >= 2  # the infinities
    assert bool((jnp.sign(got[:4, 0]) == jnp.sign(rows[:4, 0])).all())
    whole = (1e-3 * rows).at[7, 3].set(0)
    broken = np.asarray(round_trip(whole.at[7, 3].set(jnp.nan), rule), np.float32)
    assert np.argwhere(np.isnan(broken)).tolist() == [[7, 3]]
    np.testing.assert_array_equal(np.nan_to_num(broken[7]), np.asarray(round_trip(whole, rule), np.float32)[7])
    assert not np.asarray(round_trip(jnp.zeros((2, 40), dtype), rule)).any()


def test_mxfp8_gradient_passes_straight_through():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40)), jnp.float32)
    weight = jnp.cos(jnp.arange(rows.size, dtype=jnp.float32)).reshape(rows.shape)
    pulled = jax.vmap(jax.grad(lambda row, weight: jnp.sum(round_trip(row, "floor") * weight)))(rows, weight)
    np.testing.assert_array_equal(pulled, weight)
