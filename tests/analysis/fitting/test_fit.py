"""Laws and their fits: planted constants back, honest status."""

import numpy as np
import pytest

from rungwise.analysis.fitting.fit import FitStatus, UnfitForecast, fit_law
from rungwise.analysis.fitting.laws import PowerLaw

FLOPS = np.array([1e18, 1e19, 1e20, 1e21])
OWN_LADDER = np.array([3.52, 3.15, 2.852, 2.596])


def test_law_gradient_matches_differences():
    law = PowerLaw(1.4, 60.0, 0.08)
    for index, name in enumerate(("floor", "amplitude", "exponent")):
        constants = {"floor": 1.4, "amplitude": 60.0, "exponent": 0.08}
        step = 1e-6 * constants[name]
        up = PowerLaw(**{**constants, name: constants[name] + step}).value(FLOPS)
        down = PowerLaw(**{**constants, name: constants[name] - step}).value(FLOPS)
        np.testing.assert_allclose(law.gradient(FLOPS)[:, index], (up - down) / (2 * step), rtol=1e-6)


def test_law_flops_at_inverts_value():
    law = PowerLaw(1.4, 60.0, 0.08)
    assert law.flops_at(float(law.value(3e20))) == pytest.approx(3e20, rel=1e-9)
    assert law.flops_at(1.4) == np.inf


def test_law_compute_factor_is_the_compute_between_two_losses():
    law = PowerLaw(1.4, 60.0, 0.08)
    expected = law.flops_at(2.2) / law.flops_at(2.25)
    assert law.compute_factor(2.2, 0.05) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("floor", [0.4, 1.0, 1.6])
@pytest.mark.parametrize("exponent", [0.05, 0.1, 0.3])
def test_fit_recovers_a_planted_law_from_most_starts(floor: float, exponent: float):
    flops = np.geomspace(1e13, 3.2e14, 4)
    planted = PowerLaw(floor, 1.2 * 1e13**exponent, exponent)
    fit = fit_law(flops, planted.value(flops))
    assert fit.law.floor == pytest.approx(floor, abs=1e-4)
    assert fit.law.exponent == pytest.approx(exponent, rel=1e-4)
    assert fit.num_starts_agreeing >= fit.num_starts // 2


def test_fit_recovers_a_planted_law_with_noise_and_an_outlier():
    rng = np.random.default_rng(0)
    flops = np.geomspace(1e17, 1e22, 40)
    planted = PowerLaw(1.7, 400.0, 0.13)
    loss = planted.value(flops) * np.exp(0.002 * rng.standard_normal(40))
    loss[20] *= 1.15
    robust, squares = fit_law(flops, loss, delta=1e-3), fit_law(flops, loss, delta=1.0)
    target = float(planted.value(1e24))
    assert float(robust.law.value(1e24)) == pytest.approx(target, rel=0.01)
    assert abs(float(robust.law.value(1e24)) - target) < abs(float(squares.law.value(1e24)) - target)


def test_fit_says_that_four_rungs_do_not_identify_the_floor():
    fit = fit_law(FLOPS, OWN_LADDER)
    assert fit.status is FitStatus.WEAK
    assert fit.weakly_identified
    assert (fit.floor_error or 0) > 0.05
    assert fit.degrees_of_freedom == 1


def test_fit_reports_a_floor_on_its_bound():
    straight_in_logs = 30.0 * FLOPS**-0.05
    bent_the_wrong_way = straight_in_logs * np.exp(-0.01 * np.array([1, -1, -1, 1]))
    fit = fit_law(FLOPS, bent_the_wrong_way)
    assert fit.status is FitStatus.AT_BOUND
    assert fit.at_bound == ("floor",)


def test_fit_of_three_rungs_is_marked_exact():
    assert fit_law(FLOPS[:3], OWN_LADDER[:3]).status is FitStatus.EXACT


def test_fit_refuses_two_rungs_and_bad_values():
    with pytest.raises(UnfitForecast, match="2 usable rungs"):
        fit_law(FLOPS[:2], OWN_LADDER[:2])
    with pytest.raises(ValueError, match="finite and positive"):
        fit_law(FLOPS, [3.5, np.nan, 2.8, 2.6])
    with pytest.raises(ValueError, match="below the lowest loss"):
        fit_law(FLOPS, OWN_LADDER, floor=2.7)
    with pytest.raises(ValueError, match="use one of"):
        fit_law(FLOPS, OWN_LADDER, form="cubic")


def test_fit_control_without_a_floor_misses_a_floored_law():
    planted = PowerLaw(1.6, 95.0, 0.094)
    target = float(planted.value(1e24))
    assert float(fit_law(FLOPS, planted.value(FLOPS)).law.value(1e24)) == pytest.approx(target, abs=1e-3)
    assert float(fit_law(FLOPS, planted.value(FLOPS), form="power").law.value(1e24)) < target - 0.05
