"""The learning rate of a run whose length changes, on the host and inside a compiled step."""

import jax
import numpy as np
import pytest

from rungwise.ladder.family import load_family
from rungwise.ladder.training.decay import Decay
from rungwise.ladder.training.schedule import Horizon, annealed, horizon_of, learning_rate

HERO = load_family("tiny").hero_run
RULE = HERO.optimizer
OWN = Decay.of(RULE, HERO.steps)


def _rates(horizon: Horizon, steps: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(lambda at, where: learning_rate(at, where, RULE), (0, None)))(steps, horizon))


def test_a_runs_own_decay_is_bit_for_bit_the_schedule_without_one():
    at = np.arange(HERO.steps)
    plain = Horizon(np.float32(HERO.learning_rate), np.int32(HERO.steps))
    np.testing.assert_array_equal(_rates(horizon_of(HERO), at), _rates(plain, at))


def test_host_and_compiled_rates_are_one_schedule():
    at = np.arange(0, 740, 7)
    for decay in (OWN, OWN.redirected(247, 740), OWN.redirected(30, 200), OWN.redirected(247, 2000)):
        expected = [HERO.learning_rate * decay.at(int(step)) for step in at]
        np.testing.assert_allclose(_rates(horizon_of(HERO, decay), at), expected, rtol=2e-6)


@pytest.mark.parametrize(("done", "steps"), [(247, 740), (62, 400), (247, 2000), (1, 300), (1233, 1300)])
def test_a_changed_length_makes_no_jump_and_ends_at_the_final_fraction(done: int, steps: int):
    later = OWN.redirected(done, steps)
    assert later.at(done - 1) == pytest.approx(OWN.at(done - 1), abs=1e-12)
    slope = max(1 / OWN.warmup, 1 / max(1, steps - 1 - later.start))
    assert abs(later.at(done) - OWN.at(done - 1)) <= slope
    assert later.at(steps - 1) == pytest.approx(RULE.final_fraction)
    assert all(later.at(step) >= later.at(step + 1) for step in range(max(done, OWN.warmup), steps - 1))


def test_a_second_change_starts_from_the_first():
    first = OWN.redirected(247, 740)
    second = first.redirected(400, 1500)
    assert second.at(399) == pytest.approx(first.at(399), abs=1e-12)
    assert second.at(1499) == pytest.approx(RULE.final_fraction)


def test_a_length_behind_the_run_is_refused():
    with pytest.raises(ValueError, match="steps 247 are not more than the 247"):
        OWN.redirected(247, 247)
    with pytest.raises(ValueError, match="steps 62 are not more than the 62"):
        OWN.redirected(10, 62)


def test_position_is_counted_once_after_a_resume():
    """A resumed run's rate is that of the uninterrupted one at the same step; counted twice it would be far ahead."""
    horizon = horizon_of(HERO)
    whole = _rates(horizon, np.arange(HERO.steps))
    for resumed_at in (35, 300, 1200):
        after = _rates(horizon, np.arange(resumed_at, min(HERO.steps, resumed_at + 5)))
        np.testing.assert_array_equal(after, whole[resumed_at : resumed_at + 5])
        assert not np.any(after == whole[min(2 * resumed_at, HERO.steps - 1)])


def test_an_annealed_weight_decay_makes_no_jump_either():
    later = OWN.redirected(247, 740)
    assert later.anneal_at(246) == pytest.approx(OWN.anneal_at(246))
    assert later.anneal_at(740) == 0.0
    at = np.array([246, 300, 700, 740])
    found = [float(annealed(step, horizon_of(HERO, later))) for step in at]
    np.testing.assert_allclose(found, [later.anneal_at(int(step)) for step in at], rtol=1e-5, atol=1e-6)


def test_one_compiled_program_serves_a_changed_length():
    traced = []

    @jax.jit
    def program(step: jax.Array, horizon: Horizon) -> jax.Array:
        traced.append(1)
        return learning_rate(step, horizon, RULE)

    for decay in (None, OWN.redirected(247, 740), OWN.redirected(300, 2000)):
        program(np.int32(500), horizon_of(HERO, decay))
    assert len(traced) == 1
