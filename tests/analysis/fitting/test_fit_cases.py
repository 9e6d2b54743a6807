"""Complaints of others as small inputs with their right values: FIT-01, 02, 03, 05, 06 and 08."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from rungwise.analysis.fitting.descent import descend
from rungwise.analysis.fitting.fit import fit_law
from rungwise.analysis.fitting.intervals import RungMeans, profile_floors
from rungwise.analysis.fitting.isoflop import fit_isoflop
from rungwise.analysis.fitting.laws import PowerLaw, SurfaceLaw
from rungwise.analysis.fitting.surface_fit import fit_surface, law_at, surface_problem, surface_rows
from rungwise.analysis.forecast import forecast_final

OWN = {1e18: 3.52, 1e19: 3.15, 1e20: 2.852, 1e21: 2.596}
PUBLIC = {1e18: 3.522, 3e18: 3.339, 1e19: 3.154, 3e19: 3.0, 1e20: 2.848, 3e20: 2.725}
NINE = np.array(
    [(1e7, 1e9, 5.761792), (1e7, 1e10, 4.567478), (1e7, 1e11, 3.968902), (1e8, 1e9, 4.856499), (1e8, 1e10, 3.662184),
     (1e8, 1e11, 3.063609), (1e9, 1e9, 4.4427), (1e9, 1e10, 3.248385), (1e9, 1e11, 2.64981)]
)  # fmt: skip
PLANTED = SurfaceLaw(1.7, 400.0, 0.34, 1200.0, 0.30)


def table(points: dict[float, float]) -> pd.DataFrame:
    return pd.DataFrame({"flops": list(points), "loss": list(points.values())})


def test_fit_01_law_and_hero_from_nine_points():
    fit = fit_surface(*NINE.T)
    found = [fit.law.floor, fit.law.size_exponent, fit.law.token_exponent]
    np.testing.assert_allclose(found, [1.7, 0.34, 0.30], atol=1e-3)
    assert float(fit.law.value(1e10, 1e12)) == pytest.approx(2.160669, abs=1e-4)
    assert fit.num_starts_agreeing == fit.num_starts


def test_fit_01_every_far_start_reaches_the_hero():
    """243 starts three to a constant, as public tools place them: with default tolerances one of them arrived."""
    rows = surface_rows(*NINE.T)
    problem = surface_problem(rows, form="chinchilla", delta=1e-3)
    grid = np.meshgrid([0.5, 1.2, 2.0], [-2.0, 0.0, 1.5], [0.1, 0.4, 0.8], [-2.0, 0.0, 1.5], [0.1, 0.4, 0.8])
    starts = np.stack([*(axis.ravel() for axis in grid), np.zeros(243)], axis=1)
    found = descend(problem, starts)
    heroes = np.array([float(law_at(theta, rows, "chinchilla").value(1e10, 1e12)) for theta in found.theta])
    assert np.mean(np.abs(heroes - 2.160669) < 0.005) > 0.9


def test_fit_01_mean_of_huber_with_default_tolerance_stops_early_and_says_success():
    """The fault itself, so that the two tests above are known to test something."""
    params, tokens, loss = NINE.T

    def mean_of_huber(theta: np.ndarray) -> float:
        value = theta[0] + np.exp(theta[1] - theta[2] * np.log(params)) + np.exp(theta[3] - theta[4] * np.log(tokens))
        residual = np.abs(np.log(value) - np.log(loss))
        return float(np.mean(np.where(residual < 1e-3, residual**2 / 2, 1e-3 * (residual - 5e-4))))

    stopped = optimize.minimize(
        mean_of_huber, [1.0, 5.0, 0.5, 5.0, 0.5], method="L-BFGS-B", bounds=[(0, 3)] + [(0, 25), (0, 2)] * 2
    )
    hero = (
        stopped.x[0] + math.exp(stopped.x[1]) * 1e10 ** -stopped.x[2] + math.exp(stopped.x[3]) * 1e12 ** -stopped.x[4]
    )
    assert stopped.success
    assert abs(hero - 2.160669) > 0.05


def test_fit_02_floor_is_not_identified_and_the_forecast_says_what_that_means():
    own = profile_floors(RungMeans(log_flops=np.log(list(OWN)), loss=np.array(list(OWN.values()))), math.log(1e23))
    within = own.floors_within(0.003)
    assert within is not None
    np.testing.assert_allclose(within, [1.2546, 1.4814], atol=2e-3)
    np.testing.assert_allclose(np.interp(within, own.floors, own.points), [2.200808, 2.229055], atol=5e-4)
    public = profile_floors(
        RungMeans(log_flops=np.log(list(PUBLIC)), loss=np.array(list(PUBLIC.values()))), math.log(1e23)
    )
    within = public.floors_within(0.003)
    assert within is not None
    np.testing.assert_allclose(within, [1.1654, 1.6406], atol=3e-3)
    np.testing.assert_allclose(np.interp(within, public.floors, public.points), [2.185843, 2.259521], atol=1e-3)


@pytest.mark.parametrize(
    ("floor", "at_1e21", "at_1e23"), [(1.4, 2.597913, 2.218199), (1.6, 2.605499, 2.251844), (1.8, None, 2.293041)]
)
def test_fit_02_pinned_floors_give_the_public_forecasts(floor: float, at_1e21: float | None, at_1e23: float):
    forecast = forecast_final(table(PUBLIC), {"flops": 1e23}, floor=floor)
    assert forecast.point == pytest.approx(at_1e23, abs=2e-6)
    if at_1e21 is not None:
        law = forecast.laws[0]
        assert float(PowerLaw(law["floor"], law["amplitude"], law["exponent"]).value(1e21)) == pytest.approx(
            at_1e21, abs=2e-6
        )
    if floor == 1.6:
        assert forecast.laws[0]["amplitude"] == pytest.approx(95.253, abs=2e-3)
        assert forecast.laws[0]["exponent"] == pytest.approx(0.094119, abs=2e-6)


def test_fit_02_ratio_is_printed_and_marked_and_the_measured_losses_lie_inside():
    far = forecast_final(table(PUBLIC), {"flops": 1e23})
    assert far.extrapolation_ratio == pytest.approx(333.3, abs=0.1)
    assert any("333x" in warning for warning in far.warnings)
    assert (far.method or {})["evidence_ratio"] == pytest.approx(30.0)
    near = forecast_final(table(PUBLIC), {"flops": 1e21})
    assert not any("beyond 100x" in warning for warning in near.warnings)
    assert (near.low or 9.0) < 2.599 < (near.high or 0.0)
    assert (far.low or 9.0) < 2.2333 < (far.high or 0.0)


def test_fit_02_constants_are_stored_and_not_retyped():
    """A copied 88.32 for 95.18 shifts the forecast by 0.047."""
    law = PowerLaw(1.6, 95.18, 0.094119)
    drifted = PowerLaw(1.6, 88.32, 0.094119)
    assert float(law.value(1e23)) - float(drifted.value(1e23)) == pytest.approx(0.046992, abs=1e-4)
    forecast = forecast_final(table(PUBLIC), {"flops": 1e23}, floor=1.6)
    assert [row["loss"] for row in forecast.used] == list(PUBLIC.values())
    assert forecast.laws[0]["value"] == forecast.point


def test_fit_03_student_t_covers_and_the_normal_does_not():
    """4,000 simulated ladders, noise 0.004 in log(L - E), floor known."""
    x = np.log(list(OWN))
    truth = np.log(0.65) - 0.094 * (x - x.mean())
    rng = np.random.default_rng(0)
    target = math.log(1e23)
    true_hero = math.log(0.65) - 0.094 * (target - x.mean())
    covered_t, covered_z = 0, 0
    for _ in range(4000):
        loss = 1.6 + np.exp(truth + 0.004 * rng.standard_normal(4))
        hero = 1.6 + math.exp(true_hero + 0.004 * rng.standard_normal())
        profile = profile_floors(RungMeans(log_flops=x, loss=loss), target, floor=1.6)
        standard = (math.log(hero - 1.6) - profile.location[0, 0]) / profile.scale[0, 0]
        covered_t += abs(standard) < stats.t.ppf(0.95, profile.degrees[0, 0])
        covered_z += abs(standard) < stats.norm.ppf(0.95)
    assert covered_t / 4000 == pytest.approx(0.8975, abs=0.015)
    assert covered_z / 4000 == pytest.approx(0.746, abs=0.02)


def test_fit_03_interval_is_the_t_one_and_none_without_degrees():
    forecast = forecast_final(table(OWN), {"flops": 1e23}, floor=1.6)
    assert (forecast.low, forecast.point, forecast.high) == pytest.approx((2.226002, 2.246585, 2.267845), abs=2e-6)
    assert forecast.degrees_of_freedom == 2
    three = forecast_final(table(OWN).iloc[:3], {"flops": 1e23})
    assert (three.low, three.high, three.degrees_of_freedom) == (None, None, 0)


def test_fit_05_tokens_come_from_the_counter():
    batch, steps = np.array([131072, 262144, 524288, 1048576]), np.array([2000, 4000, 8000, 12000])
    loss = [5.27783, 4.06049, 3.25734, 2.82007]
    tokens = batch * steps
    assert tokens.tolist() == [262144000, 1048576000, 4194304000, 12582912000]
    right, wrong = fit_law(tokens, loss).law, fit_law(524288 * steps, loss).law
    assert right.exponent == pytest.approx(0.300, abs=1e-3)
    assert float(right.value(1e12)) == pytest.approx(2.001426, abs=1e-3)
    assert abs(float(wrong.value(1e12)) - 2.001426) > 0.2
    rows = pd.DataFrame({"num_params": 1e6 * np.sqrt(tokens / 262144000), "tokens": 524288 * steps, "loss": loss,
                         "steps": steps, "tokens_per_step": batch})  # fmt: skip
    with pytest.raises(ValueError, match="2 usable rungs"):  # two of the four claims exceed what their steps can hold
        forecast_final(rows, {"num_params": 1e8, "tokens": 1e12})


@pytest.mark.parametrize(("final", "hero"), [(2.496, 2.247851), (2.561, 2.30326), (2.478, 2.232695)])
def test_fit_06_hero_moves_with_the_final_loss_rule(final: float, hero: float):
    moved = {**OWN, 1e21: 2.596 + final - 2.4945}
    assert forecast_final(table(moved), {"flops": 1e23}, floor=1.6).point == pytest.approx(hero, abs=2e-6)


def test_fit_08_four_rows_are_used_and_copies_have_no_weight():
    rows = [(1e18, 3.52), (1e19, 3.15), *[(1e20, 2.862)] * 4, (1e21, 2.596), (1e21, "NaN"), (1e20, 0.0), (1e19, -0.12),
            (1e18, 1.7976931348623157e308), ("missing", 2.9)]  # fmt: skip
    forecast = forecast_final([{"flops": flops, "loss": loss} for flops, loss in rows], {"flops": 1e23}, floor=1.6)
    assert forecast.point == pytest.approx(2.249679, abs=2e-6)
    assert (len(forecast.used), len(forecast.refused), len(forecast.merged)) == (4, 5, 3)
    assert all(item["reason"] for item in forecast.refused)
    everything_four_times = [{"flops": flops, "loss": loss} for flops, loss in OWN.items() for _ in range(4)]
    once = forecast_final(table(OWN), {"flops": 1e23}, floor=1.6)
    assert forecast_final(everything_four_times, {"flops": 1e23}, floor=1.6).low == once.low


def test_fit_08_parabola_that_opens_downward_has_no_optimum():
    sizes = [5e6, 1.2e7, 2.8e7, 5e7]
    odd = fit_isoflop(sizes, [1.538, 1.51, 1.663, 1.537])
    assert odd.curvature == pytest.approx(-0.026675, abs=1e-6)
    assert (odd.optimum, odd.odd) == (None, 2.8e7)
    assert "2.8e+07" in odd.status
    clean = fit_isoflop(sizes, [1.538, 1.51, 1.516, 1.537])
    assert clean.curvature == pytest.approx(0.021833, abs=1e-6)
    assert clean.optimum == pytest.approx(15921700, abs=100)
