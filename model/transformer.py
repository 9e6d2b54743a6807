"""The whole model: parameters as Flax NNX modules, the forward pass as one pure function over their arrays.

`nnx` appears only here. `init_params` splits once; everything else sees a plain tree of arrays, stacked over layers:
`{"embed", "layers": {"attention", "moe", …}, "final_norm", "head"}`. Layers run in one `lax.scan`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rungwise.model.attention import LayerKind, attention
from rungwise.model.config import ModelConfig
from rungwise.model.linear import linear
from rungwise.model.moe import LayerStats, MoeMethod, moe
from rungwise.model.norm import rms, rms_norm
from rungwise.model.rotary import rotary_angles

MAX_UNROLLED_LAYERS = 8
"""A scan step costs up to a fifth of the step on CPU; unrolled depth costs compile time. Up to here, unroll."""

Params = dict[str, Any]


class ModelOutput(NamedTuple):
    """What one forward pass yields."""

    logits: Float[Array, "batch seq vocab"]
    stats: LayerStats
    """Per-layer figures, leading dimension layers."""
    next_bias: Float[Array, "layers experts"]
    """Balancing bias for the next step."""


def _matrix(rngs: nnx.Rngs, *shape: int, fan_in: int, scale: float) -> nnx.Param:
    """Normal weights cut at three deviations, standard deviation scale / √fan_in, float32."""
    values = jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape, jnp.float32)
    return nnx.Param(values * (scale / fan_in**0.5))


def _ones(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32))


class Attention(nnx.Module):
    """Weights of every layer's attention branch, stacked."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, width, dim, scale = config.num_layers, config.hidden_dim, config.head_dim, config.init_scale
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.query = _matrix(rngs, layers, width, heads, dim, fan_in=width, scale=scale)
        self.key = _matrix(rngs, layers, width, kv_heads, dim, fan_in=width, scale=scale)
        self.value = _matrix(rngs, layers, width, kv_heads, dim, fan_in=width, scale=scale)
        self.out = _matrix(rngs, layers, heads, dim, width, fan_in=heads * dim, scale=scale)
        self.query_norm = _ones(layers, dim)
        self.key_norm = _ones(layers, dim)


class SwiGLU(nnx.Module):
    """Gated feed-forward weights: `gate_up` [*batch, in, 2, inner], `down` [*batch, inner, in]."""

    def __init__(self, *batch: int, width: int, inner: int, scale: float, rngs: nnx.Rngs):
        self.gate_up = _matrix(rngs, *batch, width, 2, inner, fan_in=width, scale=scale)
        self.down = _matrix(rngs, *batch, inner, width, fan_in=inner, scale=scale)


class Moe(nnx.Module):
    """Weights of every layer's MoE branch, stacked."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, width, latent, scale = (
            config.num_layers,
            config.hidden_dim,
            config.latent_dim,
            config.init_scale,
        )
        self.router = _matrix(rngs, layers, width, config.num_experts, fan_in=width, scale=scale)
        self.latent_down = _matrix(rngs, layers, width, latent, fan_in=width, scale=scale)
        self.latent_norm = _ones(layers, latent)
        self.latent_up = _matrix(rngs, layers, latent, width, fan_in=latent, scale=scale)
        self.experts = SwiGLU(layers, config.num_experts, width=latent, inner=config.expert_dim, scale=scale, rngs=rngs)
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.expert_dim
            self.shared = SwiGLU(layers, width=width, inner=inner, scale=scale, rngs=rngs)


class Layers(nnx.Module):
    """Every block, stacked over layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _ones(config.num_layers, config.hidden_dim)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = _ones(config.num_layers, config.hidden_dim)
        self.moe = Moe(config, rngs=rngs)


class Transformer(nnx.Module):
    """All weights of one model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        vocab, width, scale = config.vocab_size, config.hidden_dim, config.init_scale
        self.embed = _matrix(rngs, vocab, width, fan_in=width, scale=scale)
        self.layers = Layers(config, rngs=rngs)
        self.final_norm = _ones(width)
        self.head = _matrix(rngs, width, vocab, fan_in=width, scale=scale)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Fresh weights as a plain tree of float32 arrays, a pure function of `config` and `seed`."""
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(params=seed)), nnx.Param))


def abstract_params(config: ModelConfig) -> Params:
    """The tree of `init_params` as shapes and types, nothing allocated."""
    return jax.eval_shape(lambda: init_params(config, 0))


def init_bias(config: ModelConfig) -> Float[Array, "layers experts"]:
    """The balancing bias before the first step."""
    return jnp.zeros((config.num_layers, config.num_experts), jnp.float32)


def layer_kinds(config: ModelConfig) -> LayerKind:
    """Window and rotary angles of every layer, stacked; global layers have zero angles."""
    angles = rotary_angles(config.seq_len, rotary_dim=config.rotary_dim, theta=config.rotary_theta)
    rotary = jnp.array([not config.is_global(layer) for layer in range(config.num_layers)], jnp.float32)
    return LayerKind(jnp.array(config.windows, jnp.int32), rotary[:, None, None] * jnp.asarray(angles)[None, :, :])


def forward(
    params: Params,
    bias: Float[Array, "layers experts"],
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    method: MoeMethod,
) -> ModelOutput:
    """Logits of the next token at every position, float32, with per-layer figures.

    Args:
        bias: balancing bias that selects experts in this pass.
        method: how routed tokens reach their experts.
    """

    def block(
        x: jax.Array, layer: tuple[Params, jax.Array, LayerKind]
    ) -> tuple[jax.Array, tuple[LayerStats, jax.Array]]:
        weights, layer_bias, kind = layer
        normed = rms_norm(x, weights["attention_norm"], epsilon=config.norm_epsilon)
        branch, attention_max = attention(weights["attention"], normed, kind, config=config)
        x = x + branch
        normed = rms_norm(x, weights["moe_norm"], epsilon=config.norm_epsilon)
        result = moe(weights["moe"], layer_bias, normed, config=config, method=method)
        x = x + result.output
        stats = result.stats._replace(attention_logit_max=attention_max, residual_rms=rms(jax.lax.stop_gradient(x)))
        return x, (stats, result.next_bias)

    x = params["embed"][tokens]
    unroll = config.num_layers if config.num_layers <= MAX_UNROLLED_LAYERS else 1
    x, (stats, next_bias) = jax.lax.scan(block, x, (params["layers"], bias, layer_kinds(config)), unroll=unroll)
    x = rms_norm(x, params["final_norm"], epsilon=config.norm_epsilon)
    logits = linear(x.reshape(-1, config.hidden_dim), params["head"]).astype(jnp.float32)
    logits = logits.reshape(*tokens.shape, config.vocab_size)
    return ModelOutput(logits, stats, next_bias)
