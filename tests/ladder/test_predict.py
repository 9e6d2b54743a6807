"""From runs on disk to a forecast, and what is said of it once the hero is there."""

import math

import pytest

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.sweeps.optimum import Sweep, fit_optima, sweep_key
from rungwise.ladder.home import family_folder, write_json
from rungwise.ladder.predict import (
    backtest_runs,
    forecast_runs,
    hero_outcome,
    load_family_runs,
    register_forecast,
    top_rung_loss,
)


def test_predict_interval_holds_the_planted_loss(rungs_home, planted_loss):
    runs = load_family_runs("tiny", home=rungs_home)
    forecast = forecast_runs(runs)
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low < planted_loss(runs.plan["hero"]["flops"]) < forecast.high
    assert forecast.degrees_of_freedom == len(runs.rungs) - 3  # three constants


def test_predict_registers_both_curves_to_the_end(rungs_home):
    forecast = forecast_runs(load_family_runs("tiny", home=rungs_home))
    for metric in ("eval/loss", "train/loss"):
        curve = forecast.curve_table(metric)
        assert curve is not None
        assert curve["progress"].iloc[-1] == 1.0


def test_predict_leaves_out_an_unfinished_rung_and_says_so(rungs_home, write_part):
    write_part("d80", steps=50)
    forecast = forecast_runs(load_family_runs("tiny", home=rungs_home))
    assert [item["run"] for item in forecast.refused] == ["d80"]
    assert "d80" not in [row["run"] for row in forecast.used]


def test_predict_two_rungs_are_unfit_and_carry_their_estimate(home, write_part):
    write_part("d32")
    write_part("d48")
    with pytest.raises(UnfitForecast) as caught:
        forecast_runs(load_family_runs("tiny", home=home))
    assert caught.value.estimate is not None


def test_predict_outcome_waits_for_the_hero(registered_home, write_hero):
    assert hero_outcome(load_family_runs("tiny", home=registered_home)) is None
    write_hero(steps=100)
    assert hero_outcome(load_family_runs("tiny", home=registered_home)) is None


@pytest.mark.parametrize(("shift", "held"), [(0.005, True), (0.1, False)])
def test_predict_outcome_says_whether_the_forecast_held(registered_home, write_hero, shift, held):
    write_hero(shift=shift)
    runs = load_family_runs("tiny", home=registered_home)
    outcome = hero_outcome(runs)
    assert outcome is not None
    assert runs.registered is not None
    assert outcome.held is held
    missed, copied = (
        runs.registered.point - outcome.measured,
        top_rung_loss(runs.registered) - outcome.measured,
    )
    assert outcome.error == missed
    assert outcome.skill == pytest.approx(1 - abs(missed / copied))


def test_predict_registered_forecast_stays_when_the_hero_is_there(registered_home, write_hero):
    before = load_family_runs("tiny", home=registered_home)
    write_hero()
    after = load_family_runs("tiny", home=registered_home)
    assert before.registered == after.registered
    assert register_forecast(forecast_runs(after), after, home=registered_home) == forecast_runs(before).hash


@pytest.mark.parametrize(("best", "flagged"), [(0.25, True), (1.0, False)])
def test_predict_flags_a_rung_off_its_swept_optimum(rungs_home, best: float, flagged: bool):
    record = load_family_runs("tiny", home=rungs_home).record("d32")
    recipe = record.plan["learning_rate"]
    rates = tuple(recipe * factor for factor in (0.125, 0.25, 0.5, 1.0, 2.0))
    losses = tuple(1.9 + 0.05 * math.log(rate / (best * recipe)) ** 2 for rate in rates)
    [optimum] = fit_optima([Sweep(values=rates, losses=losses, diverged=(False,) * 5, recipe=recipe)])
    entry = {"at_recipe": True, "key": sweep_key(record.config), "values": rates, "losses": losses}
    summary = {"family": "tiny", "rungs": {"d32": [{**entry, "optimum": optimum.to_dict()}]}, "laws": {}}
    write_json(family_folder(rungs_home, "tiny") / "sweep.json", summary)
    warnings = forecast_runs(load_family_runs("tiny", home=rungs_home)).warnings
    assert any("the recipe of d32 costs" in warning for warning in warnings) is flagged


def test_predict_backtest_holds_out_the_upper_rungs(rungs_home):
    result = backtest_runs(load_family_runs("tiny", home=rungs_home))
    assert [row["run"] for row in result.rows] == ["d80"]
    assert result.rows[0]["inside"]
