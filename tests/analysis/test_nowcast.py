"""The nowcast on planted heroes: intervals that shrink and still hold, and a registered curve nobody touches."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import special

from rungwise.analysis.benchmarks.trajectory import marin
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.nowcast import nowcast, nowcast_forecast, nowcast_history, worth_in_compute
from rungwise.analysis.whole_curves.bands import CurveError

PROGRESS = np.geomspace(0.02, 1.0, 60)
ERROR = CurveError.of(np.log(PROGRESS), 0.015 * -np.log(PROGRESS) / 3.9, final=0.006, degrees=2.0)


def registered(error: CurveError = ERROR, *, level: float = 0.9) -> Any:
    loss = 2.0 + 0.4 * (PROGRESS**-0.3 - 1.0)
    half = error.half_width(level)
    return pd.DataFrame({"progress": PROGRESS, "loss": loss, "low": loss * np.exp(-half), "high": loss * np.exp(half)})


def heroes(count: int, *, seed: int, noise: float = 0.002, scale: float = 1.0) -> Iterator[tuple[Any, Any]]:
    """Curves whose misses are drawn from the band's own model, as (truth, rows with noise)."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(0.02, 1.0, 50)
    log_grid = np.log(grid)
    root = np.linalg.cholesky(ERROR.covariance(log_grid, log_grid) + 1e-14 * np.eye(grid.size))
    base = np.interp(grid, PROGRESS, registered()["loss"])
    for _ in range(count):
        miss = scale * (root @ rng.standard_normal(grid.size)) / math.sqrt(rng.chisquare(2.0) / 2.0)
        truth = base * np.exp(miss)
        rows = truth * np.exp(noise * rng.standard_normal(grid.size))
        yield pd.DataFrame({"progress": grid, "loss": truth}), pd.DataFrame({"progress": grid, "loss": rows})


@pytest.mark.parametrize("now", [0.1, 0.3, 0.6])
def test_nowcast_holds_planted_heroes_in_a_narrower_interval(now: float):
    curve, held, ratios, better = registered(), [], [], []
    for truth, rows in heroes(150, seed=int(100 * now)):
        updated = nowcast(curve, rows[rows["progress"] <= now])
        end = float(truth["loss"].iloc[-1])
        held.append(updated.final["low"] <= end <= updated.final["high"])
        width, before = (math.log(each["high"] / each["low"]) for each in (updated.final, updated.registered_final))
        ratios.append(width / before)
        better.append(
            abs(math.log(updated.final["loss"] / end)) < abs(math.log(updated.registered_final["loss"] / end))
        )
    assert np.mean(held) >= 0.9
    assert np.median(ratios) < {0.1: 1.0, 0.3: 0.9, 0.6: 0.7}[now]
    assert np.mean(better) > {0.1: 0.5, 0.3: 0.55, 0.6: 0.6}[now]


def test_interval_that_shrinks_with_progress_alone_would_not_hold():
    """Negative control: the registered interval times the share of the run still ahead."""
    held = []
    for truth, _ in heroes(150, seed=7):
        end = registered().iloc[-1]
        half = 0.25 * 0.5 * math.log(end["high"] / end["low"])
        held.append(abs(math.log(truth["loss"].iloc[-1] / end["loss"])) <= half)
    assert np.mean(held) < 0.8


def test_nowcast_follows_a_level_and_gives_back_an_early_lead():
    """A run 1 % above all along keeps most of it; one that was 3 % ahead at the start and level now keeps little."""
    curve = registered()
    rows = curve[curve["progress"] <= 0.4][["progress", "loss"]]
    level = nowcast(curve, rows.assign(loss=rows["loss"] * 1.01))
    lead = np.exp(-0.03 * np.log(rows["progress"] / 0.4) / math.log(0.02 / 0.4))
    slope = nowcast(curve, rows.assign(loss=rows["loss"] * lead))
    shifts = [math.log(each.final["loss"] / each.registered_final["loss"]) for each in (level, slope)]
    assert 0.004 < shifts[0] <= 0.0101
    assert abs(shifts[1]) < 0.003


def test_registered_curve_stays_as_it_was():
    curve = registered()
    before = curve.copy(deep=True)
    _, rows = next(heroes(1, seed=1))
    updated = nowcast(curve, rows[rows["progress"] <= 0.3])
    pd.testing.assert_frame_equal(curve, before)
    assert updated.registered is curve
    assert updated.updated["progress"].iloc[0] == pytest.approx(0.3, abs=0.03)
    assert set(updated.to_dict()) == {"progress", "final", "registered", "width_ratio", "surprise", "level"}
    assert np.all(np.diff(updated.updated["loss"]) <= 1e-12)


def test_run_far_outside_its_band_widens_what_is_left():
    curve = registered()
    rows = curve[curve["progress"] <= 0.3][["progress", "loss"]]
    near, far = (nowcast(curve, rows.assign(loss=rows["loss"] * factor)) for factor in (1.005, 1.3))
    widths = [math.log(each.final["high"] / each.final["low"]) for each in (near, far)]
    assert near.surprise < 1.5 < 3.0 < far.surprise
    assert widths[1] > 2.0 * widths[0]


def test_nothing_observed_and_missing_columns_are_refused():
    curve = registered()
    with pytest.raises(ValueError, match="end before the registered curve begins"):
        nowcast(curve, pd.DataFrame({"progress": [0.001], "loss": [9.0]}))
    with pytest.raises(ValueError, match="registered lacks columns"):
        nowcast(curve.drop(columns="low"), curve)
    with pytest.raises(ValueError, match="observed lacks columns"):
        nowcast(curve, curve.drop(columns="loss"))


def test_level_of_the_registered_band_is_read_from_its_quantile():
    """The same model stated at 50 % and at 90 % makes the same nowcast at 90 %, through a ratio of quantiles."""
    _, rows = next(heroes(1, seed=3))
    rows = rows[rows["progress"] <= 0.3]
    wide, narrow = nowcast(registered(), rows, level=0.9), nowcast(registered(level=0.5), rows, level=0.5)
    quantiles = special.stdtrit(2.0, 0.95) / special.stdtrit(2.0, 0.75)
    halves = [math.log(each.final["high"] / each.final["loss"]) for each in (wide, narrow)]
    assert halves[0] / halves[1] == pytest.approx(quantiles, rel=1e-6)
    assert wide.final["loss"] == pytest.approx(narrow.final["loss"], rel=1e-9)


LAW = PowerLaw(1.5, 40.0, 0.1)


def planted_forecast(count: int = 4) -> Forecast:
    """Of a ladder on a planted law, with the registered curve of this file brought to its end."""
    flops = np.geomspace(1e17, 1e19, count)
    points = [{"run": f"r{c:g}", "flops": c, "loss": float(LAW.value(c))} for c in flops]
    forecast = forecast_final(points, {"flops": 1e21, "steps": 1000})
    curve = registered()
    columns = [name for name in curve if name != "progress"]
    return forecast.with_curve(curve.assign(**{name: curve[name] * forecast.point / 2.0 for name in columns}))


def test_nowcast_of_a_forecast_takes_level_and_degrees_from_it():
    """A band from six rungs has four degrees of freedom; one from three has one."""
    _, rows = next(heroes(1, seed=3))
    for count, degrees in ((3, 1.0), (4, 2.0), (6, 4.0)):
        forecast = planted_forecast(count)
        rows_here = rows.assign(loss=rows["loss"] * forecast.point / 2.0)
        made = nowcast_forecast(forecast, rows_here)
        curve = forecast.curve_table(forecast.metric)
        assert curve is not None
        assert made.final == nowcast(curve, rows_here, degrees=degrees).final
    with pytest.raises(ValueError, match=r"no curve of eval/loss to update; its curves are: loss"):
        nowcast_forecast(forecast, rows, metric="eval/loss")


def test_history_is_what_each_part_alone_would_have_said():
    forecast, (_, rows) = planted_forecast(), next(heroes(1, seed=4))
    rows = rows[rows["progress"] <= 0.65].sample(frac=1.0, random_state=0)
    made = nowcast_history(forecast, rows)
    assert [each.progress for each in made] == pytest.approx([0.1, 0.2, 0.4, 0.6], abs=0.02)
    for each in made:
        assert each.final == nowcast_forecast(forecast, rows[rows["progress"] <= each.progress]).final
    sparse = pd.DataFrame({"progress": [0.01, 0.05, 0.3], "loss": [3.0, 3.0, 2.5]})
    nothing: Any = sparse[:0]
    assert [each.progress for each in nowcast_history(forecast, sparse)] == [0.05]
    assert nowcast_history(forecast, nothing) == []


def test_change_is_worth_the_compute_at_which_the_law_has_it():
    """The planted law itself says what each loss costs; a loss under every floor is worth no compute."""
    forecast = planted_forecast()
    law = PowerLaw(*(forecast.laws[0][key] for key in ("floor", "amplitude", "exponent")))
    at_hero = float(law.value(1e21))
    for times in (0.5, 0.9, 1.3, 4.0):
        loss = forecast.point + float(law.value(times * 1e21)) - at_hero
        worth = worth_in_compute(forecast, loss)
        assert worth["compute_factor"] == pytest.approx(times, rel=0.02)
        low, high = worth["compute_factor_low"], worth["compute_factor_high"]
        assert low is not None
        assert high is not None
        assert low < high
        assert (high < 1.0) if times < 1 else (low > 1.0)
    assert set(worth_in_compute(forecast, forecast.point).values()) == {1.0}
    assert worth_in_compute(forecast, 0.5 * law.floor)["compute_factor"] is None


@pytest.mark.slow
def test_nowcast_of_the_reference_hero_holds_what_came(reference_data):
    """From 10 and 20 % on, 40 % as measured, and the end as defensible choices have it, lie in the intervals."""
    case = marin(reference_data)
    curve = forecast_curve(case.rungs, case.target)
    measured = float(np.exp(np.interp(math.log(0.399), np.log(case.truth["progress"]), np.log(case.truth["loss"]))))
    widths = []
    for now in (0.1, 0.2, 0.4):
        seen: Any = case.truth[case.truth["progress"] <= now]
        made = nowcast(curve, seen, degrees=curve.attrs["degrees"])
        assert made.final["low"] < 2.016
        assert made.final["high"] > 2.039
        widths.append(made.width_ratio)
        if now < 0.4:
            low, high = (np.interp(0.4, made.updated["progress"], made.updated[key]) for key in ("low", "high"))
            assert low < measured < high
    assert widths[2] < widths[0] < 1.0
