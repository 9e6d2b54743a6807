"""Optimizer of a run, from its config: which parameter gets which rule, the schedule, and norms by parameter group.

Muon moves matrices (every stacked matrix on its own), AdamW the rest: embedding, head, router, norms.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_flatten_with_path, tree_map_with_path
from optax.contrib import MuonDimensionNumbers

from rungwise.ladder.family import OptimizerConfig, RunConfig

Tree = Any

# Axes of each stacked matrix: what a product sums over, and what it yields. All other axes are a stack of matrices.
MATRIX_AXES: Mapping[tuple[str, ...], MuonDimensionNumbers] = {
    ("attention", "query"): MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    ("attention", "key"): MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    ("attention", "value"): MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    ("attention", "out"): MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3),
    ("moe", "latent_down"): MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    ("moe", "latent_up"): MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    ("experts", "gate_up"): MuonDimensionNumbers(reduction_axis=2, output_axis=4),
    ("experts", "down"): MuonDimensionNumbers(reduction_axis=2, output_axis=3),
    ("shared", "gate_up"): MuonDimensionNumbers(reduction_axis=1, output_axis=3),
    ("shared", "down"): MuonDimensionNumbers(reduction_axis=1, output_axis=2),
}

GROUP_OF: Mapping[str, str] = {
    "embed": "embed",
    "head": "head",
    "router": "router",
    "experts": "experts",
    "latent_down": "experts",
    "latent_up": "experts",
    "shared": "shared",
    "attention": "attention",
}


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path if isinstance(key, DictKey))


def parameter_group(path: tuple[Any, ...]) -> str:
    """Group whose norms a parameter counts in, by its place in the tree."""
    names = _names(path)
    if names[-1].endswith("norm"):
        return "norms"
    return next(GROUP_OF[name] for name in reversed(names) if name in GROUP_OF)


def matrix_axes(params: Tree) -> Tree:
    """Muon's dimension numbers for every parameter, None for one that AdamW moves."""
    return tree_map_with_path(lambda path, _: MATRIX_AXES.get(_names(path)[-2:]), params)


def learning_rate_schedule(config: RunConfig) -> optax.Schedule:
    """Linear warm-up from peak/warm-up steps, then linear decay that reaches the final fraction at the last step."""
    optimizer, peak = config.optimizer, config.learning_rate
    warmup = max(1, round(optimizer.warmup_fraction * config.steps))
    decay = max(1, config.steps - 1 - warmup)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)),
            optax.linear_schedule(peak, optimizer.final_fraction * peak, decay),
        ],
        boundaries=[warmup],
    )


def build_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """The whole update rule; with Muon, `learning_rate` is the matrices' and AdamW's is that over `matrix_ratio`."""
    rule, schedule = config.optimizer, learning_rate_schedule(config)
    update = _adamw(rule, schedule) if rule.name == "adamw" else _muon(rule, schedule)
    if rule.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(rule.clip_norm), update)


def _adamw(rule: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    def decayed(params: Tree) -> Tree:
        return jax.tree.map(lambda axes: axes is not None, matrix_axes(params), is_leaf=_is_axes)

    return optax.adamw(
        schedule,
        b1=rule.beta1,
        b2=rule.beta2,
        eps=rule.epsilon,
        eps_root=0.0,
        weight_decay=rule.weight_decay,
        mask=decayed,
        nesterov=False,
    )


def _muon(rule: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.contrib.muon(
        schedule,
        ns_steps=rule.newton_schulz_steps,
        beta=rule.momentum,
        eps=rule.epsilon,
        weight_decay=rule.weight_decay,
        nesterov=True,
        adaptive=False,
        preconditioning="frobenius",
        adam_b1=rule.beta1,
        adam_b2=rule.beta2,
        adam_eps_root=0.0,
        adam_weight_decay=0.0,
        adam_learning_rate=lambda step: schedule(step) / rule.matrix_ratio,
        muon_weight_dimension_numbers=matrix_axes,
        consistent_rms=None,
    )


def _is_axes(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def group_norms(tree: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Euclidean norm of a whole tree shaped like the parameters, and of each parameter group."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        group = parameter_group(path)
        squares[group] = squares.get(group, jnp.zeros((), jnp.float32)) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    total = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
    return total, {group: jnp.sqrt(square) for group, square in squares.items()}
