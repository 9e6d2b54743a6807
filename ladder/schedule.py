"""Learning rate of each step. Peak and length may be traced: one compiled program serves every run of a sweep."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from rungwise.ladder.family import RunConfig
from rungwise.ladder.optimizer_config import OptimizerRule

FRACTION_UNITS = 10_000
"""Warm-up is counted in whole ten-thousandths of a run, so that rounding it needs no float64."""


class Horizon(NamedTuple):
    """What may change between runs of one compiled program."""

    peak: Float[ArrayLike, ""]
    """Learning rate of the matrices at the end of warm-up."""
    steps: Int[ArrayLike, ""]
    """Optimizer steps of the whole run."""


def horizon_of(config: RunConfig) -> Horizon:
    """A run's own horizon, as arrays."""
    return Horizon(jnp.asarray(config.learning_rate, jnp.float32), jnp.asarray(config.steps, jnp.int32))


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
    peak · (1 − (1 − final_fraction) · (step − w) / (n − 1 − w)), so that steps w − 1 and w both have the peak and the
    last one, n − 1, has the final fraction; past it the rate stays there.
    """
    step, steps = jnp.asarray(step, jnp.int32), jnp.asarray(horizon.steps, jnp.int32)
    warmup = warmup_steps(steps, rule)
    rising = (1 + step) / warmup
    done = jnp.clip((step - warmup) / jnp.maximum(1, steps - 1 - warmup), 0, 1)
    falling = (1 - rule.final_fraction) * (1 - done) + rule.final_fraction
    return jnp.asarray(horizon.peak, jnp.float32) * jnp.where(step < warmup, rising, falling)
