"""The gradient of one whole batch, in one piece or added up over microbatches, with everything a step reports of it.

A microbatch is a group of whole data replicas, so that what is dropped does not depend on their number. Losses are sums
over the batch's count of tokens, known before the first microbatch, so that gradients simply add up, in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.ladder.family import RunConfig
from rungwise.model.loss import LossParts, LossSums, loss_parts, loss_sums, objective_of
from rungwise.model.methods import build_method
from rungwise.model.stats import LayerSums
from rungwise.model.transformer import ModelOutput, forward


class BatchFigures(NamedTuple):
    """What a batch's forward pass reports besides its gradient."""

    loss: LossParts
    sums: LayerSums
    attention_logit_max: Float[Array, " layers"]
    margins: Float[Array, "layers tokens experts"] | None
    counted_tokens: Float[Array, ""]


class _Part(NamedTuple):
    """Figures of one microbatch: sums, and its share of means over the batch."""

    loss: LossSums
    layers: LayerSums
    attention_logit_max: jax.Array
    margins: jax.Array | None
    penalty: jax.Array
    balance_loss: jax.Array


Gradient = Callable[[Any, jax.Array, jax.Array, jax.Array | None, Int[Array, ""]], tuple[Any, BatchFigures]]
"""(params, bias, tokens [batch, seq + 1], weights [batch, seq] or None, step) → (gradient, figures)."""


def make_gradient(config: RunConfig, dtype: Any) -> Gradient:
    """Gradient of the objective of a run's whole batch.

    objective = loss + logit z-loss, weighted + Σ over layers of router z-loss and balance loss, weighted

    Args:
        dtype: of matrix products.
    """
    model, parts = config.model, config.execution.microbatches
    method = build_method(config.transport, data_replicas=config.data_replicas // parts)

    def objective(
        params: Any, bias: jax.Array, count: jax.Array, tokens: jax.Array, weights: jax.Array | None, key: jax.Array
    ) -> tuple[jax.Array, _Part]:
        output = forward(
            params,
            bias,
            tokens[:, :-1],
            config=model,
            method=method,
            compute_dtype=dtype,
            rematerialize=config.execution.rematerialize,
            key=key,
        )
        loss = loss_sums(output.logits, tokens[:, 1:], weights)
        balance_loss = jnp.sum(output.balance_loss) / parts
        penalty = _penalty(output, config) / parts
        figures = _Part(loss, output.sums, output.attention_logit_max, output.margins, penalty, balance_loss)
        return objective_of(loss, count, z_loss_weight=model.logit_z_loss_weight) + penalty, figures

    def gradient(
        params: Any, bias: jax.Array, tokens: jax.Array, weights: jax.Array | None, step: Int[Array, ""]
    ) -> tuple[Any, BatchFigures]:
        count = jnp.asarray(tokens[:, 1:].size, jnp.float32) if weights is None else jnp.sum(weights)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), step), parts)
        value_and_grad = jax.value_and_grad(objective, has_aux=True)
        if parts == 1:
            (_, part), grads = value_and_grad(params, bias, count, tokens, weights, keys[0])
            return grads, _figures(part, config)

        def add(total: Any, microbatch: tuple[jax.Array, jax.Array | None, jax.Array]) -> tuple[Any, _Part]:
            (_, part), grads = value_and_grad(params, bias, count, *microbatch)
            return jax.tree.map(lambda sum_, leaf: sum_ + leaf.astype(jnp.float32), total, grads), part

        split = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (tokens, weights))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        grads, stacked = jax.lax.scan(add, zeros, (*split, keys))
        return grads, _figures(_joined(stacked), config)

    return gradient


def _penalty(output: ModelOutput, config: RunConfig) -> Float[Array, ""]:
    """Weighted router z-loss and balance loss of every layer; what has no weight is not differentiated at all."""
    penalty = jnp.zeros((), jnp.float32)
    if config.model.router_z_loss_weight:
        penalty = penalty + config.model.router_z_loss_weight * jnp.sum(output.router_z_loss)
    if config.model.balance_loss_weight:
        penalty = penalty + config.model.balance_loss_weight * jnp.sum(output.balance_loss)
    return penalty


def _joined(stacked: _Part) -> _Part:
    """Figures of a batch from those of its microbatches, leading dimension microbatches."""
    summed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), stacked._replace(margins=None))
    margins = stacked.margins
    if margins is not None:  # [microbatches, layers, tokens, experts] → tokens in batch order
        margins = jnp.moveaxis(margins, 0, 1).reshape(margins.shape[1], -1, margins.shape[-1])
    return summed._replace(
        loss=summed.loss._replace(logit_abs_max=jnp.max(stacked.loss.logit_abs_max)),
        attention_logit_max=jnp.max(stacked.attention_logit_max, axis=0),
        margins=margins,
    )


def _figures(part: _Part, config: RunConfig) -> BatchFigures:
    weight = config.model.logit_z_loss_weight
    loss = loss_parts(part.loss, z_loss_weight=weight, balance_loss=part.balance_loss, penalty=part.penalty)
    return BatchFigures(loss, part.layers, part.attention_logit_max, part.margins, part.loss.count)
