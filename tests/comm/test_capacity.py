import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungwise.comm.capacity import capacity, exact_factor, logical_capacity

# Published complaint: rounding to zero for a tiny batch, or one slot below the asked factor.
TINY_BATCHES = [(4, 2, 16, 0.5, 1), (4, 2, 16, 1.0, 1), (3, 2, 8, 1.0, 1), (10, 1, 4, 1.25, 4)]


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "factor", "slots"), TINY_BATCHES)
def test_capacity_is_never_zero_and_never_short(num_tokens, top_k, num_experts, factor, slots):
    assert capacity(num_tokens * top_k, num_bins=num_experts, capacity_factor=factor) == slots


def test_capacity_takes_the_factor_as_written():
    assert capacity(100, num_bins=1, capacity_factor=1.15) == 115
    assert capacity(100, num_bins=1, capacity_factor=1.1) == 110  # 1.1 as a float is above 11/10: ceil would give 111


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1.123456789])
def test_capacity_refuses_a_factor_without_slots_or_with_too_many_digits(factor):
    with pytest.raises(ValueError, match=str(factor).replace(".", r"\.")):
        exact_factor(factor)


@pytest.mark.parametrize(("num_assignments", "num_bins"), [(0, 4), (4, 0)])
def test_capacity_refuses_empty_counts(num_assignments, num_bins):
    with pytest.raises(ValueError, match="at least 1"):
        capacity(num_assignments, num_bins=num_bins, capacity_factor=1.0)


@given(
    num_valid=st.integers(0, 10_000_000),
    num_bins=st.integers(1, 2000),
    factor=st.sampled_from([0.5, 1.0, 1.05, 1.1, 1.15, 1.33, 4.05, 1.1234, 30.0]),
)
def test_logical_capacity_is_the_exact_rule_in_int32(num_valid, num_bins, factor):
    exact = -(-Fraction(str(factor)) * num_valid // num_bins)
    traced = jax.jit(
        lambda count: logical_capacity(count, num_bins=num_bins, capacity_factor=factor, physical=2**31 - 1)
    )(jnp.int32(num_valid))
    assert traced.dtype == jnp.int32
    assert int(traced) == max(1, exact)


def test_logical_capacity_does_not_round_a_row_up_and_stops_at_the_buffer():
    # float32 gives 3889 here
    assert logical_capacity(jnp.int32(7680), num_bins=8, capacity_factor=4.05, physical=10_000) == 3888
    assert logical_capacity(jnp.int32(7680), num_bins=8, capacity_factor=4.05, physical=3000) == 3000


@pytest.mark.parametrize("module", ["capacity", "config"])
def test_capacity_and_config_import_no_jax(module):
    code = f"import rungwise.comm.{module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
