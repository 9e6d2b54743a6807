"""The training and evaluation steps: pure functions on a plain state tree, ready for `jax.jit`.

Figures leave as records with plain field names; `ladder/tracking.py` gives them their metric names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten
from jaxtyping import Array, Float, Int

from rungwise.ladder.family import ExecutionConfig, RunConfig
from rungwise.ladder.gradients import make_gradient
from rungwise.ladder.optimizer import build_optimizer
from rungwise.ladder.parameter_groups import group_norms
from rungwise.ladder.schedule import Horizon, horizon_of, learning_rate
from rungwise.model.balance import loss_free_bias, quantile_bias, quantile_level
from rungwise.model.config import ModelConfig
from rungwise.model.loss import LossParts, token_losses
from rungwise.model.methods import build_method, dropless_config
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
    bias: Float[Array, "layers experts"], sums: LayerSums, margins: jax.Array | None, config: RunConfig
) -> Float[Array, "layers experts"]:
    """The balancing bias of the next step, from the routes of a whole batch.

    Args:
        margins: [layers, tokens, experts], tokens in batch order; None unless balance is `quantile`.
    """
    model = config.model
    if model.balance == "loss_free_bias":
        return loss_free_bias(bias, sums.expert_load, step=model.balance_step)
    if margins is None:
        return bias
    num_ranks = config.data_replicas * config.transport.num_ranks
    return quantile_bias(jax.vmap(lambda layer: quantile_level(layer, config=model, num_ranks=num_ranks))(margins))


def make_train_step(config: RunConfig) -> TrainStep:
    """One optimizer step: (state, tokens [batch, seq + 1], horizon, weights [batch, seq]) → (state, figures).

    `horizon` is the run's own when absent; given as an argument, one compiled program serves runs that differ in it.
    `weights` are 1 for a counted token and 0 for one that is not; all are counted when absent.
    """
    gradient_of, rule = make_gradient(config, compute_dtype(config.execution)), config.optimizer

    def train_step(
        state: TrainState, tokens: jax.Array, horizon: Horizon | None = None, weights: jax.Array | None = None
    ) -> tuple[TrainState, StepFigures]:
        horizon = horizon or horizon_of(config)
        optimizer = build_optimizer(config, horizon)
        grads, batch = gradient_of(state.params, state.bias, tokens, weights, state.step)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        bias = next_bias(state.bias, batch.sums, batch.margins, config)
        grad_norm, group_grads = group_norms(grads)
        update_norm, group_updates = group_norms(updates)
        param_norm, group_params = group_norms(params)
        nonfinite = sum(jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in jax.tree.leaves(grads))
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
            nonfinite=jnp.asarray(nonfinite),
            counted_tokens=batch.counted_tokens,
        )
        following = TrainState(params, optimizer_state, bias, state.step + 1)
        if weights is not None:
            following = _unless_empty(batch.counted_tokens, following, state)
        return following, figures

    return train_step


def _unless_empty(counted: Float[Array, ""], following: TrainState, state: TrainState) -> TrainState:
    """The state as it was, but for the step number, where no token was counted: there is nothing to learn from."""
    kept = jax.tree.map(lambda new, old: jnp.where(counted > 0, new, old), following, state)
    optimizer = kept.optimizer._replace(step=following.optimizer.step)  # the schedule goes on with the step
    return kept._replace(step=following.step, optimizer=optimizer)


def make_eval_step(config: RunConfig, *, dropping: bool = False) -> Callable[[TrainState, jax.Array], jax.Array]:
    """Mean loss of each sequence: (state, tokens [batch, seq + 1]) → [batch], nats per token. Changes no state.

    Args:
        dropping: through the training transport and its drops instead of dropless on one rank.
    """
    if dropping:
        method = build_method(config.transport, data_replicas=config.data_replicas)
    else:
        method = build_method(_dropless(config.model))
    dtype = compute_dtype(config.execution)

    def eval_step(state: TrainState, tokens: jax.Array) -> jax.Array:
        output = forward(
            state.params, state.bias, tokens[:, :-1], config=config.model, method=method, compute_dtype=dtype
        )
        losses, _ = token_losses(output.logits, tokens[:, 1:])
        return jnp.mean(losses, axis=-1)

    return eval_step


def _dropless(model: ModelConfig) -> Any:
    return dropless_config(model.num_experts, model.top_k)


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
