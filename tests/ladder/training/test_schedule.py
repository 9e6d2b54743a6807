import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rungwise.ladder.family import load_family
from rungwise.ladder.training.schedule import Horizon, horizon_of, learning_rate, warmup_steps

RUN = load_family("tiny").rung_runs[0]
RULE = RUN.optimizer


def _joined(peak: float, steps: int, *, warmup: int, final_fraction: float) -> optax.Schedule:
    """The same schedule from Optax's parts."""
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    fall = optax.linear_schedule(peak, final_fraction * peak, max(1, steps - 1 - warmup))
    return optax.join_schedules([rise, fall], boundaries=[warmup])


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.0123, 0.25, 0.9, 0.9999])
def test_learning_rate_equals_joined_linear_schedules(fraction: float):
    rule, peak = RULE.replace(warmup_fraction=fraction), 0.0123
    rates = jax.jit(jax.vmap(lambda step, steps: learning_rate(step, Horizon(peak, steps), rule), in_axes=(0, None)))
    at = np.arange(60)
    for steps in (1, 2, 3, 4, 5, 7, 10, 30, 50, 390_251):
        asked = at if steps < 60 else np.linspace(0, steps - 1, 60).astype(np.int32)
        joined = _joined(peak, steps, warmup=max(1, round(fraction * steps)), final_fraction=rule.final_fraction)
        np.testing.assert_allclose(rates(asked, steps), jax.vmap(joined)(asked), rtol=0, atol=2e-7 * peak)


def test_learning_rate_of_the_slowest_steps_keeps_its_digits():
    """peak · (1 + step) / w, relative to itself: on a long warm-up the joined form is off by up to 2% at first."""
    rule, steps, peak = RULE.replace(warmup_fraction=0.01), 390_251, 0.003291
    for step in (0, 1, 10, 3902):
        rate = float(learning_rate(step, Horizon(peak, steps), rule))
        assert rate == pytest.approx(peak * (1 + step) / 3903, rel=3e-7)
    assert float(learning_rate(steps - 1, Horizon(peak, steps), rule)) == pytest.approx(0.05 * peak, rel=1e-6)
    assert float(learning_rate(steps + 9, Horizon(peak, steps), rule)) == pytest.approx(0.05 * peak, rel=1e-6)


def test_learning_rate_warms_up_then_decays_to_the_final_fraction():
    rates = np.asarray([learning_rate(step, horizon_of(RUN), RULE) for step in range(RUN.steps)])
    warmup = round(RULE.warmup_fraction * RUN.steps)
    assert rates[0] == pytest.approx(RUN.learning_rate / warmup)
    assert rates[warmup - 1] == rates[warmup] == rates.max() == pytest.approx(RUN.learning_rate)
    assert rates[-1] == pytest.approx(RULE.final_fraction * RUN.learning_rate)
    assert np.all(np.diff(rates[warmup:]) < 0)


@pytest.mark.parametrize(
    ("fraction", "steps", "expected"),
    [
        (0.05, 50, 2),  # 2.5, a tie, to the even number
        (0.05, 70, 4),  # 3.5
        (0.05, 71, 4),
        (0.0, 100, 1),
        (0.01, 390_251, 3903),
        (0.3333, 2_000_000_000, 666_600_000),
    ],
)
def test_warmup_steps_round_exactly(fraction: float, steps: int, expected: int):
    assert int(warmup_steps(steps, RULE.replace(warmup_fraction=fraction))) == expected


def test_one_compiled_program_serves_every_peak_and_length():
    traced = []

    @jax.jit
    def program(step: jax.Array, horizon: Horizon) -> jax.Array:
        traced.append(1)
        return learning_rate(step, horizon, RULE)

    rates = [
        float(program(jnp.int32(3), Horizon(jnp.float32(peak), jnp.int32(steps))))
        for peak, steps in ((0.01, 200), (0.02, 200), (0.01, 4000))
    ]
    assert rates == pytest.approx([0.01 * 4 / 10, 0.02 * 4 / 10, 0.01 * 4 / 200])
    assert len(traced) == 1
