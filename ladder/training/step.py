"""The training and evaluation steps: pure functions on a plain state tree, ready for `jax.jit`.

Figures leave as records with plain field names; `recording/tracking.py` gives them their metric names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten
from jaxtyping import Array, Bool, Float, Int

from rungwise.ladder.family import ExecutionConfig, RunConfig
from rungwise.ladder.training.gradients import WHOLE, Gradient, Share, make_gradient, stages_of
from rungwise.ladder.training.layout import EVERYTHING, Layout
from rungwise.ladder.training.optimizer import build_optimizer
from rungwise.ladder.training.parameter_groups import added_by_group, group_norms
from rungwise.ladder.training.schedule import Horizon, horizon_of, learning_rate
from rungwise.model.balance import loss_free_bias, quantile_bias, quantile_level
from rungwise.model.loss import LossParts, token_losses
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.moe import MoeMethod
from rungwise.model.stats import LayerStats, LayerSums, layer_stats
from rungwise.model.transformer import forward, init_bias, init_params


class TrainState(NamedTuple):
    """Everything a run needs to go on: what a checkpoint holds."""

    params: Any
    optimizer: Any
    bias: Float[Array, "layers experts"]
    step: Int[Array, ""]
    """Optimizer steps done."""


class StepFigures(NamedTuple):
    """What one training step reports."""

    loss: LossParts
    layers: LayerStats
    grad_norm: Float[Array, ""]
    group_grad_norms: dict[str, Float[Array, ""]]
    update_norm: Float[Array, ""]
    group_update_norms: dict[str, Float[Array, ""]]
    param_norm: Float[Array, ""]
    group_param_norms: dict[str, Float[Array, ""]]
    learning_rate: Float[Array, ""]
    nonfinite: Int[Array, ""]
    counted_tokens: Float[Array, ""]
    """Where it is 0 the loss is NaN and parameters, optimizer and bias stay as they were."""
    skipped: Int[Array, ""] | None = None
    """1 where the update was left out; None where none ever is."""
    clipped_values: Float[Array, ""] | None = None
    """Values of rows that MXFP8 could not hold, forward, all layers; None where no row is in MXFP8."""


TrainStep = Callable[..., tuple[TrainState, StepFigures]]


def compute_dtype(execution: ExecutionConfig) -> Any:
    """Type of matrix products on this process's devices."""
    if execution.compute_dtype == "by_device":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(execution.compute_dtype)


def init_state(config: RunConfig) -> TrainState:
    """State before the first step, a pure function of the config and its seed."""
    dtype = jnp.dtype(config.execution.param_dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(config.model, config.seed))
    return TrainState(params, build_optimizer(config).init(params), init_bias(config.model), jnp.zeros((), jnp.int32))


def next_bias(
    bias: Float[Array, "layers experts"],
    sums: LayerSums,
    margins: jax.Array | None,
    config: RunConfig,
    share: Share = WHOLE,
) -> Float[Array, "layers experts"]:
    """The balancing bias of the next step, from the routes of a whole batch.

    Args:
        sums: of the whole batch.
        margins: [layers, tokens, experts], this share's tokens in batch order, of all layers or of those of this
            stage's rows of a pipeline; None unless balance is `quantile`.
    """
    model = config.model
    if model.balance == "loss_free_bias":
        return loss_free_bias(bias, sums.expert_load, step=model.balance_step)
    if margins is None:
        return bias
    num_ranks = config.data_replicas * config.transport.num_ranks // share.devices

    def level(layer: jax.Array) -> jax.Array:
        return quantile_level(layer, config=model, num_ranks=num_ranks, axes=share.axes)

    levels = jax.vmap(level)(margins)
    if share.pipe > 1:
        levels = stages_of(config).gather(levels)
    return quantile_bias(levels)


def make_train_step(
    config: RunConfig, *, share: Share = WHOLE, layout: Layout = EVERYTHING, gradient: Gradient | None = None
) -> TrainStep:
    """One optimizer step: (state, tokens [batch, seq + 1], horizon, weights [batch, seq]) → (state, figures).

    `horizon` is the run's own when absent; given as an argument, one compiled program serves runs that differ in it.
    `weights` are 1 for a counted token and 0 for one that is not; all are counted when absent.

    Args:
        share: the part of a batch this code is given, where it runs on a device of a mesh.
        layout: what of the parameters and of the optimizer's state lies here.
        gradient: else that of `gradients.py`.
    """
    if gradient is None:
        gradient = make_gradient(config, compute_dtype(config.execution), share=share, gather=layout.gather_weights)
    gradient_of, rule = gradient, config.optimizer

    def train_step(
        state: TrainState, tokens: jax.Array, horizon: Horizon | None = None, weights: jax.Array | None = None
    ) -> tuple[TrainState, StepFigures]:
        horizon = horizon or horizon_of(config)
        optimizer = build_optimizer(config, horizon, spread=layout.spread)
        grads, batch = gradient_of(state.params, state.bias, tokens, weights, state.step)
        grads, parts = layout.reduce(grads), layout.own(state.params)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, parts)
        parts = optax.apply_updates(parts, updates)
        bias = next_bias(state.bias, batch.sums, batch.margins, config, share)
        grad_norm, group_grads = group_norms(grads, layout.spread)
        update_norm, group_updates = group_norms(updates, layout.spread)
        param_norm, group_params = group_norms(parts, layout.spread)
        nonfinite = (
            (path, jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32)) for path, leaf in tree_flatten_with_path(grads)[0]
        )
        figures = StepFigures(
            loss=batch.loss,
            layers=layer_stats(batch.sums, bias=state.bias, attention_logit_max=batch.attention_logit_max),
            grad_norm=grad_norm,
            group_grad_norms=group_grads,
            update_norm=update_norm,
            group_update_norms=group_updates,
            param_norm=param_norm,
            group_param_norms=group_params,
            learning_rate=learning_rate(state.step, horizon, rule),
            nonfinite=jnp.asarray(sum(added_by_group(nonfinite, layout.spread).values())),
            counted_tokens=batch.counted_tokens,
            clipped_values=jax.tree.map(jnp.sum, batch.sums.clipped_values),
        )
        following = TrainState(layout.gather(parts), optimizer_state, bias, state.step + 1)
        if weights is not None:  # nothing to learn from where no token was counted
            following = _where(batch.counted_tokens > 0, following, state)
        if horizon.limits is not None:
            sound = (batch.loss.loss <= horizon.limits.loss) & (grad_norm <= horizon.limits.grad_norm)  # NaN is neither
            sound &= jnp.isfinite(batch.loss.loss) & (figures.nonfinite == 0)
            following = _where(sound, following, state)
            figures = figures._replace(skipped=(~sound).astype(jnp.int32))
        return following, figures

    return train_step


def _where(applied: Bool[Array, ""], following: TrainState, state: TrainState) -> TrainState:
    """The state after the step, or the state as it was but for the step number."""
    kept = jax.tree.map(lambda new, old: jnp.where(applied, new, old), following, state)
    optimizer = kept.optimizer._replace(step=following.optimizer.step)  # the schedule goes on with the step
    return kept._replace(step=following.step, optimizer=optimizer)


def make_eval_step(
    config: RunConfig, *, dropping: bool = False, share: Share = WHOLE, layout: Layout = EVERYTHING
) -> Callable[[TrainState, jax.Array], jax.Array]:
    """Mean loss of each sequence: (state, tokens [batch, seq + 1]) → [batch], nats per token. Changes no state.

    Args:
        dropping: through the training transport and its drops instead of dropless, on as few ranks as there are; in the
            microbatches of the training step, so that it needs no more memory.
    """
    if dropping:
        method, parts = share.method(config), share.microbatches(config)
    else:
        dropless = dropless_config(config.model.num_experts, config.model.top_k, num_ranks=share.expert)
        products = config.execution.expert_matmul
        method = build_method(dropless, axes=share.axes, expert_devices=share.expert, expert_matmul=products)
        parts = 1
    dtype = compute_dtype(config.execution)
    if share.pipe > 1:
        return _pipeline_eval_step(config, dtype, method, parts, layout)

    def eval_step(state: TrainState, tokens: jax.Array) -> jax.Array:
        output = forward(
            layout.gather_weights("", state.params),
            state.bias,
            tokens[:, :-1],
            config=config.model,
            method=method,
            compute_dtype=dtype,
            gather=partial(layout.gather_weights, "layers."),
        )
        losses, _ = token_losses(output.logits, tokens[:, 1:])
        return jnp.mean(losses, axis=-1)

    def in_turn(state: TrainState, tokens: jax.Array) -> jax.Array:
        split = tokens.reshape(parts, -1, tokens.shape[-1])
        return jax.lax.map(partial(eval_step, state), split).reshape(-1)

    return eval_step if parts == 1 else in_turn


def _pipeline_eval_step(
    config: RunConfig, dtype: Any, method: MoeMethod, parts: int, layout: Layout
) -> Callable[[TrainState, jax.Array], jax.Array]:
    from rungwise.ladder.mesh.pipeline_step import make_pipeline_eval  # which imports no less than this file

    evaluate = make_pipeline_eval(config, dtype, method, parts=parts, gather=layout.gather_weights)
    return lambda state, tokens: evaluate(state.params, state.bias, tokens)


def state_to_tree(state: TrainState) -> dict[str, Any]:
    """The state as plain dicts of arrays: what a checkpoint stores, free of any library's own classes."""
    leaves, _ = tree_flatten_with_path(state.optimizer)
    return {
        "params": state.params,
        "optimizer": {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves},
        "bias": state.bias,
        "step": state.step,
    }


def tree_to_state(tree: dict[str, Any], like: TrainState) -> TrainState:
    """Inverse of `state_to_tree`, for a state of the same run."""
    leaves, _ = tree_flatten_with_path(like.optimizer)
    optimizer = [tree["optimizer"][keystr(path, simple=True, separator=".")] for path, _ in leaves]
    return TrainState(
        tree["params"], tree_unflatten(tree_structure(like.optimizer), optimizer), tree["bias"], tree["step"]
    )
