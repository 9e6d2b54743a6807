"""The whole model: parameters as Flax NNX modules, the forward pass as one pure function over their arrays.

`nnx` appears only here. `init_params` splits once; everything else sees a plain tree of arrays, stacked over layers:
`{"embed", "layers": {"attention", "moe", …}, "final_norm", "head"}`. Layers run in one `lax.scan`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rungwise.comm.collectives import COLLECTIVE
from rungwise.model.attention import LayerKind, attention
from rungwise.model.config import ModelConfig
from rungwise.model.linear import linear_wide
from rungwise.model.moe import MoeMethod, moe
from rungwise.model.norm import block_norm
from rungwise.model.rotary import rotary_angles
from rungwise.model.stats import LayerSums

LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the residual stream before each layer, where it waits in the host's memory."""

MAX_UNROLLED_LAYERS = 8
"""A scan step costs up to a fifth of the step on CPU; unrolled depth costs compile time. Up to here, unroll."""

Params = dict[str, Any]


class ModelOutput(NamedTuple):
    """What one forward pass yields. Fields after the logits have the layers as leading dimension."""

    logits: Float[Array, "batch seq vocab"]
    sums: LayerSums
    attention_logit_max: Float[Array, " layers"]
    margins: Float[Array, "layers tokens experts"] | None
    """What quantile balancing computes the next bias from."""
    router_z_loss: Float[Array, " layers"]
    balance_loss: Float[Array, " layers"]


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
        if config.learned_query_key_norm:
            self.query_norm = _ones(layers, dim)
            self.key_norm = _ones(layers, dim)
        if config.attention_gate:
            self.gate = nnx.Param(jnp.zeros((layers, width, heads), jnp.float32))


class SwiGLU(nnx.Module):
    """Gated feed-forward weights: `gate_up` [*batch, in, 2, inner], `down` [*batch, inner, in]."""

    def __init__(self, *batch: int, width: int, inner: int, scale: float, rngs: nnx.Rngs):
        self.gate_up = _matrix(rngs, *batch, width, 2, inner, fan_in=width, scale=scale)
        self.down = _matrix(rngs, *batch, inner, width, fan_in=inner, scale=scale)


class NormGate(nnx.Module):
    """Low-rank gate of a norm: `down` [*batch, dim, rank], `up` [*batch, rank, dim]."""

    def __init__(self, *batch: int, config: ModelConfig, rngs: nnx.Rngs):
        width, rank, scale = config.hidden_dim, config.gated_norm_rank, config.init_scale
        self.down = _matrix(rngs, *batch, width, rank, fan_in=width, scale=scale)
        self.up = _matrix(rngs, *batch, rank, width, fan_in=width, scale=scale)


class ShortConvs(nnx.Module):
    """Taps of every layer's short convolutions, stacked: 1 for the token itself, 0 for those before it."""

    def __init__(self, config: ModelConfig):
        kv_dim = config.num_kv_heads * config.head_dim
        for site in config.short_conv_sites:
            channels = kv_dim if site in ("key", "value") else config.hidden_dim
            taps = jnp.zeros((config.num_layers, config.short_conv_kernel, channels), jnp.float32)
            setattr(self, site, nnx.Param(taps.at[:, 0].set(1.0)))


class Moe(nnx.Module):
    """Weights of every layer's MoE branch, stacked."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layers, width, scale = config.num_layers, config.hidden_dim, config.init_scale
        self.router = _matrix(rngs, layers, width, config.num_experts, fan_in=width, scale=scale)
        if config.latent_dim is not None:
            self.latent_down = _matrix(rngs, layers, width, config.latent_dim, fan_in=width, scale=scale)
            self.latent_norm = _ones(layers, config.latent_dim)
            self.latent_up = _matrix(rngs, layers, config.latent_dim, width, fan_in=config.latent_dim, scale=scale)
        self.experts = SwiGLU(
            layers, config.num_experts, width=config.routed_dim, inner=config.expert_dim, scale=scale, rngs=rngs
        )
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
        if config.gated_norm_rank:
            self.attention_norm_gate = NormGate(config.num_layers, config=config, rngs=rngs)
            self.moe_norm_gate = NormGate(config.num_layers, config=config, rngs=rngs)
        if config.short_conv_sites:
            self.conv = ShortConvs(config)


class Transformer(nnx.Module):
    """All weights of one model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        vocab, width, scale = config.vocab_size, config.hidden_dim, config.init_scale
        self.embed = _matrix(rngs, vocab, width, fan_in=width, scale=scale)
        self.layers = Layers(config, rngs=rngs)
        self.final_norm = _ones(width)
        if config.embed_norm:
            self.embed_norm = _ones(width)
        if config.gated_norm_rank:
            self.final_norm_gate = NormGate(config=config, rngs=rngs)
            if config.embed_norm:
                self.embed_norm_gate = NormGate(config=config, rngs=rngs)
        if not config.tied_head:
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
    return LayerKind(
        window=jnp.array(config.windows, jnp.int32),
        angles=rotary[:, None, None] * jnp.asarray(angles)[None, :, :],
        whole=rotary == 0.0,
    )


def cast_weights(weights: Params, dtype: jnp.dtype) -> Params:
    """Weights in the type of matrix products; the router, gains of norms and taps of convolutions stay as they are.

    The router decides between nearly equal logits and is always multiplied in float32.
    """

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        return leaf if name == "router" or name.endswith("norm") or path[0].key == "conv" else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


class LayerFigures(NamedTuple):
    """What a run of layers yields besides its output; the layers are the leading dimension of every field."""

    sums: LayerSums
    attention_logit_max: Float[Array, " layers"]
    margins: Float[Array, "layers tokens experts"] | None
    """What quantile balancing computes the next bias from."""
    router_z_loss: Float[Array, " layers"]
    balance_loss: Float[Array, " layers"]


class LayerInputs(NamedTuple):
    """Everything a layer reads besides the residual stream, stacked over layers."""

    weights: Params
    bias: Float[Array, "layers experts"]
    kind: LayerKind
    key: jax.Array | None
    """One key of a random generator a layer; None where routing is learned."""


def forward(
    params: Params,
    bias: Float[Array, "layers experts"],
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    method: MoeMethod,
    compute_dtype: Any = jnp.float32,
    rematerialize: str = "nothing",
    key: jax.Array | None = None,
    gather: Callable[[Params], Params] = lambda weights: weights,
) -> ModelOutput:
    """Logits of the next token at every position, float32, with per-layer figures.

    Args:
        bias: balancing bias that selects experts in this pass.
        method: how routed tokens reach their experts.
        compute_dtype: of matrix products and activations.
        rematerialize: what the backward pass computes again: `nothing`, `blocks`, `blocks_keep_communication`, or
            `blocks_offload`, the same with the input of every layer kept in the host's memory.
        key: of a random generator, for random routing; a fixed one when absent.
        gather: makes the weights of one layer whole, where each rank of a mesh holds a slice of them.
    """
    dtype = jnp.dtype(compute_dtype)
    x = embed_tokens(params, tokens, config=config, dtype=dtype)
    layers = LayerInputs(params["layers"], bias, layer_kinds(config), layer_keys(config, key))
    x, figures = run_layers(layers, x, config=config, method=method, rematerialize=rematerialize, gather=gather)
    return ModelOutput(logits_of(params, x, config=config), *figures)


def embed_tokens(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig, dtype: Any
) -> Float[Array, "batch seq hidden"]:
    """The residual stream before the first layer, in the type of activations."""
    x = params["embed"][tokens].astype(dtype)  # cast after the look-up: its gradient adds up in float32
    if config.embed_norm:
        x = block_norm(x, cast_weights(_outside(params), dtype), "embed_norm", epsilon=config.norm_epsilon)
    return x


def run_layers(
    layers: LayerInputs,
    x: Float[Array, "batch seq hidden"],
    *,
    config: ModelConfig,
    method: MoeMethod,
    rematerialize: str = "nothing",
    gather: Callable[[Params], Params] = lambda weights: weights,
) -> tuple[Float[Array, "batch seq hidden"], LayerFigures]:
    """Consecutive layers, as many as `layers` stacks, in the type of `x`."""

    def block(x: jax.Array, layer: LayerInputs) -> tuple[jax.Array, LayerFigures]:
        weights = cast_weights(gather(layer.weights), x.dtype)
        conv = weights.get("conv", {})
        normed = block_norm(x, weights, "attention_norm", epsilon=config.norm_epsilon)
        branch, attention_max = attention(weights["attention"], normed, layer.kind, config=config, conv=conv)
        x = x + branch
        normed = block_norm(x, weights, "moe_norm", epsilon=config.norm_epsilon)
        result = moe(
            weights["moe"], layer.bias, normed, config=config, method=method, key=layer.key, conv=conv.get("moe")
        )
        x = x + result.output
        squares = jnp.mean(jnp.square(jax.lax.stop_gradient(x).astype(jnp.float32)), axis=-1)
        sums = result.sums._replace(residual_square=jnp.sum(squares))
        return x, LayerFigures(sums, attention_max, result.margins, result.router_z_loss, result.balance_loss)

    num_layers = len(layers.bias)
    unroll = num_layers if num_layers <= MAX_UNROLLED_LAYERS else 1
    return jax.lax.scan(_rematerialized(block, rematerialize), x, layers, unroll=unroll)


def logits_of(
    params: Params, x: Float[Array, "batch seq hidden"], *, config: ModelConfig
) -> Float[Array, "batch seq vocab"]:
    """Logits in float32 of the residual stream after the last layer."""
    outer = cast_weights(_outside(params), x.dtype)
    x = block_norm(x, outer, "final_norm", epsilon=config.norm_epsilon)
    head = outer["embed"].T if config.tied_head else outer["head"]
    return linear_wide(x.reshape(-1, config.hidden_dim), head).reshape(*x.shape[:2], config.vocab_size)


def layer_keys(config: ModelConfig, key: jax.Array | None) -> jax.Array | None:
    """One key a layer for random routing, from `key` or a fixed one; None where routing is learned."""
    if config.routing == "learned":
        return None
    return jax.random.split(jax.random.key(0) if key is None else key, config.num_layers)


def _outside(params: Params) -> Params:
    """The weights that belong to no layer."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}


def _rematerialized(block: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A block whose intermediate values the backward pass computes again; figures leave it once all the same."""
    if mode == "nothing":
        return block
    policies = jax.checkpoint_policies
    if mode == "blocks_offload":
        offload = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[COLLECTIVE],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(lambda x, layer: block(checkpoint_name(x, LAYER_INPUT), layer), policy=offload)
    keep = policies.save_only_these_names(COLLECTIVE) if mode == "blocks_keep_communication" else None
    return jax.checkpoint(block, policy=keep or policies.nothing_saveable)
