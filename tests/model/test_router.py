import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rungwise.model.balance import quantile_bias, upper_quantile
from rungwise.model.router import choose_experts, top_logits


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=5))
def test_top_logits_breaks_ties_by_the_lower_id(rows: list[list[int]]):
    values, ids = top_logits(jnp.asarray(rows, jnp.float32), 4)
    for row, value, chosen in zip(rows, np.asarray(values), np.asarray(ids), strict=True):
        order = sorted(range(6), key=lambda index: (-row[index], index))[:4]
        assert chosen.tolist() == order
        assert value.tolist() == [row[index] for index in order]


def test_top_logits_of_a_nan_row_stay_in_range():
    _, ids = top_logits(jnp.full((1, 4), jnp.nan), 3)
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 4))


def test_gates_come_from_unbiased_logits_and_add_up():
    logits = jnp.asarray([[0.3, -1.0, 2.0, 0.1]])
    routes = choose_experts(logits, jnp.asarray([0.0, 5.0, 0.0, 0.0]), top_k=2, gate_sum=2.5)
    assert routes.experts.tolist() == [[1, 2]]
    scores = 1 / (1 + np.exp(-np.asarray([-1.0, 2.0])))
    np.testing.assert_allclose(routes.gates[0], 2.5 * scores / scores.sum(), rtol=1e-6)
    assert float(routes.threshold[0]) == np.float32(0.3)
    np.testing.assert_allclose(float(routes.margin[0]), 2.0 - 0.3, rtol=1e-6)


def test_upper_quantile_leaves_exactly_the_asked_count_above():
    values = np.random.default_rng(0).normal(size=(101, 7)).astype(np.float32)
    for count in (1, 13, 50):
        level = np.asarray(upper_quantile(jnp.asarray(values), count))
        assert np.all((values > level).sum(axis=0) == count)


def test_quantile_bias_evens_out_a_skewed_router():
    rng = np.random.default_rng(0)
    skew = np.linspace(-1.5, 1.5, 8)
    bias = jnp.zeros(8)
    for step in range(30):
        logits = jnp.asarray(rng.normal(size=(2048, 8)) + skew, jnp.float32)
        routes = choose_experts(logits, bias, top_k=2, gate_sum=1.0)
        load = np.bincount(np.asarray(routes.experts).ravel(), minlength=8)
        if step == 0:
            assert load.max() / load.mean() > 2.0
        bias = quantile_bias(logits, routes.threshold, top_k=2)
    assert load.max() / load.mean() < 1.15
    assert abs(float(jnp.mean(bias))) < 1e-5
