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

from rungwise.ladder.family import RunConfig
from rungwise.ladder.optimizer import build_optimizer, group_norms, learning_rate_schedule
from rungwise.model.loss import LossParts, language_model_loss, token_losses
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.moe import LayerStats
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


TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepFigures]]


def init_state(config: RunConfig) -> TrainState:
    """State before the first step, a pure function of the config and its seed."""
    params = init_params(config.model, config.seed)
    return TrainState(params, build_optimizer(config).init(params), init_bias(config.model), jnp.zeros((), jnp.int32))


def make_train_step(config: RunConfig) -> TrainStep:
    """One optimizer step: (state, tokens [batch, seq + 1]) → (state, figures)."""
    optimizer, schedule = build_optimizer(config), learning_rate_schedule(config)
    method = build_method(config.transport, data_replicas=config.data_replicas)

    def objective(params: Any, bias: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
        output = forward(params, bias, tokens[:, :-1], config=config.model, method=method)
        parts = language_model_loss(output.logits, tokens[:, 1:], z_loss_weight=config.model.logit_z_loss_weight)
        return parts.objective, (parts, output.stats, output.next_bias)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepFigures]:
        gradient_of = jax.value_and_grad(objective, has_aux=True)
        (_, (parts, stats, next_bias)), grads = gradient_of(state.params, state.bias, tokens)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        grad_norm, group_grads = group_norms(grads)
        update_norm, group_updates = group_norms(updates)
        param_norm, group_params = group_norms(params)
        nonfinite = sum(jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in jax.tree.leaves(grads))
        figures = StepFigures(
            loss=parts,
            layers=stats,
            grad_norm=grad_norm,
            group_grad_norms=group_grads,
            update_norm=update_norm,
            group_update_norms=group_updates,
            param_norm=param_norm,
            group_param_norms=group_params,
            learning_rate=jnp.asarray(schedule(state.step)),
            nonfinite=jnp.asarray(nonfinite),
        )
        return TrainState(params, optimizer_state, next_bias, state.step + 1), figures

    return train_step


def make_eval_step(config: RunConfig, *, dropping: bool = False) -> Callable[[TrainState, jax.Array], jax.Array]:
    """Mean loss of each sequence: (state, tokens [batch, seq + 1]) → [batch], nats per token. Changes no state.

    Args:
        dropping: through the training transport and its drops instead of dropless on one rank.
    """
    if dropping:
        method = build_method(config.transport, data_replicas=config.data_replicas)
    else:
        method = build_method(dropless_config(config.model.num_experts, config.model.top_k))

    def eval_step(state: TrainState, tokens: jax.Array) -> jax.Array:
        output = forward(state.params, state.bias, tokens[:, :-1], config=config.model, method=method)
        losses, _ = token_losses(output.logits, tokens[:, 1:])
        return jnp.mean(losses, axis=-1)

    return eval_step


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
