"""Every option of the family, alone and together, against the slow reference: values, figures, gradients."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model.balance import loss_free_bias, quantile_bias, quantile_level
from rungwise.model.config import ModelConfig
from rungwise.model.stats import layer_stats

PARTS = 2


def _answer(probe: Any, reference: ModuleType) -> tuple[float, np.ndarray, list[Any]]:
    objective, _ = reference.objective(probe.params, probe.bias, probe.tokens, probe.config, parts=PARTS)
    logits, records = reference.forward(probe.params, probe.bias, probe.tokens[:, :-1], probe.config, parts=PARTS)
    return objective, logits, records


def test_forward_and_objective_equal_the_loop_reference(
    variant: ModelConfig, probe: Callable[[ModelConfig], Any], reference: ModuleType
):
    small = probe(variant)
    objective, logits, records = _answer(small, reference)
    ours, output, _ = small.gradient()
    assert output.logits.dtype == np.float64
    np.testing.assert_allclose(output.logits, logits, rtol=1e-9, atol=1e-10)
    assert ours == pytest.approx(objective, rel=1e-10)
    np.testing.assert_array_equal(output.sums.expert_load, [record.load for record in records])
    np.testing.assert_allclose(output.balance_loss, [record.balance_loss for record in records], rtol=1e-9, atol=1e-12)


def test_forward_in_float32_stays_near_the_loop_reference(
    variant: ModelConfig, probe: Callable[[ModelConfig], Any], reference: ModuleType
):
    small = probe(variant)
    objective, logits, records = _answer(small, reference)
    ours, output = small.float32()
    np.testing.assert_allclose(output.logits, logits, rtol=1e-4, atol=3e-5)
    assert ours == pytest.approx(objective, rel=1e-5)
    stats = layer_stats(output.sums, bias=small.bias, attention_logit_max=output.attention_logit_max)
    np.testing.assert_allclose(stats.router_z_loss, [record.router_z for record in records], rtol=1e-4)


def test_next_bias_equals_the_loop_reference(
    variant: ModelConfig, probe: Callable[[ModelConfig], Any], reference: ModuleType
):
    small = probe(variant)
    _, output, _ = small.gradient()
    _, _, records = _answer(small, reference)
    if variant.balance == "quantile":
        with jax.enable_x64(True):
            level = [quantile_level(jnp.asarray(own), config=variant, num_ranks=PARTS) for own in output.margins]
            ours = quantile_bias(jnp.stack(level))
    elif variant.balance == "loss_free_bias":
        ours = loss_free_bias(jnp.asarray(small.bias), output.sums.expert_load, step=variant.balance_step)
    else:
        assert output.margins is None
        return
    np.testing.assert_allclose(ours, [record.next_bias for record in records], rtol=1e-5, atol=1e-6)


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    for key, node in tree.items():
        if isinstance(node, dict):
            yield from _leaves(node, (*path, key))
        else:
            yield (*path, key), node


def _only(tree: dict[str, Any], path: tuple[str, ...], values: np.ndarray) -> dict[str, Any]:
    """Zeros shaped like `tree`, but for one leaf."""
    return {
        key: _only(node, path[1:] if path[:1] == (key,) else (), values)
        if isinstance(node, dict)
        else values
        if path == (key,)
        else np.zeros_like(node)
        for key, node in tree.items()
    }


def test_gradient_of_the_objective_equals_finite_differences_of_the_loop_reference(
    variant: ModelConfig, probe: Callable[[ModelConfig], Any], reference: ModuleType
):
    small, rng = probe(variant), np.random.default_rng(1)
    _, _, grads = small.gradient()
    _, _, records = _answer(small, reference)
    options = {"parts": PARTS, "routes": [record.experts for record in records]}
    for path, gradient in _leaves(grads):
        size = np.linalg.norm(gradient)
        everywhere = rng.normal(size=gradient.shape)
        entry = np.zeros(gradient.size)
        entry[rng.integers(gradient.size)] = 1.0
        for direction in (everywhere / np.linalg.norm(everywhere), entry.reshape(gradient.shape)):
            slope = reference.slope(
                small.params, _only(grads, path, direction), 1e-5, small.bias, small.tokens, variant, **options
            )
            assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-5, abs=1e-7 * size + 1e-9), path
        if path != ("layers", "moe", "router") or variant.routing == "learned":
            assert size > 1e-6, path
