"""Optimizer of a run: which parameter gets which rule, its rate, its decay.

AdamW moves everything by Adam. Muon moves matrices, every stacked matrix on its own, and Adam the rest: embedding,
head, router, gains, attention gates, short convolutions. MuonH is Muon on the hyperball, with the head on the hyperball
too, by Adam.
`schedule.py` has the learning rate, `parameter_groups.py` the names, `hyperball.py` the step.
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_flatten_with_path, tree_map_with_path
from jaxtyping import Array, Float, Int

from rungwise.ladder.family import RunConfig
from rungwise.ladder.training.hyperball import hyperball_update
from rungwise.ladder.training.optimizer_config import OptimizerConfig
from rungwise.ladder.training.parameter_groups import (
    MATRIX_AXES,
    PARAMETERS,
    Spread,
    Tree,
    added_by_group,
    fans,
    frobenius_axes,
    matrix_axes,
    parameter_name,
    whole,
)
from rungwise.ladder.training.schedule import Horizon, annealed, horizon_of, learning_rate

Rule = Literal["adam", "muon", "muonh", "adamh"]

NEWTON_SCHULZ: Mapping[str, Any] = {
    "standard": (3.4445, -4.7750, 2.0315),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""(a, b, c) of X ← aX + (bA + cA²)X with A = XXᵀ. Sources: Jordan et al. 2024 (Muon) for the one polynomial of every
step; NVIDIA-NeMo/Emerging-Optimizers, "quintic", for the five, which the reference run used."""

ORTHOGONALISATION_EPSILON = 1e-8
"""Added to the norm of a momentum before it is orthogonalised (reference: the same)."""


class OptimizerState(NamedTuple):
    """What an update needs besides parameters and gradient. None of it depends on the horizon."""

    step: Int[Array, ""]
    """Updates done."""
    directions: Any
    """Momenta of Muon and moments of Adam."""


def update_rule(name: str, optimizer: str) -> Rule:
    """The rule that moves a parameter of this name."""
    if optimizer == "muonh" and name == "head":
        return "adamh"
    if name in MATRIX_AXES and optimizer in ("muon", "muonh"):
        return "muon" if optimizer == "muon" else "muonh"
    return "adam"


def build_optimizer(
    config: RunConfig, horizon: Horizon | None = None, *, spread: Spread = whole
) -> optax.GradientTransformation:
    """The whole update rule: clip, direction, decay, rate. Computed in float32, kept in the parameters' own type.

    On a mesh each rank updates parts of parameters: any elements of what Adam moves, whole matrices of the rest.

    Args:
        horizon: peak and steps to use instead of the run's own; may be traced. The state is the same for all.
        spread: over which ranks the parts of a parameter lie.
    """
    rule = config.optimizer
    horizon = horizon_of(config) if horizon is None else horizon
    directions = _directions(rule, spread)

    def init(params: Tree) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), directions.init(params))

    def update(grads: Tree, state: OptimizerState, params: Tree | None = None) -> tuple[Tree, OptimizerState]:
        if params is None:
            raise ValueError("params None: the update needs the parameters; pass them as the third argument")
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), grads)
        wanted, inner = directions.update(wide, state.directions, params)
        inner = jax.tree.map(lambda new, old: new.astype(old.dtype), inner, state.directions)
        rate, decays = learning_rate(state.step, horizon, rule), _group_decays(state.step, horizon, rule)

        def move(path: tuple[Any, ...], direction: jax.Array, param: jax.Array) -> jax.Array:
            name = parameter_name(path)
            return _move(name, direction, param, rule=rule, rate=rate, decays=decays, spread=spread)

        return tree_map_with_path(move, wanted, params), OptimizerState(state.step + 1, inner)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _directions(rule: OptimizerConfig, spread: Spread) -> optax.GradientTransformation:
    """Gradient → direction, before any rate: bias-corrected Adam, or orthogonalised Nesterov momentum for matrices.

    Beside Muon, Adam's momentum is Nesterov's too, as in Optax's own Muon, with which `tiny` and `laptop` were swept.
    """
    adam = optax.scale_by_adam(
        b1=rule.beta1, b2=rule.beta2, eps=rule.epsilon, eps_root=0.0, nesterov=rule.name == "muon"
    )
    muon = optax.contrib.scale_by_muon(
        ns_coeffs=NEWTON_SCHULZ[rule.newton_schulz],
        ns_steps=rule.newton_schulz_steps,
        beta=rule.momentum,
        eps=ORTHOGONALISATION_EPSILON,
        nesterov=True,
        adaptive=False,
        preconditioning="frobenius",
        weight_dimension_numbers=matrix_axes,
    )

    def labels(params: Tree) -> Tree:
        def label(path: tuple[Any, ...], _: jax.Array) -> str:
            return "muon" if update_rule(parameter_name(path), rule.name).startswith("muon") else "adam"

        return tree_map_with_path(label, params)

    transforms: dict[Hashable, optax.GradientTransformation] = {"adam": adam}
    if rule.name != "adamw":
        transforms["muon"] = muon
    directions = optax.partition(transforms, labels)
    return directions if rule.clip_norm is None else optax.chain(_clip(rule.clip_norm, spread), directions)


def _clip(most: float, spread: Spread) -> optax.GradientTransformation:
    """Scales a gradient whose norm is above `most` down to it."""
    if spread is whole:
        return optax.clip_by_global_norm(most)

    def update(grads: Tree, state: Any, _: Tree | None = None) -> tuple[Tree, Any]:
        squares = added_by_group(
            ((path, jnp.sum(jnp.square(leaf))) for path, leaf in tree_flatten_with_path(grads)[0]), spread
        )
        norm = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
        return jax.tree.map(lambda leaf: jnp.where(norm < most, leaf, leaf / norm * most), grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def _group_decays(step: Int[Array, ""], horizon: Horizon, rule: OptimizerConfig) -> dict[str, Float[Array, ""]]:
    """Weight decay of each group that has its own, at this step."""
    group_decay = rule.group_decay
    if group_decay is None:
        return {}
    share = jnp.where(step >= group_decay.start_step, 1.0, 0.0)
    if group_decay.anneal:
        share *= annealed(step, horizon)
    return {group: decay * share for group, decay in group_decay.decays}


def _move(
    name: str,
    direction: jax.Array,
    param: jax.Array,
    *,
    rule: OptimizerConfig,
    rate: Float[Array, ""],
    decays: Mapping[str, Float[Array, ""]],
    spread: Spread,
) -> jax.Array:
    """The update of one parameter: a hyperball step, or −rate · (direction + decay · parameter).

    Muon's direction is longer by √max(1, fan_out / fan_in), so that one rate fits every shape.
    """
    moved_by = update_rule(name, rule.name)
    if moved_by == "muonh":
        return hyperball_update(param, direction, rate=rate, axes=frobenius_axes(MATRIX_AXES[name]))
    if moved_by == "adamh":
        return hyperball_update(param, direction, rate=rate, axes=tuple(range(param.ndim)), spread=spread(name))
    if moved_by == "muon":
        fan_in, fan_out = fans(param.shape, MATRIX_AXES[name])
        direction = math.sqrt(max(1, fan_out / fan_in)) * direction
    elif rule.name != "adamw":
        rate = rate / rule.matrix_ratio
    matrix_decay = rule.weight_decay if name in MATRIX_AXES else 0.0
    decay = decays.get(PARAMETERS[name].group, matrix_decay)
    towards = direction if isinstance(decay, float) and decay == 0.0 else direction + decay * param
    return (-rate * towards).astype(param.dtype)
