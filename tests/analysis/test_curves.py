"""Trajectories: planted curves back, bands that widen early and close on the final interval."""

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.curves import MEASURED_SHARE, SHAPES, forecast_curve, smooth_curve, unmeasured_slope_error
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.points import ladder_points


def test_smoothing_follows_a_steep_noisy_curve_to_its_end():
    rng = np.random.default_rng(0)
    progress = np.arange(1, 1001) / 1000
    truth = 1.5 + 0.3 * (progress + 0.003) ** -0.5
    smoothed = np.exp(smooth_curve(progress, truth + 0.05 * rng.standard_normal(1000), np.array([0.02, 0.1, 0.5, 1.0])))
    miss = np.abs(smoothed - np.interp([0.02, 0.1, 0.5, 1.0], progress, truth))
    assert np.all(miss < [0.1, 0.05, 0.025, 0.04])


def test_smoothing_ignores_an_outlier_and_keeps_sparse_curves_exact():
    progress = np.linspace(0.01, 1.0, 200)
    loss = np.full(200, 2.0)
    loss[100] = 9.0
    np.testing.assert_allclose(np.exp(smooth_curve(progress, loss, np.array([progress[100]]))), [2.0], atol=0.01)
    np.testing.assert_allclose(np.exp(smooth_curve([0.5, 1.0], [2.0, 1.5], np.array([0.5, 1.0]))), [2.0, 1.5])


@pytest.mark.parametrize("metric", ["eval/loss", "train/loss"])
def test_curve_forecast_holds_the_planted_hero(ladder, hero, curves, metric: str):
    runs, run = ladder(1), hero(1)
    table = forecast_curve(curves(runs, metric), run.plan)
    seen = curves([run], "eval/loss")
    seen = seen[seen["progress"] >= table["progress"].min()]
    low, high = (np.interp(seen["progress"], table["progress"], table[key]) for key in ("low", "high"))
    assert np.mean((low <= seen["loss"]) & (seen["loss"] <= high)) >= 0.85
    middle = np.interp(seen["progress"], table["progress"], table["loss"])
    assert np.mean(np.abs(middle / seen["loss"] - 1.0)) < 0.06


def test_curve_forecast_ends_on_the_final_forecast_and_widens_early(ladder, hero, curves):
    runs, run = ladder(2), hero(2)
    final = forecast_final(ladder_points(runs), run.plan)
    table = forecast_curve(curves(runs, "eval/loss"), run.plan, final=final)
    end = table.iloc[-1]
    assert (end["loss"], end["low"], end["high"]) == pytest.approx((final.point, final.low, final.high), rel=1e-9)
    relative = np.log(np.asarray(table["high"]) / np.asarray(table["low"]))
    assert np.all(np.diff(relative) <= 1e-12)
    assert relative[0] > relative[-1]
    assert table.attrs["shape"] in SHAPES


def test_curve_shape_is_chosen_by_held_out_error():
    """Rungs that collapse exactly as ratios: that shape wins with no error, one with a floor does not."""
    progress = np.linspace(0.02, 1.0, 40)
    ratio = 1.0 + 0.3 * (progress**-0.4 - 1.0)
    flops = np.array([1.0, 4.0, 16.0, 64.0])
    finals = 0.6 + 1.5 * flops**-0.14
    tables = [
        pd.DataFrame({"run": str(c), "flops": c, "progress": progress, "loss": end * ratio})
        for c, end in zip(flops, finals, strict=True)
    ]
    table = forecast_curve(pd.concat(tables), {"flops": 300.0}, progress=progress)
    assert table.attrs["errors"]["same_ratio"] == pytest.approx(0.0, abs=1e-12)
    assert table.attrs["errors"]["same_excess"] > 0.01
    np.testing.assert_allclose(table["loss"] / table["loss"].iloc[-1], ratio, rtol=2e-3)


@pytest.mark.parametrize(("kept", "size"), [(1.0, 0.0), (0.7, 2.91999 * 0.3 / 2**0.5), (0.2, 1.0)])
def test_slope_error_is_what_held_out_rungs_left_of_their_forecast_falls(kept: float, size: float):
    """The top rung keeps a share of the fall that its peers have: 1 - kept, times Student's t of two over root 2."""
    progress = np.geomspace(0.02, 1.0, 50)
    log_ratio = np.log(1.0 + 0.3 * (progress**-0.4 - 1.0))
    tables = [
        pd.DataFrame({"run": str(c), "flops": c, "progress": progress, "loss": end * np.exp(share * log_ratio)})
        for c, end, share in ((1.0, 2.1, 1.0), (4.0, 1.84, 1.0), (16.0, 1.61, 1.0), (64.0, 1.43, kept))
    ]
    table = forecast_curve(pd.concat(tables), {"flops": 300.0})
    least = MEASURED_SHARE * unmeasured_slope_error(table["progress"])
    np.testing.assert_allclose(table["slope_error"], np.maximum(size, least), rtol=0.15)  # shapes differ a little
    assert np.all(np.diff(table["slope_error"]) <= 1e-12)


def test_curve_forecast_is_kept_in_the_forecast(ladder, hero, curves):
    runs, run = ladder(), hero()
    final = forecast_final(ladder_points(runs), run.plan)
    table = forecast_curve(curves(runs, "eval/loss"), run.plan, final=final)
    kept = final.with_curve(table).with_curve(table, metric="train/loss")
    again = kept.curve_table("eval/loss")
    assert again is not None
    pd.testing.assert_frame_equal(again, table, check_like=True)
    assert {row["metric"] for row in kept.curve} == {"eval/loss", "train/loss"}
    assert kept.hash != final.hash
    assert final.curve_table("eval/loss") is None


def test_curve_forecast_refuses_unfinished_curves_and_progress_outside(ladder, hero, curves):
    table = curves(ladder(), "eval/loss")
    with pytest.raises(ValueError, match="must lie within"):
        forecast_curve(table, hero().plan, progress=[0.0001, 1.0])
    with pytest.raises(ValueError, match="ends at progress"):
        forecast_curve(table[(table["run"] != "d64") | (table["progress"] < 0.7)], hero().plan)
    with pytest.raises(ValueError, match="lack columns"):
        forecast_curve(table.drop(columns="progress"), hero().plan)
