from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.model import transformer
from rungwise.model.config import ModelConfig
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.moe import MoeMethod
from rungwise.model.stats import layer_stats
from rungwise.model.transformer import ModelOutput, abstract_params, forward, init_bias, init_params

_forward = jax.jit(forward, static_argnames=("config", "method"))


@pytest.fixture
def tokens(config: ModelConfig) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, (4, config.seq_len))


def _params(config: ModelConfig) -> Any:
    """Random weights with norms away from one, so that a forgotten scale shows."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf) * rng.uniform(0.5, 1.5, leaf.shape)), init_params(config, 0)
    )


def _pooled(config: ModelConfig, factor: float, *, data_replicas: int = 1) -> MoeMethod:
    transport = TransportConfig(
        name="pooled_wave",
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_ranks=2,
        num_waves=2,
        sender_capacity_factor=factor,
        receiver_capacity_factor=factor,
    )
    return build_method(transport, data_replicas=data_replicas)


def _dropless(config: ModelConfig) -> MoeMethod:
    return build_method(dropless_config(config.num_experts, config.top_k))


def test_forward_through_virtual_ranks_with_room_equals_dropless(
    config: ModelConfig, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)  # one layer to compile instead of five
    params, bias = _params(config), init_bias(config)

    def loss(params: Any, method: MoeMethod) -> tuple[jax.Array, ModelOutput]:
        output = forward(params, bias, jnp.asarray(tokens), config=config, method=method)
        return jnp.mean(output.logits**2), output

    gradient_of = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    plain, ours = gradient_of(params, _dropless(config))
    pooled, theirs = gradient_of(params, _pooled(config, 8.0, data_replicas=2))
    assert int(jnp.sum(theirs.sums.sender_dropped + theirs.sums.receiver_dropped)) == 0
    np.testing.assert_allclose(theirs.logits, ours.logits, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), pooled, plain)
    np.testing.assert_array_equal(theirs.sums.expert_load, ours.sums.expert_load)
    np.testing.assert_array_equal(theirs.margins[0], ours.margins[0])  # same input, to the bit, in the first layer
    np.testing.assert_allclose(theirs.margins, ours.margins, rtol=1e-4, atol=1e-5)


def test_forward_counts_drops_of_a_tight_transport(config: ModelConfig, tokens: np.ndarray):
    bias = init_bias(config)
    output = _forward(_params(config), bias, tokens, config=config, method=_pooled(config, 0.5))
    sums = output.sums
    assert np.asarray(sums.valid).tolist() == [tokens.size * config.top_k] * config.num_layers
    np.testing.assert_array_equal(np.sum(sums.expert_load, axis=-1), sums.valid)
    stats = layer_stats(sums, bias=bias, attention_logit_max=output.attention_logit_max)
    assert np.all(np.asarray(stats.drop_fraction) >= 0.4)
    np.testing.assert_allclose(
        stats.drop_fraction, stats.sender_drop_fraction + stats.receiver_drop_fraction, rtol=1e-6
    )
    assert np.all(np.asarray(stats.tokens_lost_all_routes) > 0)


def test_forward_does_not_depend_on_whether_layers_are_unrolled(
    config: ModelConfig, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    def run() -> ModelOutput:  # a method of its own each time, so that nothing compiled before is used again
        return _forward(_params(config), init_bias(config), tokens, config=config, method=_dropless(config))

    unrolled = run()
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)
    for one, other in zip(jax.tree.leaves(unrolled), jax.tree.leaves(run()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_random_routing_follows_its_key_and_differs_between_layers(config: ModelConfig, tokens: np.ndarray):
    config = config.replace(routing="random", balance="none")
    params, bias, method = _params(config), init_bias(config), _dropless(config)

    def loads(key: jax.Array | None) -> list[list[int]]:
        output = _forward(params, bias, tokens, config=config, method=method, key=key)
        return np.asarray(output.sums.expert_load).tolist()

    first = loads(jax.random.key(0))
    assert first == loads(jax.random.key(0))
    assert first != loads(jax.random.key(1))
    assert len({tuple(row) for row in first}) == config.num_layers
    assert all(sum(row) == tokens.size * config.top_k for row in first)


def test_params_are_a_pure_function_of_the_seed(config: ModelConfig):
    first, again, other = init_params(config, 3), init_params(config, 3), init_params(config, 4)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"], other["embed"])


def test_options_start_without_effect_on_the_attention_branch(config: ModelConfig, tokens: np.ndarray):
    # An attention gate starts at one, a convolution passes its input through: same seed, same logits.
    options = {"attention_gate": True, "short_conv_kernel": 4, "short_conv_sites": ("key", "value", "attention", "moe")}
    rich = config.replace(**options)
    params = init_params(config, 0)
    extended = init_params(rich, 0)
    for name in ("query", "key", "value", "out"):
        extended["layers"]["attention"][name] = params["layers"]["attention"][name]
    extended["layers"]["moe"] = params["layers"]["moe"]
    extended |= {"embed": params["embed"], "head": params["head"]}

    def logits(params: Any, config: ModelConfig) -> jax.Array:
        return _forward(params, init_bias(config), tokens, config=config, method=_dropless(config)).logits

    np.testing.assert_allclose(logits(extended, rich), logits(params, config), rtol=1e-6, atol=1e-6)


def test_parameter_tree_holds_what_the_options_ask_for_and_no_more(variant: ModelConfig):
    tree = abstract_params(variant)
    layers, kv_dim = tree["layers"], variant.num_kv_heads * variant.head_dim
    assert ("head" in tree) != variant.tied_head
    assert ("embed_norm" in tree) == variant.embed_norm
    assert ("gate" in layers["attention"]) == variant.attention_gate
    assert ("query_norm" in layers["attention"]) == variant.learned_query_key_norm
    assert ("latent_down" in layers["moe"]) == (variant.latent_dim is not None)
    assert ("shared" in layers["moe"]) == bool(variant.num_shared_experts)
    gates = [name for name in (*tree, *layers) if name.endswith("norm_gate")]
    expected = {"attention_norm_gate", "moe_norm_gate", "final_norm_gate"} if variant.gated_norm_rank else set()
    if variant.gated_norm_rank and variant.embed_norm:
        expected |= {"embed_norm_gate"}
    assert set(gates) == expected
    assert set(layers.get("conv", {})) == set(variant.short_conv_sites)
    for site, taps in layers.get("conv", {}).items():
        channels = kv_dim if site in ("key", "value") else variant.hidden_dim
        assert taps.shape == (variant.num_layers, variant.short_conv_kernel, channels)
    assert all(leaf.shape[0] == variant.num_layers for leaf in jax.tree.leaves(layers))
