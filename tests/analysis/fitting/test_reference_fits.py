"""Published fits and forecasts of public runs, read from the folder that RUNGWISE_REFERENCE_DATA names."""

import math
from pathlib import Path

import numpy as np
import pytest

from rungwise.analysis.benchmarks.final_loss import DEFENSIBLE, HERO_FLOPS, reference_fits, reference_rungs
from rungwise.analysis.benchmarks.public import coverage, mean_score, ours, robust, robust_interval
from rungwise.analysis.benchmarks.sets import epoch_rows, splits
from rungwise.analysis.fitting.surface_fit import fit_surface
from rungwise.analysis.forecast import forecast_final


def test_epoch_rows_give_the_global_optimum(reference_data: Path):
    rows = epoch_rows(reference_data)
    fit = fit_surface(rows["params"], rows["tokens"], rows["loss"])
    assert len(rows) == 240
    assert fit.objective <= 0.00101828
    assert fit.law.size_exponent == pytest.approx(0.3473, abs=5e-4)
    assert fit.law.token_exponent == pytest.approx(0.3672, abs=5e-4)
    assert fit.law.floor == pytest.approx(1.8172, abs=1e-3)
    assert float(fit.law.value(70e9, 1.4e12)) == pytest.approx(1.973367, abs=1e-4)
    assert fit.num_starts_agreeing == fit.num_starts


def test_open_athena_least_squares_set(reference_data: Path):
    rows = epoch_rows(reference_data).query("flops < 1e21")
    fit = fit_surface(rows["params"] / 1e6, rows["tokens"] / 1e9, rows["loss"], delta=math.inf, scale="nats")
    assert (fit.law.size_exponent, fit.law.token_exponent) == pytest.approx((0.3511, 0.4587), abs=1e-4)
    assert 2 * fit.objective == pytest.approx(0.062414, abs=1e-6)


def test_reference_ladder_gives_the_teams_law_and_ours_holds_what_is_defensible(reference_data: Path):
    rungs = reference_rungs(reference_data)
    target = {"flops": HERO_FLOPS["flops"]}
    theirs = forecast_final(rungs.drop(columns=["flops_with_head", "loss_error"]), target, floor=1.5)
    assert theirs.point == pytest.approx(2.0389, abs=2e-4)
    assert theirs.laws[0]["amplitude"] == pytest.approx(84.71, abs=0.05)
    assert theirs.laws[0]["exponent"] == pytest.approx(0.08996, abs=2e-5)
    forecast = forecast_final(rungs, HERO_FLOPS)
    assert forecast.low is not None
    assert forecast.high is not None
    assert all(forecast.low < value < forecast.high for value in DEFENSIBLE.values())
    assert (forecast.half_width["percent"] or 99) < 5


def test_reference_ladder_gives_the_teams_fits_along_training(reference_data: Path):
    for row in reference_fits(reference_data).to_dict("records"):
        assert float(row["ours"]) == pytest.approx(float(row["published"]), abs=1.01e-4), row["progress"]


@pytest.mark.slow
def test_held_out_errors_are_below_the_robust_fits(reference_data: Path):
    ratios = {}
    for split in splits(reference_data):
        targets = {key: split.test[key].to_numpy(dtype=float) for key in ("params", "tokens", "flops")}
        observed = split.test["loss"].to_numpy(dtype=float)
        errors = [np.mean(np.abs(method(split.rows, targets).point / observed - 1)) for method in (ours, robust)]
        ratios[split.name] = errors[0] / errors[1]
    assert len(ratios) == 15
    assert np.exp(np.mean(np.log(list(ratios.values())))) < 0.9
    assert max(ratios.values()) < 1.25


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "covers"), [("1e20", 0.70), ("3e20", 0.85), ("1e21", 0.85)])
def test_held_out_epoch_runs_are_covered_better_than_by_a_bootstrap(reference_data: Path, limit: str, covers: float):
    """Nominal 90 %. Up to 1e20 the aim of 85 % is not reached; a bootstrap of one law covers about half."""
    split = next(split for split in splits(reference_data) if split.name == f"Epoch, C ≤ {limit}")
    targets = {key: split.test[key].to_numpy(dtype=float) for key in ("params", "tokens", "flops")}
    observed = split.test["loss"].to_numpy(dtype=float)
    found, drawn = ours(split.rows, targets), robust_interval(split.rows, targets, draws=200)
    assert covers <= np.mean(coverage(found, observed)) <= 0.97
    assert np.mean(coverage(found, observed)) > np.mean(coverage(drawn, observed)) + 0.1
    assert mean_score(found, observed) < 0.8 * mean_score(drawn, observed)
