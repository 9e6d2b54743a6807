"""Trajectories of losses: planted curves back, bands that hold, noise that stays out, floors found by collapse."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.curves import MEASURED_SHARE, forecast_curve, unmeasured_slope_error
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.points import ladder_points
from rungwise.analysis.whole_curves.bands import CurveError
from rungwise.analysis.whole_curves.curve_rows import complete_curves, only_falls, smooth_curve
from rungwise.analysis.whole_curves.shapes import SHAPES, collapse_floor

FLOPS = (1.0, 4.0, 16.0, 64.0)


def ladder_of(shape, *, floor: float = 0.6, progress=None, noise: float = 0.0, seed: int = 0, steps=None) -> Any:
    """Rungs whose final losses are floor + 1.5 C^-0.14 and whose curves are shape(final, log C, progress)."""
    rng = np.random.default_rng(seed)
    progress = np.linspace(0.05, 1.0, 20) if progress is None else progress
    tables = []
    for index, flops in enumerate(FLOPS):
        loss = shape(floor + 1.5 * flops**-0.14, math.log(flops), progress)
        loss = loss * np.exp(noise * rng.standard_normal(progress.size))
        table = pd.DataFrame({"run": f"r{index}", "flops": flops, "progress": progress, "loss": loss})
        tables.append(table if steps is None else table.assign(steps=steps[index]))
    return pd.concat(tables, ignore_index=True)


def collapsing(floor: float):
    return lambda final, _log_flops, p: floor + (final - floor) * (1.0 + 0.4 * (p**-0.4 - 1.0))


def test_smoothing_follows_a_steep_noisy_curve_to_its_end():
    rng = np.random.default_rng(0)
    progress = np.arange(1, 1001) / 1000
    truth = 1.5 + 0.3 * (progress + 0.003) ** -0.5
    smoothed = np.exp(smooth_curve(progress, truth + 0.05 * rng.standard_normal(1000), np.array([0.02, 0.1, 0.5, 1.0])))
    miss = np.abs(smoothed - np.interp([0.02, 0.1, 0.5, 1.0], progress, truth))
    assert np.all(miss < [0.1, 0.05, 0.025, 0.04])


def test_smoothing_ignores_an_outlier_and_keeps_a_handful_of_rows_exact():
    progress = np.linspace(0.01, 1.0, 200)
    loss = np.full(200, 2.0)
    loss[100] = 9.0
    np.testing.assert_allclose(np.exp(smooth_curve(progress, loss, np.array([progress[100]]))), [2.0], atol=0.01)
    np.testing.assert_allclose(np.exp(smooth_curve([0.5, 1.0], [2.0, 1.5], np.array([0.5, 1.0]))), [2.0, 1.5])


def per_progress_fits(rungs: pd.DataFrame, flops: float, floor: float) -> np.ndarray:
    """The usual way: a line in (log C, log(L - E)) at each progress by itself."""
    table = rungs.pivot_table(index="progress", columns="flops", values="loss")
    slope, level = np.polyfit(np.log(table.columns.to_numpy(dtype=float)), np.log(table.to_numpy() - floor).T, 1)
    return floor + np.exp(level + slope * math.log(flops))


def test_noise_of_single_evaluations_does_not_bend_the_forecast():
    """1.2 % noise on evaluations every 5 %: fits at each progress rise somewhere, the forecast nowhere."""
    rises, ours, theirs = 0, [], []
    for seed in range(5):
        rungs = ladder_of(collapsing(0.6), noise=0.012, seed=seed)
        table = forecast_curve(rungs, {"flops": 300.0}, progress=np.linspace(0.05, 1.0, 20))
        fine = forecast_curve(rungs, {"flops": 300.0}, progress=np.geomspace(0.05, 1.0, 400))
        assert np.all(np.diff(fine["loss"]) <= 1e-12)
        usual = per_progress_fits(rungs, 300.0, 0.6)
        rises += int((np.diff(usual) > 0).any())
        truth = collapsing(0.6)(0.6 + 1.5 * 300.0**-0.14, 0.0, table["progress"].to_numpy())
        for misses, curve in ((ours, table["loss"].to_numpy()), (theirs, usual)):
            miss = np.log(curve / truth)
            misses.append(np.sqrt(np.mean((miss - miss.mean()) ** 2)))  # of the shape; the level is `forecast_final`'s
    assert rises >= 3
    assert np.mean(ours) < 0.9 * np.mean(theirs)


def test_forecast_does_not_rise_where_the_truth_is_flat():
    """Rungs that fall until 30 % of the run and stand still: what noise makes of the rest is no rise."""

    def flat(final, _log_flops, p):
        return final * (1.0 + 0.4 * np.maximum(p**-0.4 - 0.3**-0.4, 0.0))

    for seed in range(3):
        rungs = ladder_of(flat, noise=0.004, seed=seed, progress=np.linspace(0.05, 1.0, 40))
        table = forecast_curve(rungs, {"flops": 300.0}, progress=np.geomspace(0.05, 1.0, 200))
        assert np.all(np.diff(table["loss"]) <= 1e-12)


def test_forecast_rises_where_the_rungs_rise():
    """A bump that every rung has is the truth, not noise."""

    def bump(final, _log_flops, p):
        return collapsing(0.6)(final, 0.0, p) + 0.3 * np.exp(-(((p - 0.5) / 0.1) ** 2))

    table = forecast_curve(ladder_of(bump), {"flops": 300.0}, progress=np.linspace(0.05, 1.0, 96))
    assert np.diff(table["loss"]).max() > 0
    smoothed = np.log(np.array([[3.0, 2.0, 2.01, 1.9]]))
    assert only_falls(smoothed)
    assert not only_falls(np.log(np.array([[3.0, 2.0, 2.3, 1.9]])))


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


def drifting(drift: float):
    """Shapes that drift with compute: the excess at the start grows by `drift` per unit of log C."""
    return lambda final, log_flops, p: 0.6 + (final - 0.6) * (1.0 + (0.4 + drift * log_flops) * (p**-0.4 - 1.0))


def test_bands_hold_planted_heroes_at_one_progress_and_all_along():
    """16 ladders whose shapes drift at random and whose runs spread by 0.2 %, extrapolated 5 to 20 times."""
    rng = np.random.default_rng(3)
    progress, at_one, all_along = np.linspace(0.05, 1.0, 20), [], []
    for seed in range(16):
        drift, target = 0.02 * rng.standard_normal(), 64.0 * 5 ** rng.uniform(1.0, 2.0)
        rungs = ladder_of(drifting(drift), noise=0.001, seed=seed)
        rungs["loss"] *= np.repeat(np.exp(0.002 * rng.standard_normal(4)), progress.size)
        final = 0.6 + 1.5 * target**-0.14
        truth = drifting(drift)(final, math.log(target), progress) * math.exp(0.002 * rng.standard_normal())
        table = forecast_curve(rungs, {"flops": target}, progress=progress)
        at_one.append(np.mean((table["low"] <= truth) & (truth <= table["high"])))
        all_along.append(bool(np.all((table["low_all"] <= truth) & (truth <= table["high_all"]))))
        assert np.all(table["low_all"] <= table["low"])
        assert np.all(table["high"] <= table["high_all"])
    assert np.mean(at_one) >= 0.86
    assert np.mean(all_along) >= 0.8


def test_simultaneous_band_holds_curves_drawn_from_its_own_model():
    """The pointwise band, taken for one, holds fewer: the negative control."""
    log_progress = np.linspace(math.log(0.03), 0.0, 60)
    error = CurveError.of(log_progress, 0.02 * -log_progress / 3.5, final=0.004, degrees=2.0)
    rng = np.random.default_rng(5)
    covariance = error.covariance(log_progress, log_progress) + 1e-14 * np.eye(60)
    draws = rng.standard_normal((2000, 60)) @ np.linalg.cholesky(covariance).T
    draws /= np.sqrt(rng.chisquare(2.0, 2000) / 2.0)[:, None]
    half = error.half_width(0.9)
    assert np.mean(np.abs(draws) <= half) == pytest.approx(0.9, abs=0.02)
    assert np.mean(np.all(np.abs(draws) <= half, axis=1)) < 0.87
    assert np.mean(np.all(np.abs(draws) <= error.simultaneous_factor(0.9) * half, axis=1)) == pytest.approx(
        0.9, abs=0.02
    )


def test_band_widens_early_with_the_steps_the_rungs_never_took():
    """A hero of 19 times the top rung's steps, from rungs alike in steps: the same end, and less said of its start."""
    rungs = ladder_of(drifting(0.01), noise=0.001, steps=(11_000.0, 15_000.0, 15_100.0, 20_000.0))
    target = {"flops": 300.0}
    near, far = (forecast_curve(rungs, {**target, "steps": 20_000.0 * times}) for times in (1.2, 19.0))
    wide, narrow = (np.log(table["high"].to_numpy() / table["low"].to_numpy()) for table in (far, near))
    assert wide[-1] == pytest.approx(narrow[-1], rel=0.05)
    assert wide[0] > 1.5 * narrow[0]
    assert far.attrs["steps_ratio"] == pytest.approx(19.0)
    unknown = forecast_curve(rungs.drop(columns="steps"), target)
    assert unknown.attrs["steps_ratio"] is None


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
    assert sum(table.attrs["weights"].values()) == pytest.approx(1.0)


def test_curve_shape_is_weighed_by_held_out_error():
    """Rungs that collapse exactly as ratios: that shape misses nothing and leads, one with a floor does not."""
    progress = np.linspace(0.02, 1.0, 40)
    ratio = 1.0 + 0.3 * (progress**-0.4 - 1.0)
    rungs = ladder_of(lambda final, _log_flops, _p: final * ratio, progress=progress)
    table = forecast_curve(rungs, {"flops": 300.0}, progress=progress)
    assert table.attrs["errors"]["same_ratio"] == pytest.approx(0.0, abs=1e-12)
    assert table.attrs["errors"]["same_excess"] > 0.005
    assert table.attrs["weights"]["same_ratio"] > 100 * table.attrs["weights"]["same_excess"]
    np.testing.assert_allclose(table["loss"] / table["loss"].iloc[-1], ratio, rtol=6e-3)


@pytest.mark.parametrize("floor", [0.3, 0.6, 0.9])
def test_floor_is_found_where_the_curves_collapse(floor: float):
    """Four final losses allow almost any floor; four collapsing curves name theirs."""
    rungs = ladder_of(collapsing(floor), floor=floor, noise=2e-4, progress=np.linspace(0.02, 1.0, 100))
    table = forecast_curve(rungs, {"flops": 2000.0})
    collapse = table.attrs["collapse"]
    assert collapse["floor"] == pytest.approx(floor, abs=0.02)
    assert abs(collapse["floor"] - floor) < 2 * collapse["error"]
    assert collapse["share"] > 0.95
    assert table["loss"].iloc[-1] == pytest.approx(floor + 1.5 * 2000.0**-0.14, rel=4e-3)
    ends = rungs[rungs["progress"] == 1.0].drop(columns="progress")
    alone = forecast_final(ends, {"flops": 2000.0})
    assert alone.low is not None
    assert alone.high is not None
    assert math.log(table["high"].iloc[-1] / table["low"].iloc[-1]) < 0.6 * math.log(alone.high / alone.low)


def test_floor_is_not_taken_from_curves_that_do_not_collapse():
    rungs = ladder_of(drifting(0.06), noise=0.002, seed=1)
    loss = np.array([rows["loss"].to_numpy() for _, rows in rungs.groupby("run")])
    found = collapse_floor(np.log(loss), np.where(np.linspace(0.05, 1, 20) >= 0.1, 1 / 18, 0.0))
    assert found.share < 0.95
    table = forecast_curve(rungs, {"flops": 300.0})
    free = forecast_final(
        [{"run": f"r{i}", "flops": c, "loss": 0.6 + 1.5 * c**-0.14} for i, c in enumerate(FLOPS)], {"flops": 300.0}
    )
    assert table["loss"].iloc[-1] == pytest.approx(free.point, rel=0.01)


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
    columns = ["progress", "loss", "low", "high", "slope_error"]
    np.testing.assert_array_equal(again[columns].to_numpy(), table[columns].to_numpy())
    assert {row["metric"] for row in kept.curve} == {"eval/loss", "train/loss"}
    assert kept.hash != final.hash
    assert final.curve_table("eval/loss") is None


def test_unfinished_curve_is_completed_with_its_error():
    rungs = ladder_of(collapsing(0.6), noise=0.001, progress=np.linspace(0.02, 1.0, 50))
    cut = rungs[(rungs["run"] != "r3") | (rungs["progress"] <= 0.8)]
    whole = complete_curves(cut)
    (entry,) = whole.attrs["completed"]
    assert entry["run"] == "r3"
    assert entry["reached"] == pytest.approx(0.8, abs=0.02)
    end, truth = (float(table.query("run == 'r3'")["loss"].iloc[-1]) for table in (whole, rungs))
    assert abs(math.log(end / truth)) < 2.5 * entry["error"] < 0.01
    target = {"flops": 300.0}
    completed, measured = forecast_curve(whole, target), forecast_curve(rungs, target)
    assert completed["loss"].iloc[-1] == pytest.approx(measured["loss"].iloc[-1], rel=0.02)
    certain = forecast_curve(whole.assign(completion_error=0.0), target)
    wider, narrow = (math.log(each["high"].iloc[-1] / each["low"].iloc[-1]) for each in (completed, certain))
    assert wider > 1.01 * narrow
    with pytest.raises(ValueError, match=r"ends at progress 0\.4"):
        complete_curves(rungs[(rungs["run"] != "r3") | (rungs["progress"] <= 0.4)])


def test_shapes_come_from_rungs_of_the_targets_ratio():
    """Two ratios of tokens to parameters in one table; the overtrained runs have another shape."""
    tables = []
    for ratio, start in ((20.0, 0.4), (100.0, 0.1)):
        for size in (1.0, 2.0, 4.0, 8.0):
            progress = np.linspace(0.05, 1.0, 30)
            final = 0.6 + 1.0 * size**-0.3 + 1.0 * (ratio * size) ** -0.3
            loss = 0.6 + (final - 0.6) * (1.0 + start * (progress**-0.4 - 1.0))
            run = {"run": f"{size}-{ratio}", "num_params": size, "tokens": ratio * size, "flops": 6 * size**2 * ratio}
            tables.append(pd.DataFrame({**run, "progress": progress, "loss": loss}))
    target = {"num_params": 16.0, "tokens": 320.0, "flops": 6 * 16.0**2 * 20}
    alike = pd.concat(tables[:4])
    final = forecast_final(alike.groupby("run").tail(1).drop(columns="progress"), target)
    table, only = (forecast_curve(each, target, final=final) for each in (pd.concat(tables), alike))
    np.testing.assert_array_equal(table.to_numpy(), only.to_numpy())
    with pytest.raises(ValueError, match="0 rungs have the target's 50 tokens per parameter"):
        forecast_curve(alike, {**target, "tokens": 800.0}, final=final)


def two_ratios(bend: float) -> tuple[pd.DataFrame, dict[str, float]]:
    """Five sizes at 20 and at 100 tokens a parameter, and a target of 20; `bend` lifts the others with size."""
    tables = []
    for ratio in (20.0, 100.0):
        for size in (1e8, 2e8, 4e8, 8e8, 1.6e9):
            progress = np.linspace(0.05, 1.0, 30)
            lifted = 1.0 + bend * math.log(size / 1e8) * (ratio > 50)
            final = (1.6 + 300.0 * size**-0.3 + 600.0 * (ratio * size) ** -0.3) * lifted
            loss = final * (1.0 + 0.1 * (progress**-0.4 - 1.0))
            run = {"run": f"{size:g}-{ratio:g}", "num_params": size, "tokens": ratio * size}
            tables.append(pd.DataFrame({**run, "flops": 6 * size**2 * ratio, "progress": progress, "loss": loss}))
    return pd.concat(tables), {"num_params": 4e9, "tokens": 8e10, "flops": 6 * 4e9 * 8e10}


def test_end_averages_the_law_over_all_runs_and_that_through_the_targets_ratio_by_their_misses():
    """What both miss on the top runs held out, by the public forecast; and what parts them widens the interval."""
    rungs, target = two_ratios(bend=0.01)
    ends: Any = rungs[rungs["progress"] == 1.0].drop(columns="progress")
    same: Any = ends[ends["tokens"] < 50 * ends["num_params"]]
    wide, alone = forecast_final(ends, target), forecast_final(same, target)
    misses = []
    for top in ends[ends["num_params"] == 1.6e9].to_dict("records"):
        below = ends[ends["num_params"] < 1.6e9]
        alike = below[np.isclose(below["tokens"] / below["num_params"], top["tokens"] / top["num_params"])]
        by = {key: top[key] for key in ("num_params", "tokens", "flops")}
        misses.append([abs(math.log(forecast_final(rows, by).point / top["loss"])) for rows in (below, alike)])
    votes = (np.mean(misses, axis=0) + 0.001) ** -2.0
    share = votes[1] / votes.sum()
    assert 0.05 < share < 0.95
    end = forecast_curve(rungs, target).iloc[-1]
    apart = math.log(alone.point / wide.point)
    assert abs(apart) > 0.002
    assert math.log(end["loss"] / wide.point) == pytest.approx(share * apart, abs=1e-4)
    halves = [0.5 * math.log(each.high / each.low) for each in (wide, alone) if each.high and each.low]
    doubt = 2.3533634 * math.sqrt(share * (1.0 - share)) * apart  # Student's t of three degrees: five rungs
    expected = math.hypot((1.0 - share) * halves[0] + share * halves[1], doubt)
    assert 0.5 * math.log(end["high"] / end["low"]) == pytest.approx(expected, rel=0.01)


def test_end_is_nearer_where_no_law_knows_how_sizes_and_tokens_trade():
    """Overtrained runs that fall less with size than any law has it draw the law over all runs away."""
    rungs, target = two_ratios(bend=0.02)
    truth = 1.6 + 300.0 * 4e9**-0.3 + 600.0 * 8e10**-0.3
    ends: Any = rungs[rungs["progress"] == 1.0].drop(columns="progress")
    wide = forecast_final(ends, target)
    table = forecast_curve(rungs, target)
    assert abs(math.log(table["loss"].iloc[-1] / truth)) < 0.7 * abs(math.log(wide.point / truth))
    assert table["low"].iloc[-1] < truth < table["high"].iloc[-1]


def test_curve_forecast_refuses_bad_input(ladder, hero, curves):
    table = curves(ladder(), "eval/loss")
    with pytest.raises(ValueError, match="must lie within"):
        forecast_curve(table, hero().plan, progress=[0.0001, 1.0])
    with pytest.raises(ValueError, match="ends at progress"):
        forecast_curve(table[(table["run"] != "d64") | (table["progress"] < 0.7)], hero().plan)
    with pytest.raises(ValueError, match="lack columns"):
        forecast_curve(table.drop(columns="progress"), hero().plan)
    with pytest.raises(ValueError, match="no usable loss"):
        forecast_curve(table.assign(loss=math.nan), hero().plan)
    two = table[table["run"].isin(["d32", "d64"])].drop(columns=["num_params", "num_active_params", "tokens"])
    with pytest.raises(UnfitForecast, match="2 rungs"):
        forecast_curve(two, hero().plan)


def test_another_schedule_moves_curve_and_end():
    """Rungs that decay along a line, a hero that decays late: the law of schedules alone speaks, in a wider band."""
    progress = np.linspace(0.02, 1.0, 60)
    steps = (3000.0, 4000.0, 5000.0, 6000.0)
    rungs = ladder_of(collapsing(0.6), progress=progress, steps=steps)
    rungs["learning_rate"] = 3e-3 * (1.0 - 0.9 * rungs["progress"])
    line = pd.DataFrame({"progress": progress, "learning_rate": 3e-3 * (1.0 - 0.9 * progress)})
    late = line.assign(learning_rate=3e-3 * np.where(progress < 0.8, 1.0, 1.0 - 0.9 * (progress - 0.8) / 0.2))
    target = {"flops": 300.0, "steps": 7000.0}
    same, other = (
        forecast_curve(rungs, target, schedule=each, progress=[0.1, 0.5, 0.79, 1.0]) for each in (line, late)
    )
    plain = forecast_curve(rungs, target, progress=[0.1, 0.5, 0.79, 1.0])
    assert set(other.attrs["weights"]) == {"schedule_law"}
    assert "schedule_law" in same.attrs["weights"]
    np.testing.assert_allclose(same["loss"], plain["loss"], rtol=2e-3)
    late_falls = [float(np.log(table["loss"].iloc[2] / table["loss"].iloc[3])) for table in (other, plain)]
    assert late_falls[0] > late_falls[1]
    wider, narrow = (math.log(each["high"].iloc[1] / each["low"].iloc[1]) for each in (other, plain))
    assert wider > narrow
