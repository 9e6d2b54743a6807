"""Learning rate of each step. Peak, length and decay may be traced: one compiled program serves every run of a sweep,
and a run whose length changes on the way. `decay.py` is the same on the host."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from rungwise.ladder.family import RunConfig
from rungwise.ladder.training.decay import Decay
from rungwise.ladder.training.optimizer_config import OptimizerRule

FRACTION_UNITS = 10_000
"""Warm-up is counted in whole ten-thousandths of a run, so that rounding it needs no float64."""


class Limits(NamedTuple):
    """Above which an update is left out: `actions.py`."""

    loss: Float[ArrayLike, ""]
    grad_norm: Float[ArrayLike, ""]


class Horizon(NamedTuple):
    """What may change between runs of one compiled program, and within one run. None: as a run's own length has it."""

    peak: Float[ArrayLike, ""]
    """Learning rate of the matrices at the end of warm-up."""
    steps: Int[ArrayLike, ""]
    """Optimizer steps of the whole run."""
    warmup: Int[ArrayLike, ""] | None = None
    decay_start: Int[ArrayLike, ""] | None = None
    """Step index at which the rate begins to fall."""
    decay_span: Float[ArrayLike, ""] | None = None
    """By how much of the peak it falls, down to the final fraction."""
    anneal_start: Int[ArrayLike, ""] = 0
    """Step index from which an annealed weight decay goes down, and its share there."""
    anneal: Float[ArrayLike, ""] = 1.0
    limits: Limits | None = None
    """None: every update is applied."""


def horizon_of(config: RunConfig, decay: Decay | None = None) -> Horizon:
    """A run's horizon as arrays: its own, or that of a length changed on the way."""
    rule = config.optimizer
    decay = Decay.of(rule, config.steps) if decay is None else decay
    return Horizon(
        peak=jnp.asarray(config.learning_rate, jnp.float32),
        steps=jnp.asarray(decay.steps, jnp.int32),
        warmup=jnp.asarray(decay.warmup, jnp.int32),
        decay_start=jnp.asarray(decay.start, jnp.int32),
        decay_span=jnp.asarray(decay.rate - rule.final_fraction, jnp.float32),
        anneal_start=jnp.asarray(decay.anneal_start, jnp.int32),
        anneal=jnp.asarray(decay.anneal, jnp.float32),
    )


def warmup_steps(steps: Int[ArrayLike, ""], rule: OptimizerRule) -> Int[Array, ""]:
    """max(1, warmup_fraction · steps), a tie going to the even number, exact for every int32.

    With f ten-thousandths and steps = 10,000·a + b, f·steps / 10,000 = f·a + f·b / 10,000, and f·b stays below 10⁸.
    """
    units = round(rule.warmup_fraction * FRACTION_UNITS)
    whole, rest = jnp.divmod(jnp.asarray(steps, jnp.int32), FRACTION_UNITS)
    quotient, remainder = jnp.divmod(units * rest, FRACTION_UNITS)
    floor = units * whole + quotient
    twice = 2 * remainder
    up = (twice > FRACTION_UNITS) | ((twice == FRACTION_UNITS) & (floor % 2 == 1))
    return jnp.maximum(1, floor + up)


def learning_rate(step: Int[ArrayLike, ""], horizon: Horizon, rule: OptimizerRule) -> Float[Array, ""]:
    """Rate of the step after `step` finished ones: linear warm-up, then linear decay to `final_fraction` of the peak.

    With w warm-up steps out of n: peak · (1 + step) / w while step < w, then
    peak · (final_fraction + span · (1 − (step − start) / (n − 1 − start))). A run's own start is w and its own span
    1 − final_fraction, so that steps w − 1 and w both have the peak and the last one, n − 1, has the final fraction;
    past it the rate stays there. Where a length changed, start is the last step before and span what is left to fall.
    """
    step, steps = jnp.asarray(step, jnp.int32), jnp.asarray(horizon.steps, jnp.int32)
    warmup = warmup_steps(steps, rule) if horizon.warmup is None else jnp.asarray(horizon.warmup, jnp.int32)
    start = warmup if horizon.decay_start is None else jnp.asarray(horizon.decay_start, jnp.int32)
    span = 1 - rule.final_fraction if horizon.decay_span is None else horizon.decay_span
    rising = (1 + step) / warmup
    done = jnp.clip((step - start) / jnp.maximum(1, steps - 1 - start), 0, 1)
    falling = span * (1 - done) + rule.final_fraction
    return jnp.asarray(horizon.peak, jnp.float32) * jnp.where(step < warmup, rising, falling)


def annealed(step: Int[ArrayLike, ""], horizon: Horizon) -> Float[Array, ""]:
    """Share that is left of an annealed weight decay: down in a straight line to nothing after the last step."""
    step, start, steps = (jnp.asarray(count, jnp.int32) for count in (step, horizon.anneal_start, horizon.steps))
    return jnp.asarray(horizon.anneal, jnp.float32) * jnp.clip(1 - (step - start) / (steps - start), 0, 1)
