"""Grouped-query attention with query/key RMSNorm, a sliding window and partial rotary positions.

What differs between layers (window, rotary on or off) arrives as data, so one compiled body serves all layers.
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

QUERY_BLOCK = 128
"""Queries handled together. A block multiplies only keys that one of its queries may see."""


class LayerKind(NamedTuple):
    """What makes one layer different from another, as scanned data."""

    window: Int[Array, ""]
    angles: Float[Array, "seq half"]


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
        logits = rows @ jnp.swapaxes(key[:, :, :stop], -1, -2)
        mask = jnp.tile(causal_window_mask(start, stop, window), (groups, 1))
        logits = jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = (weights.astype(value.dtype) @ value[:, :, :stop]) / total
        outputs.append(_ungroup(mixed, groups))
        kept.append((weights, total, mixed))
        highest.append(jnp.max(peak))
    attended = jnp.concatenate(outputs, axis=3), jnp.max(jnp.stack(highest))
    return attended, (query, key, value, window, tuple(kept))


def _attend_backward(residuals: tuple, cotangents: Attended) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, _, kept = residuals
    groups, seq_len = query.shape[2], query.shape[3]
    grad_query = []
    grad_key, grad_value = jnp.zeros_like(key), jnp.zeros_like(value)
    for (start, stop), (weights, total, mixed) in zip(_blocks(seq_len), kept, strict=True):
        grad_mixed = _rows(cotangents[0], start, stop) / total
        centre = jnp.sum(grad_mixed * mixed, axis=-1, keepdims=True)
        grad_logits = weights * (grad_mixed @ jnp.swapaxes(value[:, :, :stop], -1, -2) - centre)
        grad_query.append(_ungroup(grad_logits @ key[:, :, :stop], groups))
        block_key = jnp.swapaxes(grad_logits, -1, -2) @ _rows(query, start, stop)
        block_value = jnp.swapaxes(weights, -1, -2) @ grad_mixed
        padding = ((0, 0), (0, 0), (0, seq_len - stop), (0, 0))
        grad_key = grad_key + jnp.pad(block_key, padding)
        grad_value = grad_value + jnp.pad(block_value, padding)
    return jnp.concatenate(grad_query, axis=3), grad_key, grad_value, None


attend.defvjp(_attend_forward, _attend_backward)


def attention(
    params: dict[str, Any], x: Float[Array, "batch seq hidden"], kind: LayerKind, *, config: ModelConfig
) -> tuple[Float[Array, "batch seq hidden"], Float[Array, ""]]:
    """One attention branch, without its residual; also the largest attention logit.

    softmax(multiplier · q kᵀ / √head_dim + mask) v, with q and k normalised per head before rotation.

    Args:
        params: `query` [hidden, heads, dim], `key` and `value` [hidden, kv_heads, dim], `out` [heads, dim, hidden],
            `query_norm` and `key_norm` [dim].
    Source: Ainslie et al. 2023 (GQA); Henry et al. 2020 (query-key normalisation).
    """
    turn = partial(_normed_and_rotated, kind=kind, epsilon=config.norm_epsilon)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fused = jnp.concatenate([params[name].reshape(config.hidden_dim, -1) for name in ("query", "key", "value")], axis=1)
    query, key, value = jnp.split(
        linear(x.reshape(-1, config.hidden_dim), fused), [heads * dim, (heads + kv_heads) * dim], axis=-1
    )
    query = turn(query.reshape(*x.shape[:2], heads, dim), params["query_norm"])
    key = turn(key.reshape(*x.shape[:2], kv_heads, dim), params["key_norm"])
    value = value.reshape(*x.shape[:2], kv_heads, dim)

    scale = config.query_key_multiplier / dim**0.5
    grouped = (query * scale).reshape(*x.shape[:2], kv_heads, -1, dim)
    mixed, logit_max = attend(
        grouped.transpose(0, 2, 3, 1, 4), key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), kind.window
    )
    mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(-1, heads * dim)
    return linear(mixed, params["out"].reshape(heads * dim, -1)).reshape(x.shape), jax.lax.stop_gradient(logit_max)


def _normed_and_rotated(x: jax.Array, scale: jax.Array, *, kind: LayerKind, epsilon: float) -> jax.Array:
    return rotate(rms_norm(x, scale, epsilon=epsilon), kind.angles)
