"""Grouped-query attention with query/key RMSNorm, a sliding window and partial rotary positions.

What differs between layers (window, rotary on or off, key/value heads in use) arrives as data, so one compiled body
serves all layers. Exclusive attention, a gate on each head and short convolutions are options of the family.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rungwise.model.config import ModelConfig
from rungwise.model.linear import linear
from rungwise.model.norm import rms_norm
from rungwise.model.rotary import rotate
from rungwise.model.short_conv import short_conv

QUERY_BLOCK = 128
"""Queries handled together. A block multiplies only keys that one of its queries may see."""


class LayerKind(NamedTuple):
    """What makes one layer different from another, as scanned data."""

    window: Int[Array, ""]
    angles: Float[Array, "seq half"]
    whole: Bool[Array, ""]
    """A global layer: sees the whole sequence."""


def causal_window_mask(start: int, stop: int, window: Int[Array, ""]) -> Bool[Array, "queries keys"]:
    """True where query i in [start, stop) may see key j in [0, stop): 0 ≤ i − j < window."""
    distance = jnp.arange(start, stop)[:, None] - jnp.arange(stop)[None, :]
    return (distance >= 0) & (distance < window)


def _blocks(seq_len: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_BLOCK, seq_len)) for start in range(0, seq_len, QUERY_BLOCK)]


def _rows(x: jax.Array, start: int, stop: int) -> jax.Array:
    """Queries of one block with their groups as rows: [batch, kv, group, seq, dim] → [batch, kv, group·block, dim]."""
    block = x[:, :, :, start:stop]
    return block.reshape(*block.shape[:2], -1, block.shape[-1])


def _ungroup(x: jax.Array, groups: int) -> jax.Array:
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1])


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """A matrix product summed, and returned, in float32."""
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


Attended = tuple[Float[Array, "batch kv group seq dim"], Float[Array, ""]]


@jax.custom_vjp
def attend(
    query: Float[Array, "batch kv group seq dim"],
    key: Float[Array, "batch kv seq dim"],
    value: Float[Array, "batch kv seq dim"],
    window: Int[Array, ""],
) -> Attended:
    """softmax(q kᵀ + mask) v for every query head, and the largest logit any query sees.

    The gradient is written out: the groups of a key head are rows of one matrix product, keys after a query block are
    never multiplied, and the unnormalised weights are kept instead of being computed again.

    Args:
        query: already scaled.
    """
    return _attend_forward(query, key, value, window)[0]


def _attend_forward(query: jax.Array, key: jax.Array, value: jax.Array, window: jax.Array) -> tuple[Attended, tuple]:
    groups = query.shape[2]
    outputs, kept, highest = [], [], []
    for start, stop in _blocks(query.shape[3]):
        rows = _rows(query, start, stop)
        logits = _product(rows, jnp.swapaxes(key[:, :, :stop], -1, -2))
        mask = jnp.tile(causal_window_mask(start, stop, window), (groups, 1))
        logits = jnp.where(mask, logits, -jnp.inf)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = _product(weights.astype(value.dtype), value[:, :, :stop]) / total
        outputs.append(_ungroup(mixed, groups))
        kept.append((weights, total, mixed))
        highest.append(jnp.max(peak))
    attended = jnp.concatenate(outputs, axis=3).astype(value.dtype), jnp.max(jnp.stack(highest))
    return attended, (query, key, value, window, tuple(kept))


def _attend_backward(residuals: tuple, cotangents: Attended) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, _, kept = residuals
    groups, seq_len = query.shape[2], query.shape[3]
    grad_query = []
    grad_key, grad_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for (start, stop), (weights, total, mixed) in zip(_blocks(seq_len), kept, strict=True):
        grad_mixed = _rows(cotangents[0], start, stop) / total
        centre = jnp.sum(grad_mixed * mixed, axis=-1, keepdims=True)
        grad_mixed = grad_mixed.astype(value.dtype)
        grad_logits = weights * (_product(grad_mixed, jnp.swapaxes(value[:, :, :stop], -1, -2)) - centre)
        grad_logits = grad_logits.astype(key.dtype)
        grad_query.append(_ungroup(_product(grad_logits, key[:, :, :stop]), groups))
        block_key = _product(jnp.swapaxes(grad_logits, -1, -2), _rows(query, start, stop))
        block_value = _product(jnp.swapaxes(weights, -1, -2).astype(value.dtype), grad_mixed)
        padding = ((0, 0), (0, 0), (0, seq_len - stop), (0, 0))
        grad_key = grad_key + jnp.pad(block_key, padding)
        grad_value = grad_value + jnp.pad(block_value, padding)
    grad = jnp.concatenate(grad_query, axis=3)
    return grad.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype), None


attend.defvjp(_attend_forward, _attend_backward)


def attention(
    params: dict[str, Any],
    x: Float[Array, "batch seq hidden"],
    kind: LayerKind,
    *,
    config: ModelConfig,
    conv: dict[str, Any] | None = None,
) -> tuple[Float[Array, "batch seq hidden"], Float[Array, ""]]:
    """One attention branch, without its residual; also the largest attention logit.

    softmax(multiplier · q kᵀ / √head_dim + mask) v, with q and k normalised per head before rotation.

    Args:
        params: `query` [hidden, heads, dim], `key` and `value` [hidden, kv_heads, dim], `out` [heads, dim, hidden],
            and by option `query_norm` and `key_norm` [dim], `gate` [hidden, heads].
        conv: taps of the short convolutions on `key`, `value` and `attention`, those the family has.
    Source: Ainslie et al. 2023 (GQA); Henry et al. 2020 (query-key normalisation).
    """
    conv = conv or {}
    heads, dim = config.num_heads, config.head_dim
    query, key, value = _projections(params, x, config, conv)
    if config.global_kv_heads not in (None, config.num_kv_heads):
        key, value = (_heads_in_use(part, kind.whole, config) for part in (key, value))
    turn = partial(_normed_and_rotated, kind=kind, epsilon=config.norm_epsilon)
    query, key = turn(query, params.get("query_norm")), turn(key, params.get("key_norm"))

    scale = config.query_key_multiplier / dim**0.5
    grouped = (query * scale).reshape(*x.shape[:2], config.num_kv_heads, -1, dim)
    values = value.transpose(0, 2, 1, 3)
    mixed, logit_max = attend(grouped.transpose(0, 2, 3, 1, 4), key.transpose(0, 2, 1, 3), values, kind.window)
    if config.exclusive_attention:
        mixed = without_own_value(mixed, values[:, :, None])
    mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(*x.shape[:2], heads, dim)
    if config.attention_gate:
        mixed = (mixed.astype(jnp.float32) * head_gate(x, params["gate"])[..., None]).astype(x.dtype)
    out = linear(mixed.reshape(-1, heads * dim), params["out"].reshape(heads * dim, -1)).reshape(x.shape)
    if "attention" in conv:
        out = short_conv(out, conv["attention"])
    return out, jax.lax.stop_gradient(logit_max)


def _projections(
    params: dict[str, Any], x: jax.Array, config: ModelConfig, conv: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [batch, seq, heads, dim], key and value [batch, seq, kv_heads, dim], from one fused product."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = jnp.concatenate([params[name].reshape(config.hidden_dim, -1) for name in ("query", "key", "value")], axis=1)
    projected = linear(x.reshape(-1, config.hidden_dim), fused).reshape(*x.shape[:2], -1)
    query, key, value = jnp.split(projected, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    if "key" in conv:
        key = short_conv(key, conv["key"])
    if "value" in conv:
        value = short_conv(value, conv["value"])
    return tuple(part.reshape(*x.shape[:2], -1, dim) for part in (query, key, value))  # pyright: ignore[reportReturnType]


def _heads_in_use(
    part: Float[Array, "batch seq kv dim"], whole: Bool[Array, ""], config: ModelConfig
) -> Float[Array, "batch seq kv dim"]:
    """All stored heads in a local layer; in a global one the first `global_kv_heads`, each standing for several."""
    used = config.global_kv_heads or config.num_kv_heads
    return jnp.where(whole, jnp.repeat(part[:, :, :used], config.num_kv_heads // used, axis=2), part)


def without_own_value(
    mixed: Float[Array, "*#positions dim"], value: Float[Array, "*#positions dim"]
) -> Float[Array, "*#positions dim"]:
    """y − (y·v / (v·v + 10⁻⁶)) v: what attention brings from elsewhere, orthogonal to the position's own value.

    Source: exclusive self-attention as in the reference run (experiments/grug/moe_hero_ep/model.py).
    """
    wide, own = mixed.astype(jnp.float32), value.astype(jnp.float32)
    along = jnp.sum(wide * own, axis=-1, keepdims=True) / (jnp.sum(own * own, axis=-1, keepdims=True) + 1e-6)
    return (wide - along * own).astype(mixed.dtype)


def head_gate(
    x: Float[Array, "batch seq hidden"], weights: Float[Array, "hidden heads"]
) -> Float[Array, "batch seq heads"]:
    """2σ(x · w) in float32: one factor a head and position, 1 where the weights are zero.

    Source: the reference run's head-wise attention gate (experiments/grug/moe_hero_ep/model.py).
    """
    opening = linear(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:2], -1)
    return 2.0 * jax.nn.sigmoid(opening.astype(jnp.float32))


def _normed_and_rotated(x: jax.Array, scale: jax.Array | None, *, kind: LayerKind, epsilon: float) -> jax.Array:
    return rotate(rms_norm(x, scale, epsilon=epsilon), kind.angles)
