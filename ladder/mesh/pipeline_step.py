"""The gradient and the evaluation of a batch over the stages of a pipeline: what `training/gradients.py` is without.

Microbatches are those of `gradients.py` there, groups of whole data replicas, so that what is dropped depends neither
on their number nor on the stages. Each stage computes its layers; the first also looks tokens up, the last has the head
and the loss. What belongs to no layer lies on all stages, its gradient is the sum over them, a tied head's included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rungwise.comm.mesh import PIPE, add_over
from rungwise.comm.pipeline import Pipeline, PipelineResult, gpipe, pipeline_gradient
from rungwise.ladder.family import RunConfig
from rungwise.ladder.training.gradients import (
    BatchFigures,
    Gradient,
    PartFigures,
    Share,
    batch_count,
    batch_figures,
    joined,
    penalty_of,
    stages_of,
    step_key,
)
from rungwise.model.loss import loss_sums, objective_of, token_losses
from rungwise.model.moe import MoeMethod
from rungwise.model.stages import Stages, run_stage
from rungwise.model.transformer import Params, embed_tokens, logits_of

Gather = Callable[[str, Params], Params]
"""As in `training/gradients.py`. All ranks that share a stage work at the same time, so a branch may gather."""


def _as_they_are(_: str, weights: Params) -> Params:
    return weights


def make_pipeline_gradient(config: RunConfig, dtype: Any, *, share: Share, gather: Gather = _as_they_are) -> Gradient:
    """Each device's addend of the gradient of a run's whole batch, with the batch's figures.

    Parameters are one stage's: rows of layers as `Stages` orders them, and all that belongs to no layer. Margins in the
    figures are those of this stage's rows, all other figures those of all layers.

    Args:
        dtype: of matrix products and of what stages pass on.
        share: the part of a batch this device is given, the same on all stages.
        gather: makes weights whole where each rank of a stage holds a slice of them.
    """
    parts, stages = share.microbatches(config), stages_of(config)
    schedule = config.mesh.schedule(parts)

    def gradient(
        params: Any, bias: jax.Array, tokens: jax.Array, weights: jax.Array | None, step: Int[Array, ""]
    ) -> tuple[Any, BatchFigures]:
        count = batch_count(tokens, weights, share)
        split = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (tokens, weights))
        microbatches = (*split, jax.random.split(step_key(config, step, share), parts))
        pipeline = _pipeline(config, dtype, share, gather, bias, count)
        grads, result = pipeline_gradient(pipeline, params, microbatches, axis=PIPE, schedule=schedule)
        return grads, batch_figures(joined(_parts(result, stages)), config, share)

    return gradient


def make_pipeline_eval(
    config: RunConfig, dtype: Any, method: MoeMethod, *, parts: int = 1, gather: Gather = _as_they_are
) -> Callable[..., jax.Array]:
    """Mean loss of each sequence: (one stage's params, bias, tokens [batch, seq + 1]) → [batch], on every stage.

    Args:
        parts: of the batch that go through the stages one after the other.
    """
    stages = stages_of(config)

    def evaluate(params: Any, bias: jax.Array, tokens: jax.Array) -> jax.Array:
        def run(params: Any, x: jax.Array, _: Any, chunk: jax.Array) -> tuple[jax.Array, jax.Array, None]:
            layers, of_layer = params["layers"], partial(gather, "layers.")
            x, _ = run_stage(layers, bias, x, chunk, stages=stages, config=config.model, method=method, gather=of_layer)
            return x, jnp.zeros((), jnp.float32), None

        def leave(params: Any, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, _ = token_losses(logits_of(_last(params, gather), x, config=config.model), tokens[:, 1:])
            return jnp.zeros((), jnp.float32), jnp.mean(losses, axis=-1)

        def enter(params: Any, tokens: jax.Array) -> jax.Array:
            return embed_tokens(_first(params, gather), tokens[:, :-1], config=config.model, dtype=dtype)

        split = tokens.reshape(parts, -1, tokens.shape[-1])
        result = gpipe(Pipeline(enter, run, leave), params, split, axis=PIPE, num_chunks=stages.num_chunks)
        return add_over(result.ending.reshape(-1), (PIPE,))

    return evaluate


def _first(params: Params, gather: Gather) -> Params:
    """What the first stage uses besides its layers."""
    return gather("", {name: leaf for name, leaf in params.items() if name.startswith("embed")})


def _last(params: Params, gather: Gather) -> Params:
    """What the last stage uses besides its layers; a tied head is the embedding."""
    tied = "head" not in params
    return gather("", {name: leaf for name, leaf in params.items() if name != "layers" and (tied or name != "embed")})


def _pipeline(
    config: RunConfig, dtype: Any, share: Share, gather: Gather, bias: jax.Array, count: jax.Array
) -> Pipeline:
    """The model of a training step in stages. A microbatch is (tokens, weights of tokens, key)."""
    model, stages, method = config.model, stages_of(config), share.method(config)
    parts = share.microbatches(config) * share.devices

    def enter(params: Any, microbatch: Any) -> jax.Array:
        return embed_tokens(_first(params, gather), microbatch[0][:, :-1], config=model, dtype=dtype)

    def run(params: Any, x: jax.Array, microbatch: Any, chunk: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        x, figures = run_stage(
            params["layers"],
            bias,
            x,
            chunk,
            stages=stages,
            config=model,
            method=method,
            rematerialize=config.execution.rematerialize,
            key=microbatch[2],
            gather=partial(gather, "layers."),
        )
        penalty = penalty_of(figures, config) / parts
        balance_loss = jnp.sum(figures.balance_loss) / parts
        return x, penalty, (figures.sums, figures.attention_logit_max, figures.margins, penalty, balance_loss)

    def leave(params: Any, x: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
        tokens, weights, _ = microbatch
        sums = loss_sums(logits_of(_last(params, gather), x, config=model), tokens[:, 1:], weights)
        return objective_of(sums, count, z_loss_weight=model.logit_z_loss_weight), sums

    return Pipeline(enter, run, leave)


def _parts(result: PipelineResult, stages: Stages) -> PartFigures:
    """Figures of every microbatch, of all layers but for the margins."""

    def rows(leaf: jax.Array) -> jax.Array:  # [chunks, microbatches, rows of a chunk, …] → [microbatches, rows, …]
        moved = jnp.moveaxis(leaf, 0, 1)
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    sums, attention_logit_max, margins, penalty, balance_loss = result.figures
    layers, highest = stages.gather(jax.tree.map(rows, (sums, attention_logit_max)), dim=1)
    loss, penalty, balance_loss = add_over((result.ending, jnp.sum(penalty, 0), jnp.sum(balance_loss, 0)), (PIPE,))
    return PartFigures(loss, layers, highest, None if margins is None else rows(margins), penalty, balance_loss)
