import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungwise.model.router import assign_experts, choose_experts, gates_of, top_logits

GATES = ("sigmoid", "softmax", "topk_softmax")


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


def test_choice_is_of_biased_logits_and_gates_of_unbiased_ones():
    logits = jnp.asarray([[0.3, -1.0, 2.0, 0.1]])
    routes = choose_experts(logits, jnp.asarray([0.0, 5.0, 0.0, 0.0]), top_k=2, gate_sum=2.5)
    assert routes.experts.tolist() == [[1, 2]]
    scores = 1 / (1 + np.exp(-np.asarray([-1.0, 2.0])))
    np.testing.assert_allclose(routes.gates[0], 2.5 * scores / scores.sum(), rtol=1e-6)
    assert float(routes.threshold[0]) == np.float32(0.3)
    np.testing.assert_allclose(float(routes.margin[0]), 2.0 - 0.3, rtol=1e-6)


def test_gates_by_hand():
    # e^l = 1, 2, 3, 4: probabilities 0.1, 0.2, 0.3, 0.4; among the chosen 3 and 1: 2/3 and 1/3; σ: 4/5 and 2/3
    logits, chosen = jnp.log(jnp.asarray([[1.0, 2.0, 3.0, 4.0]])), jnp.asarray([[3, 1]])
    by_hand = {"sigmoid": [12 / 11, 10 / 11], "softmax": [0.8, 0.4], "topk_softmax": [4 / 3, 2 / 3]}
    for gate, expected in by_hand.items():
        np.testing.assert_allclose(gates_of(logits, chosen, gate_sum=2.0, gate=gate)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_huge_logits_are_finite_with_their_gradient(gate: str):
    logits = jnp.asarray([[1000.0, 0.0, -1000.0], [-1000.0, -1001.0, -1002.0]])

    def first(logits: jax.Array) -> jax.Array:
        return jnp.sum(gates_of(logits, jnp.asarray([[0, 1], [0, 1]]), gate_sum=2.5, gate=gate)[:, 0])

    value, gradient = jax.value_and_grad(first)(logits)
    assert np.isfinite(float(value))
    assert np.all(np.isfinite(gradient))


def test_gates_of_very_negative_logits_still_add_up():
    logits = jnp.full((1, 4), -60.0)
    gates = gates_of(logits, jnp.asarray([[2, 0]]), gate_sum=2.5, gate="sigmoid")
    np.testing.assert_allclose(jnp.sum(gates), 2.5, rtol=1e-5)


def test_uniform_routing_deals_choices_out_in_turn():
    logits = jnp.zeros((2, 4, 6))
    routes = assign_experts(logits, jax.random.key(0), routing="uniform", top_k=3, gate_sum=1.0)
    expected = [[(token * 3 + k) % 6 for k in range(3)] for token in range(8)]
    assert routes.experts.reshape(-1, 3).tolist() == expected
    assert np.bincount(np.asarray(routes.experts).ravel(), minlength=6).tolist() == [4] * 6


def _drawn(seed: int, *, tokens: int = 4096) -> np.ndarray:
    logits = jnp.broadcast_to(jnp.arange(8.0), (tokens, 8))  # a learned router would take 7, 6, 5 each time
    return np.asarray(assign_experts(logits, jax.random.key(seed), routing="random", top_k=3, gate_sum=1.0).experts)


def test_random_routing_draws_distinct_experts_all_equally_likely():
    drawn = _drawn(0)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    for choice in drawn.T:
        load = np.bincount(choice, minlength=8)
        assert len(load) == 8
        # 7 degrees of freedom: below 24.3 in 99.9 % of draws
        assert float(np.sum((load - 512) ** 2 / 512)) < 24.3


def test_random_routing_is_a_pure_function_of_its_key():
    np.testing.assert_array_equal(_drawn(0), _drawn(0))
    assert np.mean(_drawn(0) == _drawn(1)) < 0.2


@pytest.mark.parametrize("routing", ["random", "uniform"])
@pytest.mark.parametrize("gate", GATES)
def test_assigned_experts_keep_the_routers_gates_and_their_gradient(routing: str, gate: str):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)

    def routes(logits: jax.Array):
        return assign_experts(logits, jax.random.key(3), routing=routing, top_k=3, gate_sum=2.5, gate=gate)

    experts = routes(logits).experts
    np.testing.assert_array_equal(routes(logits).gates, gates_of(logits, experts, gate_sum=2.5, gate=gate))
    assert np.any(jax.grad(lambda logits: jnp.sum(routes(logits).gates[:, 0]))(logits) != 0)
