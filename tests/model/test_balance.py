from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model.balance import (
    HISTOGRAM_BINS,
    balance_loss,
    histogram_quantile,
    loss_free_bias,
    margins,
    quantile_bias,
    quantile_level,
    upper_quantile,
)
from rungwise.model.config import ModelConfig
from rungwise.model.router import choose_experts

ESTIMATORS = ("exact", "topk", "histogram")
SCOPES = ("local", "global", "sequence")


def _logits(*shape: int, skew: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=shape) + skew * np.linspace(-1, 1, shape[-1])


def test_upper_quantile_leaves_exactly_the_asked_count_above():
    values = np.random.default_rng(0).normal(size=(101, 7)).astype(np.float32)
    for count in (1, 13, 50):
        level = np.asarray(upper_quantile(jnp.asarray(values), count))
        assert np.all((values > level).sum(axis=0) == count)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("tokens", [24, 40])  # 24 · 2 / 8 a whole number, over two ranks; 40 of which leave a fraction
def test_quantile_level_equals_the_loop_reference(
    config: ModelConfig, reference: ModuleType, estimator: str, tokens: int
):
    config = config.replace(quantile_estimator=estimator, top_k=3)
    values = _logits(tokens, 8)
    levels = {"exact": reference.exact_level, "topk": reference.topk_level, "histogram": reference.histogram_level}
    ours = quantile_level(jnp.asarray(values, jnp.float32), config=config, num_ranks=2)
    np.testing.assert_allclose(ours, levels[estimator](values, config, 2), rtol=1e-4, atol=1e-4)


def test_histogram_is_within_a_bin_of_the_exact_level():
    values = _logits(2000, 8).astype(np.float32)
    width = (values.max() - values.min()) / HISTOGRAM_BINS
    level = np.asarray(histogram_quantile(jnp.asarray(values), 500.0))
    exact = np.sort(values, axis=0)[-500]
    assert np.all(np.abs(level - exact) <= 1.01 * width)


def test_histogram_of_equal_margins_is_their_value():
    np.testing.assert_allclose(histogram_quantile(jnp.full((16, 4), 0.5), 4.0), [0.5] * 4, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_quantile_bias_evens_out_a_skewed_router(config: ModelConfig, estimator: str):
    config = config.replace(quantile_estimator=estimator)
    rng, skew, bias = np.random.default_rng(0), np.linspace(-1.5, 1.5, 8), jnp.zeros(8)
    for step in range(30):
        logits = jnp.asarray(rng.normal(size=(2048, 8)) + skew, jnp.float32)
        routes = choose_experts(logits, bias, top_k=2, gate_sum=1.0)
        load = np.bincount(np.asarray(routes.experts).ravel(), minlength=8)
        if step == 0:
            assert load.max() / load.mean() > 2.0
        bias = quantile_bias(quantile_level(margins(logits, routes.threshold), config=config, num_ranks=4))
    assert load.max() / load.mean() < 1.15
    assert abs(float(jnp.mean(bias))) < 1e-5


def test_loss_free_bias_moves_each_expert_one_step_towards_the_mean_load():
    # Published case: loads 1 and 2 with bias ∓0.03; a validation's 9 and 0 leaking in would turn the signs around.
    after = loss_free_bias(jnp.asarray([[-0.03, 0.03]]), jnp.asarray([[1, 2]]), step=0.001)
    np.testing.assert_allclose(after, [[-0.029, 0.029]], rtol=1e-6)
    leaked = loss_free_bias(jnp.asarray([[-0.03, 0.03]]), jnp.asarray([[1 + 9, 2]]), step=0.001)
    np.testing.assert_allclose(leaked, [[-0.031, 0.031]], rtol=1e-6)


def test_loss_free_bias_leaves_a_balanced_expert_alone():
    after = loss_free_bias(jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([4, 5, 6]), step=0.01)
    np.testing.assert_allclose(after, [0.11, 0.2, 0.29], rtol=1e-6)


def test_loss_free_bias_evens_out_a_skewed_router():
    rng, skew, bias = np.random.default_rng(0), np.linspace(-1.5, 1.5, 8), jnp.zeros(8)
    for _ in range(200):
        logits = jnp.asarray(rng.normal(size=(1024, 8)) + skew, jnp.float32)
        routes = choose_experts(logits, bias, top_k=2, gate_sum=1.0)
        load = jnp.bincount(routes.experts.ravel(), length=8)
        bias = loss_free_bias(bias, load, step=0.02)
    assert float(jnp.max(load) / jnp.mean(load)) < 1.25


@pytest.mark.parametrize("scope", SCOPES)
def test_balance_loss_equals_the_loop_reference(config: ModelConfig, reference: ModuleType, scope: str):
    config = config.replace(balance="auxiliary_loss", balance_loss_weight=0.1, balance_scope=scope)
    logits = _logits(4, 6, 8)
    experts = np.argsort(-logits, axis=-1)[..., :2]
    ours = balance_loss(jnp.asarray(logits, jnp.float32), jnp.asarray(experts), scope=scope, num_ranks=2)
    np.testing.assert_allclose(ours, reference.balance_loss(logits, experts, config, parts=2), rtol=1e-5)


def test_balance_loss_scopes_differ_where_parts_do():
    logits = _logits(4, 6, 8)
    experts = jnp.asarray(np.argsort(-logits, axis=-1)[..., :2])
    values = {float(balance_loss(jnp.asarray(logits), experts, scope=scope, num_ranks=2)) for scope in SCOPES}
    assert len(values) == 3


def test_balance_loss_is_differentiated_through_the_probabilities_alone():
    # With f fixed, d/dl_e of E · Σ f·softmax(l) averaged over T tokens is E/T · p_e (f_e − Σ f·p).
    logits = jnp.asarray(_logits(1, 5, 4), jnp.float32)

    def loss(logits: jax.Array) -> jax.Array:
        experts = choose_experts(logits, jnp.zeros(4), top_k=1, gate_sum=1.0).experts
        return balance_loss(logits, experts, scope="global", num_ranks=1)

    frequency = np.bincount(np.asarray(logits[0]).argmax(-1), minlength=4) / 5
    p = np.asarray(jax.nn.softmax(logits[0]))
    expected = 4 / 5 * p * (frequency - (p @ frequency)[:, None])
    np.testing.assert_allclose(jax.grad(loss)(logits)[0], expected, rtol=1e-5, atol=1e-7)


def _top1_loss(rows: list[list[float]]) -> float:
    probability = jnp.asarray([rows])
    experts = choose_experts(probability, jnp.zeros(len(rows[0])), top_k=1, gate_sum=1.0).experts
    return float(balance_loss(jnp.log(probability), experts, scope="global", num_ranks=1))


def test_balance_loss_can_be_low_while_experts_are_not_balanced():
    # "Token gerrymandering", the published smallest case, and the lowest value two experts allow: 7/8 at a 1:3 split.
    assert _top1_loss([[0.5, 0.5 - 1e-6], [0.5 - 1e-6, 0.5]]) == pytest.approx(1.0, abs=1e-5)
    assert _top1_loss([[1.0, 1e-30]] * 2 + [[0.4, 0.6]] * 4) == pytest.approx(14 / 15, rel=1e-6)
    assert _top1_loss([[1.0, 1e-30]] + [[0.5 - 1e-7, 0.5]] * 3) == pytest.approx(7 / 8, rel=1e-5)
