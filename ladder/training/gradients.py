"""The gradient of one whole batch, in one piece or added up over microbatches, with everything a step reports of it.

A microbatch is a group of whole data replicas, so that what is dropped does not depend on their number. Losses are sums
over the batch's count of tokens, known before the first microbatch, so that gradients simply add up, in float32; over
microbatches here, over the ranks of a mesh in `layout.py`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rungwise.comm.mesh import DATA, EXPERT, PIPE, Axes, add_over, max_over
from rungwise.ladder.family import RunConfig
from rungwise.model.loss import LossParts, LossSums, loss_parts, loss_sums, objective_of
from rungwise.model.methods import build_method
from rungwise.model.moe import MoeMethod
from rungwise.model.stages import Stages
from rungwise.model.stats import LayerSums, added
from rungwise.model.transformer import LayerFigures, ModelOutput, Params, forward


class BatchFigures(NamedTuple):
    """What a batch's forward pass reports besides its gradient."""

    loss: LossParts
    sums: LayerSums
    attention_logit_max: Float[Array, " layers"]
    margins: Float[Array, "layers tokens experts"] | None
    counted_tokens: Float[Array, ""]


class PartFigures(NamedTuple):
    """Figures of one microbatch: sums, and its share of means over the batch."""

    loss: LossSums
    layers: LayerSums
    attention_logit_max: jax.Array
    margins: jax.Array | None
    penalty: jax.Array
    balance_loss: jax.Array


Gradient = Callable[[Any, jax.Array, jax.Array, jax.Array | None, Int[Array, ""]], tuple[Any, BatchFigures]]
"""(params, bias, tokens [batch, seq + 1], weights [batch, seq] or None, step) → (gradient, figures)."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a batch one device runs; the whole of it by default.

    On a mesh a batch [replicas, ranks, …] is dealt out over the devices of `data` and `expert`.
    """

    data: int = 1
    """Devices among which the data replicas are dealt out."""
    expert: int = 1
    """Devices among which the ranks of a replica are dealt out."""
    pipe: int = 1
    """Devices among which the layers are; each of them is given the same part of a batch."""

    @property
    def axes(self) -> Axes:
        """Axes over which figures add up."""
        return tuple(axis for axis, size in ((DATA, self.data), (EXPERT, self.expert)) if size > 1)

    @property
    def devices(self) -> int:
        """Parts into which a batch is dealt out."""
        return self.data * self.expert

    def replicas(self, config: RunConfig) -> int:
        """Data replicas of one device."""
        return config.data_replicas // self.data

    def microbatches(self, config: RunConfig) -> int:
        """Parts in which one device runs its replicas: those of the config, or as many as divide the replicas."""
        return math.gcd(config.execution.microbatches, self.replicas(config))

    def method(self, config: RunConfig) -> MoeMethod:
        """How the routed tokens of one microbatch reach their experts."""
        replicas = self.replicas(config) // self.microbatches(config)
        return build_method(
            config.transport,
            data_replicas=replicas,
            axes=self.axes,
            expert_devices=self.expert,
            rematerialize_experts=config.execution.rematerialize_experts,
            expert_matmul=config.execution.expert_matmul,
        )


WHOLE = Share()


def stages_of(config: RunConfig) -> Stages:
    """How a run's layers lie on the stages of its pipeline."""
    mesh = config.mesh
    return Stages(
        num_layers=config.model.num_layers,
        num_stages=mesh.pipe,
        num_chunks=mesh.pipe_chunks,
        head_layers=mesh.pipe_head_layers,
        axis=PIPE,
    )


def make_gradient(
    config: RunConfig,
    dtype: Any,
    *,
    share: Share = WHOLE,
    gather: Callable[[str, Params], Params] = lambda _, weights: weights,
) -> Gradient:
    """Gradient of the objective of a run's whole batch; on a mesh each device's addend of it, with the batch's figures.

    objective = loss + logit z-loss, weighted + Σ over layers of router z-loss and balance loss, weighted

    Args:
        dtype: of matrix products.
        share: the part of a batch this code is given.
        gather: (prefix of names, weights) → the weights whole, where each rank holds a slice of them: `layers.` for
            those of one layer, and the empty prefix for those outside layers.
    """
    model, parts = config.model, share.microbatches(config)
    method = share.method(config)

    def objective(
        params: Any, bias: jax.Array, count: jax.Array, tokens: jax.Array, weights: jax.Array | None, key: jax.Array
    ) -> tuple[jax.Array, PartFigures]:
        output = forward(
            gather("", params),
            bias,
            tokens[:, :-1],
            config=model,
            method=method,
            compute_dtype=dtype,
            rematerialize=config.execution.rematerialize,
            key=key,
            gather=functools.partial(gather, "layers."),
        )
        loss = loss_sums(output.logits, tokens[:, 1:], weights)
        balance_loss = jnp.sum(output.balance_loss) / (parts * share.devices)
        penalty = penalty_of(output, config) / (parts * share.devices)
        figures = PartFigures(loss, output.sums, output.attention_logit_max, output.margins, penalty, balance_loss)
        return objective_of(loss, count, z_loss_weight=model.logit_z_loss_weight) + penalty, figures

    def gradient(
        params: Any, bias: jax.Array, tokens: jax.Array, weights: jax.Array | None, step: Int[Array, ""]
    ) -> tuple[Any, BatchFigures]:
        count = batch_count(tokens, weights, share)
        keys = jax.random.split(step_key(config, step, share), parts)
        value_and_grad = jax.value_and_grad(objective, has_aux=True)
        if parts == 1:
            (_, part), grads = value_and_grad(params, bias, count, tokens, weights, keys[0])
            return grads, batch_figures(part, config, share)

        def add(total: Any, microbatch: tuple[jax.Array, jax.Array | None, jax.Array]) -> tuple[Any, PartFigures]:
            (_, part), grads = value_and_grad(params, bias, count, *microbatch)
            return jax.tree.map(lambda sum_, leaf: sum_ + leaf.astype(jnp.float32), total, grads), part

        split = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (tokens, weights))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        grads, stacked = jax.lax.scan(add, zeros, (*split, keys))
        return grads, batch_figures(joined(stacked), config, share)

    return gradient


def batch_count(tokens: jax.Array, weights: jax.Array | None, share: Share) -> Float[Array, ""]:
    """Counted tokens of the whole batch, from this part's tokens [batch, seq + 1] and weights."""
    if weights is None:
        return jnp.asarray(tokens[:, 1:].size * share.devices, jnp.float32)
    return add_over(jnp.sum(weights), share.axes)


def step_key(config: RunConfig, step: Int[Array, ""], share: Share) -> jax.Array:
    """Key of a step's random routing; devices draw apart."""
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    return jax.random.fold_in(key, jax.lax.axis_index(share.axes)) if share.axes else key


def penalty_of(output: ModelOutput | LayerFigures, config: RunConfig) -> Float[Array, ""]:
    """Weighted router z-loss and balance loss of every layer; what has no weight is not differentiated at all."""
    penalty = jnp.zeros((), jnp.float32)
    if config.model.router_z_loss_weight:
        penalty = penalty + config.model.router_z_loss_weight * jnp.sum(output.router_z_loss)
    if config.model.balance_loss_weight:
        penalty = penalty + config.model.balance_loss_weight * jnp.sum(output.balance_loss)
    return penalty


def joined(stacked: PartFigures) -> PartFigures:
    """Figures of a device's share from those of its microbatches, leading dimension microbatches."""

    def add(leaf: jax.Array) -> jax.Array:
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype)

    def in_order(leaf: jax.Array) -> jax.Array:  # [microbatches, layers, parts of the batch, …] → in batch order
        return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1, leaf.shape[-1])

    summed = jax.tree.map(add, stacked._replace(margins=None, layers=None))
    return summed._replace(
        loss=summed.loss._replace(logit_abs_max=jnp.max(stacked.loss.logit_abs_max)),
        layers=added(stacked.layers, add, in_order(stacked.layers.rank_load)),
        attention_logit_max=jnp.max(stacked.attention_logit_max, axis=0),
        margins=None if stacked.margins is None else in_order(stacked.margins),
    )


def over_devices(part: PartFigures, share: Share) -> PartFigures:
    """Figures of the whole batch from this device's; margins stay those of its own tokens."""
    axes = share.axes
    if not axes:
        return part
    load = add_over(part.layers.rank_load, (EXPERT,) if share.expert > 1 else ())
    if share.data > 1:
        load = jax.lax.all_gather(load, DATA, axis=load.ndim - 2, tiled=True)
    loss, penalty, balance_loss = add_over((part.loss, part.penalty, part.balance_loss), axes)
    return part._replace(
        loss=loss._replace(logit_abs_max=max_over(part.loss.logit_abs_max, axes)),
        layers=added(part.layers, lambda leaf: add_over(leaf, axes), load),
        attention_logit_max=max_over(part.attention_logit_max, axes),
        penalty=penalty,
        balance_loss=balance_loss,
    )


def batch_figures(part: PartFigures, config: RunConfig, share: Share) -> BatchFigures:
    """What a step reports of its batch, from the figures of this device's share."""
    part = over_devices(part, share)
    weight = config.model.logit_z_loss_weight
    loss = loss_parts(part.loss, z_loss_weight=weight, balance_loss=part.balance_loss, penalty=part.penalty)
    return BatchFigures(loss, part.layers, part.attention_logit_max, part.margins, part.loss.count)
