import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.model.config import ModelConfig
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.transformer import forward, init_bias, init_params

_spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


@pytest.fixture
def tokens(config: ModelConfig) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, (4, config.seq_len))


def _params(config: ModelConfig):
    """Random weights with norms away from one, so that a forgotten scale shows."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf) * rng.uniform(0.5, 1.5, leaf.shape)), init_params(config, 0)
    )


def _method(config: ModelConfig):
    return build_method(dropless_config(config.num_experts, config.top_k))


def test_forward_equals_the_loop_reference(config: ModelConfig, tokens: np.ndarray):
    params = _params(config)
    bias = np.random.default_rng(2).normal(0, 0.05, (config.num_layers, config.num_experts))
    ours = forward(params, jnp.asarray(bias, jnp.float32), jnp.asarray(tokens), config=config, method=_method(config))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    np.testing.assert_allclose(ours.logits, reference.forward(wide, bias, tokens, config), rtol=2e-4, atol=2e-5)


def test_forward_is_causal_by_gradient(config: ModelConfig, tokens: np.ndarray):
    params = _params(config)
    position = 6

    def logits_of(embedded: jax.Array) -> jax.Array:
        # every token its own row of the embedding, so that the gradient by row is the gradient by position
        own = params | {"embed": embedded}
        ids = jnp.arange(config.seq_len)[None, :]
        output = forward(own, init_bias(config), ids, config=config, method=_method(config))
        return jnp.sum(output.logits[0, position] ** 2)

    gradient = jax.grad(logits_of)(params["embed"][tokens[0]])
    reach = np.abs(np.asarray(gradient)).sum(axis=-1)
    assert np.all(reach[: position + 1] > 0)
    assert np.all(reach[position + 1 :] == 0)


def test_forward_through_virtual_ranks_with_room_equals_dropless(config: ModelConfig, tokens: np.ndarray):
    params, bias = _params(config), init_bias(config)
    wide = TransportConfig(
        name="pooled_wave",
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_ranks=2,
        num_waves=2,
        sender_capacity_factor=8.0,
        receiver_capacity_factor=8.0,
    )

    def loss(params, method):
        output = forward(params, bias, jnp.asarray(tokens), config=config, method=method)
        return jnp.mean(output.logits**2), output

    gradient_of = jax.grad(loss, has_aux=True)
    plain, ours = gradient_of(params, _method(config))
    pooled, theirs = gradient_of(params, build_method(wide, data_replicas=2))
    assert float(jnp.max(theirs.stats.drop_fraction)) == 0.0
    np.testing.assert_allclose(theirs.logits, ours.logits, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), pooled, plain)
    np.testing.assert_array_equal(theirs.next_bias[0], ours.next_bias[0])  # same input, to the bit, in the first layer
    np.testing.assert_allclose(theirs.next_bias, ours.next_bias, rtol=1e-4, atol=1e-5)


def test_forward_counts_drops_of_a_tight_transport(config: ModelConfig, tokens: np.ndarray):
    tight = TransportConfig(
        name="pooled_wave",
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_ranks=2,
        num_waves=2,
        sender_capacity_factor=0.5,
        receiver_capacity_factor=0.5,
    )
    output = forward(_params(config), init_bias(config), jnp.asarray(tokens), config=config, method=build_method(tight))
    stats = output.stats
    assert np.all(np.asarray(stats.drop_fraction) >= 0.4)
    np.testing.assert_allclose(
        stats.drop_fraction, stats.sender_drop_fraction + stats.receiver_drop_fraction, rtol=1e-6
    )


def test_params_are_a_pure_function_of_the_seed(config: ModelConfig):
    first, again, other = init_params(config, 3), init_params(config, 3), init_params(config, 4)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"], other["embed"])
