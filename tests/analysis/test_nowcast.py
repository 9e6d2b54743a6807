"""The nowcast on planted heroes: intervals that shrink and still hold, and a registered curve nobody touches."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import special

from rungwise.analysis.nowcast import nowcast
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
    assert set(updated.to_dict()) == {"progress", "final", "registered", "surprise", "level"}
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
