"""Intervals of a new run: published values, and coverage on planted ladders."""

import numpy as np
import pytest

from rungwise.analysis.fitting.intervals import RungMeans, profile_floors
from rungwise.analysis.fitting.laws import PowerLaw

OWN = RungMeans(log_flops=np.log([1e18, 1e19, 1e20, 1e21]), loss=np.array([3.52, 3.15, 2.852, 2.596]))
TARGET = float(np.log(1e23))


def test_interval_with_a_pinned_floor_is_student_t():
    profile = profile_floors(OWN, TARGET, floor=1.6)
    interval = [profile.quantile(probability) for probability in (0.05, 0.5, 0.95)]
    np.testing.assert_allclose(interval, [2.226002, 2.246585, 2.267845], atol=2e-6)


def test_interval_reports_the_floors_the_rungs_allow():
    profile = profile_floors(OWN, TARGET)
    within = profile.floors_within(0.003)
    assert within is not None
    np.testing.assert_allclose(within, [1.2546, 1.4814], atol=2e-3)
    np.testing.assert_allclose(np.interp(within, profile.floors, profile.points), [2.200808, 2.229055], atol=3e-4)


def test_interval_with_a_free_floor_is_wider_and_spans_the_pinned_forecasts():
    free, pinned = profile_floors(OWN, TARGET), profile_floors(OWN, TARGET, floor=1.377)
    low, high = free.quantile(0.05), free.quantile(0.95)
    assert high - low > pinned.quantile(0.95) - pinned.quantile(0.05)
    assert low < 2.2008
    assert high > 2.2291


def test_interval_quantiles_are_ordered_and_invert():
    profile = profile_floors(OWN, TARGET)
    quantiles = [profile.quantile(probability) for probability in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)]
    assert np.all(np.diff(quantiles) > 0)
    assert profile.weights.sum() == pytest.approx(1.0)


def test_interval_of_a_measured_ladder_holds_its_outcome():
    """Marin's v16 optima below 3e20 FLOPs; the 1e23 run reached 2.234 (cases: FIT-02)."""
    flops, loss = [1e18, 3e18, 1e19, 3e19, 1e20, 3e20], [3.522, 3.339, 3.154, 3.0, 2.848, 2.725]
    profile = profile_floors(RungMeans(log_flops=np.log(flops), loss=np.array(loss)), TARGET)
    assert profile.quantile(0.05) < 2.234 < profile.quantile(0.95)
    assert profile.quantile(0.5) == pytest.approx(2.234, rel=0.005)


def test_interval_shrinks_with_quiet_repeats():
    noisy = RungMeans(log_flops=OWN.log_flops, loss=OWN.loss)
    quiet = RungMeans(log_flops=OWN.log_flops, loss=OWN.loss, repeat_squares=4e-6, repeat_degrees=4)
    widths = [
        profile.quantile(0.95) - profile.quantile(0.05)
        for profile in (profile_floors(noisy, TARGET), profile_floors(quiet, TARGET))
    ]
    assert widths[1] < widths[0]


def planted_case(rng: np.random.Generator) -> tuple[RungMeans, float, float, float]:
    """Rungs, log target, a new run's loss there, and the planted floor; losses in units of the lowest one."""
    span, beyond = rng.choice([16.0, 32.0, 64.0]), rng.uniform(4.0, 10.0)
    floor, exponent = rng.uniform(0.1, 0.8), np.exp(rng.uniform(np.log(0.06), np.log(0.35)))
    noise = np.exp(rng.uniform(np.log(0.0005), np.log(0.004)))
    law = PowerLaw(floor, (1 - floor) * span**exponent, exponent)
    flops = np.geomspace(1.0, span, 4)
    repeats = law.value(1.0) * np.exp(noise * rng.standard_normal(3))
    loss = np.append(repeats.mean(), law.value(flops[1:]) * np.exp(noise * rng.standard_normal(3)))
    squares = float(np.sum((np.log(repeats) - np.log(repeats).mean()) ** 2))
    rungs = RungMeans(log_flops=np.log(flops), loss=loss, repeat_squares=squares, repeat_degrees=2)
    new_run = float(law.value(span * beyond) * np.exp(noise * rng.standard_normal()))
    return rungs, float(np.log(span * beyond)), new_run, floor


def test_interval_covers_new_runs_of_planted_ladders():
    """Nominal 90 %: at least 85 %, at most four times as wide as an interval that knows the floor."""
    rng = np.random.default_rng(2026)
    covered, widths, ratios = [], [], []
    for _ in range(250):
        rungs, target, new_run, floor = planted_case(rng)
        free = profile_floors(rungs, target)
        known = profile_floors(rungs, target, floor=min(floor, 0.98 * float(rungs.loss.min())))
        low, high = free.quantile(0.05), free.quantile(0.95)
        covered.append(low <= new_run <= high)
        widths.append(0.5 * (high - low) / new_run)
        ratios.append((high - low) / (known.quantile(0.95) - known.quantile(0.05)))
    assert np.mean(covered) >= 0.85
    assert np.median(widths) < 0.02
    assert np.median(ratios) < 4.0


def test_interval_that_ignores_the_floor_under_covers():
    """The negative control: pin a wrong floor and nominal 90 % fails."""
    rng = np.random.default_rng(2026)
    covered = []
    for _ in range(150):
        rungs, target, new_run, _ = planted_case(rng)
        profile = profile_floors(rungs, target, floor=0.0)
        covered.append(profile.quantile(0.05) <= new_run <= profile.quantile(0.95))
    assert np.mean(covered) < 0.85


def test_interval_refuses_two_rungs_and_a_floor_above_the_rungs():
    with pytest.raises(ValueError, match="at least 3"):
        profile_floors(RungMeans(log_flops=OWN.log_flops[:2], loss=OWN.loss[:2]), TARGET)
    with pytest.raises(ValueError, match="below the lowest loss"):
        profile_floors(OWN, TARGET, floor=2.6)
