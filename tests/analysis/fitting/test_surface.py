"""Forecasts of runs whose sizes and tokens vary: public runs and planted surfaces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, special

from rungwise.analysis.fitting.discrepancy import Linearised, predict
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.laws import SurfaceLaw
from rungwise.analysis.fitting.surface import MEMBERS, SurfaceForecast, forecast_surface, lower_rows, mixture_quantile
from rungwise.analysis.fitting.surface_fit import fit_surface
from rungwise.analysis.forecast import Forecast, forecast_final

DATA = Path(__file__).parents[2] / "data" / "final_loss"


def planted(rng: np.random.Generator, *, noise: float = 0.003, outer: float = 1.0) -> tuple[dict, SurfaceLaw]:
    law = SurfaceLaw(rng.uniform(1.4, 1.9), 400.0 * 20 ** rng.uniform(-0.3, 0.3), rng.uniform(0.3, 0.4),
                     1200.0 * 20 ** rng.uniform(-0.3, 0.3), rng.uniform(0.3, 0.4), outer)  # fmt: skip
    params = np.exp(rng.uniform(np.log(5e7), np.log(1e9), 40))
    tokens = params * np.exp(rng.uniform(np.log(4.0), np.log(200.0), 40))
    loss = law.value(params, tokens) * np.exp(noise * rng.standard_normal(40))
    return {"params": params, "tokens": tokens, "loss": loss}, law


def test_forecast_covers_new_runs_of_planted_surfaces():
    """Nominal 90 % a hundred times beyond, laws inside and outside the separable form."""
    rng = np.random.default_rng(11)
    covered, ratios = [], []
    for trial in range(15):
        rows, law = planted(rng, outer=(1.0, 0.85, 1.15)[trial % 3])
        params, tokens = np.array([3e9, 1e10]), np.array([6e10, 2e11])
        new = law.value(params, tokens) * np.exp(0.003 * rng.standard_normal(2))
        found = forecast_surface(rows, params, tokens)
        low, high = found.quantile(0.05), found.quantile(0.95)
        covered.extend((low <= new) & (new <= high))
        ratios.extend((high - low) / new)
    assert np.mean(covered) >= 0.8
    assert np.median(ratios) < 0.06


def test_forecast_widens_with_the_distance_from_its_rows():
    rows, _ = planted(np.random.default_rng(2))
    params = np.array([1e9, 1e10, 1e11])
    found = forecast_surface(rows, params, 20 * params)
    width = np.log(found.quantile(0.95) / found.quantile(0.05))
    assert width[0] < width[1] < width[2]
    assert found.form_scale[0] < found.form_scale[2]
    assert np.all(found.quantile(0.05) < found.quantile(0.5))


def test_forecast_weighs_laws_by_their_held_out_error():
    rows, _ = planted(np.random.default_rng(5))
    found = forecast_surface(rows, [3e9], [6e10])
    assert found.weights.sum() == pytest.approx(1.0)
    product = found.weights * (found.held_out_errors + 1e-4)
    assert product == pytest.approx(np.full(len(MEMBERS), product[0]))
    assert np.ptp(found.weights) > 0.05
    assert {law.member.name for law in found.laws} == {member.name for member in MEMBERS}


def test_laws_as_published_are_fitted_so_and_bring_no_interval_of_their_own():
    rows, law = planted(np.random.default_rng(12))
    rows["loss"] = replace(law, token_exponent=law.size_exponent).value(rows["params"], rows["tokens"]) * np.exp(
        0.003 * np.random.default_rng(13).standard_normal(40)
    )
    found = {item.member.name: item for item in forecast_surface(rows, [3e9], [6e10]).laws}
    public = {
        "chinchilla_as_published": fit_surface(**rows),
        "overtraining_as_published": fit_surface(**rows, form="overtraining", delta=np.inf, scale="nats"),
    }
    for name, fit in public.items():
        assert found[name].location == pytest.approx(np.log(fit.law.value([3e9], [6e10])))
        assert found[name].scale is None
        assert f"rmse_{fit.scale}" in found[name].fit.to_dict()
    assert set(public) == {name for name, item in found.items() if item.scale is None}


def test_pinned_floor_is_every_laws_and_narrows_the_forecast():
    rows, law = planted(np.random.default_rng(3))
    free, pinned = (forecast_surface(rows, [1e10], [2e11], floor=floor) for floor in (None, law.floor))
    assert {item.fit.law.floor for item in pinned.laws} == {law.floor}
    assert len({item.fit.law.floor for item in free.laws}) == len(MEMBERS)
    widths = [float(np.log(found.quantile(0.95) / found.quantile(0.05))[0]) for found in (free, pinned)]
    assert widths[1] < 0.8 * widths[0]
    assert float(pinned.quantile(0.5)[0]) == pytest.approx(float(law.value(1e10, 2e11)), rel=0.004)


def test_pinned_floor_covers_new_runs_of_planted_surfaces():
    rng = np.random.default_rng(17)
    covered = []
    for _ in range(12):
        rows, law = planted(rng)
        new = law.value([3e9, 1e10], [6e10, 2e11]) * np.exp(0.003 * rng.standard_normal(2))
        found = forecast_surface(rows, [3e9, 1e10], [6e10, 2e11], floor=law.floor)
        covered.extend((found.quantile(0.05) <= new) & (new <= found.quantile(0.95)))
    assert np.mean(covered) >= 0.8


def test_forecast_with_a_pinned_floor_shows_it_among_the_others():
    """A higher floor means a higher loss far beyond the runs, and the forecast follows its own profile."""
    table = planted_table(np.random.default_rng(4))[0]
    target = {"num_params": 1e11, "tokens": 2e12}
    free, *pinned = (forecast_final(table, target, floor=floor) for floor in (None, 1.2, 1.5, 1.8))
    points = [forecast.point for forecast in pinned]
    assert points[0] < points[1] < points[2]
    for forecast, floor in zip(pinned, (1.2, 1.5, 1.8), strict=True):
        floors = [row["floor"] for row in forecast.floor_profile]
        assert floors == sorted(floors)
        (row,) = (row for row in forecast.floor_profile if row["floor"] == floor)
        assert row["point"] == pytest.approx(forecast.point, rel=0.02)
        assert forecast.floor == floor
    assert len(free.floor_profile) == len(pinned[0].floor_profile) - 1
    with pytest.raises(ValueError, match=r"^floor 5 must lie in \[0, .*pin a smaller one"):
        forecast_final(table, target, floor=5)


def planted_table(rng: np.random.Generator) -> tuple[pd.DataFrame, SurfaceLaw]:
    """Runs of a law in parameters without embedding, both counts stated: width^3 weights, a vocabulary of 50,000."""
    rows, law = planted(rng)
    bare = np.asarray(rows["params"])
    table = pd.DataFrame({"num_params_without_embedding": bare, "tokens": rows["tokens"], "loss": rows["loss"]})
    return table.assign(num_params=with_embedding(bare)), law


def with_embedding(bare: np.ndarray) -> np.ndarray:
    return bare + 50_000 * 12 * np.cbrt(bare / 1.2e3)


def test_both_counts_of_parameters_are_fitted_each_on_its_own():
    table, _ = planted_table(np.random.default_rng(6))
    bare = 1e11
    counts = {"num_params": float(with_embedding(np.array(bare))), "num_params_without_embedding": bare}
    flops = {"flops": 6 * counts["num_params"] * 2e12}
    table = table.assign(flops=6 * table["num_params"] * table["tokens"])
    both = forecast_final(table, {**counts, **flops, "tokens": 2e12})
    single = {name: forecast_final(table, {name: value, **flops, "tokens": 2e12}) for name, value in counts.items()}
    assert both.method is not None
    assert [row["count"] for row in both.method["counts"]] == list(counts)
    for row in both.method["counts"]:
        alone = single[row["count"]]
        assert (row["point"], row["low"], row["high"]) == (alone.point, alone.low, alone.high)
        assert [item["count"] for item in (alone.method or {})["counts"]] == [row["count"]]
    low, high = sorted(forecast.point for forecast in single.values())
    assert high > 1.002 * low
    assert low < both.point < high
    assert (both.half_width["nats"] or 0.0) > np.mean([item.half_width["nats"] or 9.0 for item in single.values()])
    assert sum(law.get("weight", 0.0) for law in both.laws) == pytest.approx(1.0)
    assert len({law["role"] for law in both.laws}) == 2 * len(MEMBERS) + 1
    assert all(counts.keys() <= row.keys() for row in both.used)
    check_floor_profile_is_the_mixture_of_the_counts(both, single)


def check_floor_profile_is_the_mixture_of_the_counts(both: Forecast, single: dict[str, Forecast]) -> None:
    profiles = [row["floor_profile"] for row in (both.method or {})["counts"]]
    half = np.log((both.high or 0.0) / (both.low or 1.0)) / 2
    assert sum(row["weight"] for row in both.floor_profile) == pytest.approx(1.0)
    for place, row in enumerate(both.floor_profile):
        each = [profile[place] for profile in profiles]
        for name, item in zip(single, each, strict=True):
            assert item == pytest.approx(single[name].floor_profile[place], rel=1e-9, abs=1e-9)
            assert item["floor"] == row["floor"]
        weights = [item["weight"] for item in each]
        assert row["weight"] == pytest.approx(np.mean(weights))
        if min(weights) > 0:
            right = np.average([item["point"] for item in each], weights=weights)
            assert row["point"] == pytest.approx(right)
        assert np.log(row["high"] / row["point"]) == pytest.approx(half)
    assert max(abs(np.log(profiles[0][place]["point"] / profiles[1][place]["point"])) for place in range(13)) > 0.002


def test_target_in_a_count_the_points_lack_is_refused_in_one_line():
    table, _ = planted_table(np.random.default_rng(7))
    for mine, other in (("num_params", "num_params_without_embedding"), ("num_params_without_embedding", "num_params")):
        with pytest.raises(ValueError, match=f"counted as {other}, the points' as {mine}; give both") as caught:
            forecast_final(table.drop(columns=other), {other: 1e10, "tokens": 2e11, "flops": 1e22})
        assert "\n" not in str(caught.value)


def test_counts_stated_of_some_runs_alone_are_never_mixed():
    table, _ = planted_table(np.random.default_rng(8))
    target = {"num_params": 1.1e10, "num_params_without_embedding": 1e10, "tokens": 2e11, "flops": 6.6e21}
    table = table.assign(flops=6 * table["num_params"] * table["tokens"])
    upper = table["num_params"] > table["num_params"].median()
    one = forecast_final(table.assign(num_params=table["num_params"].where(upper)), target)
    assert [row["count"] for row in (one.method or {})["counts"]] == ["num_params_without_embedding"]
    halves = table.assign(
        num_params=table["num_params"].where(upper),
        num_params_without_embedding=table["num_params_without_embedding"].where(~upper),
    )
    with pytest.raises(ValueError, match="so that none are mixed"):
        forecast_final(halves, target)


def test_compute_of_runs_and_target_is_derived_from_one_count():
    """Runs state active and all parameters, the target all: compute is 6 times all on both sides."""
    table, _ = planted_table(np.random.default_rng(9))
    table = table.assign(num_active_params=0.1 * table["num_params"]).drop(columns="num_params_without_embedding")
    forecast = forecast_final(table, {"num_params": 1e11, "tokens": 2e12})
    largest = np.max((6 * table["num_params"] * table["tokens"]).to_numpy())
    assert forecast.extrapolation_ratio == pytest.approx(6e11 * 2e12 / largest)


def test_mixture_is_of_distributions_not_of_their_ends():
    """Two normal forecasts: each quantile of the mixture has the mean of their probabilities below it."""

    rows, _ = planted(np.random.default_rng(10))
    found = forecast_surface(rows, [1e10], [2e11])

    def normal(location: float, scale: float) -> SurfaceForecast:
        return replace(found, location=np.array([location]), scale=np.array([scale]), form_scale=np.zeros(1))

    pair = [normal(0.7, 0.01), normal(0.75, 0.02)]
    for probability in (0.05, 0.3, 0.5, 0.95):

        def excess(log_loss: float, wanted: float = probability) -> float:
            below = [special.ndtr((log_loss - item.location[0]) / item.scale[0]) for item in pair]
            return float(np.mean(below)) - wanted

        right = np.exp(optimize.brentq(excess, 0.6, 0.9))
        assert mixture_quantile(pair, probability)[0] == pytest.approx(right, rel=1e-4)
    assert mixture_quantile(pair[:1], 0.05)[0] == pair[0].quantile(0.05)[0]


def test_hold_out_takes_the_largest_runs_and_whole_budgets():
    flops = np.repeat([1.0, 2.0, 4.0, 8.0], 6)
    lower = lower_rows(flops)
    assert flops[lower].max() < flops[~lower].min()
    assert 3 <= np.sum(~lower) <= 12


def test_hold_out_extrapolates_where_the_largest_budget_is_most_of_the_runs():
    flops = np.repeat([1.0, 2.0, 4.0], [7, 14, 16])
    assert lower_rows(flops).tolist() == (flops < 4.0).tolist()


def test_forecast_of_olmo_13b_from_its_ladder():
    """Measured 2.4379; the ladder's authors forecast 2.3444, 3.83 % too low."""
    table = pd.read_csv(DATA / "olmo_c4.csv")
    hero = table.iloc[-1]
    forecast = forecast_final(table.iloc[:-1], {"num_params": hero["num_params"], "tokens": hero["tokens"]})
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low < hero["loss"] < forecast.high
    assert abs(forecast.point / hero["loss"] - 1) < 0.025
    assert forecast.method is not None
    assert forecast.method["law"] == "parameters and tokens"
    assert forecast.extrapolation_ratio == pytest.approx(201, rel=0.01)
    assert forecast.half_width["compute_factor"] is not None
    assert sum(row["weight"] for row in forecast.floor_profile) == pytest.approx(1.0)


def test_larger_model_of_no_more_compute_is_no_target_inside_the_ladder():
    """3B at one Chinchilla multiple takes less compute than 1.3B at ten: 2.8743 was measured, a hair above the band."""
    runs = pd.read_csv(DATA / "olmo_c4.csv").iloc[:-1]
    forecast = forecast_final(runs, {"num_params": 3.171e9, "tokens": 6.342e10})
    assert forecast.extrapolation_ratio < 1.0
    assert (forecast.low or 9.0) < 2.8743 < (forecast.high or 0.0) + 0.002
    with pytest.raises(ValueError, match="inside the ladder"):
        forecast_final(runs, {"num_params": 1e9, "tokens": 6.342e10})


def test_stated_error_of_a_corrected_run_widens_the_forecast():
    table = pd.read_csv(DATA / "olmo_c4.csv")
    target = {"num_params": 13202396160, "tokens": 5e12}
    runs = table.iloc[:-1]
    plain = forecast_final(runs, target)
    doubtful = forecast_final(runs.assign(loss_error=0.1), target)
    assert doubtful.point == pytest.approx(plain.point)
    assert (doubtful.half_width["nats"] or 0.0) > 1.2 * (plain.half_width["nats"] or 9.0)


@pytest.mark.parametrize("dataset", ["c4_original", "rpj", "rw_original"])
def test_forecast_of_gadres_large_models_beats_the_plain_robust_fit(dataset: str):
    table: Any = pd.read_csv(DATA / "gadre.csv").query("train_dataset == @dataset")
    small = table["num_params"] < 4.2e8
    rows = {"params": table["num_params"][small], "tokens": table["tokens"][small], "loss": table["loss"][small]}
    held = table[~small]
    found = forecast_surface(rows, held["num_params"], held["tokens"])
    plain = fit_surface(**rows).law.value(held["num_params"], held["tokens"])
    error, plain_error = (np.mean(np.abs(np.log(value / held["loss"]))) for value in (found.quantile(0.5), plain))
    assert error < 0.8 * plain_error
    assert np.all((found.quantile(0.05) < held["loss"]) & (held["loss"] < found.quantile(0.95)))


def test_forecast_refuses_too_few_runs_and_one_line():
    rows, _ = planted(np.random.default_rng(0))
    with pytest.raises(UnfitForecast, match="7 runs"):
        forecast_surface({key: column[:7] for key, column in rows.items()}, [1e10], [2e11])
    with pytest.raises(ValueError, match="one line"):
        forecast_surface({**rows, "tokens": 20 * rows["params"]}, [1e10], [2e11])


def test_discrepancy_follows_its_rows_and_forgets_them_far_away():
    logs = np.stack([np.linspace(0, 4, 30), np.linspace(0, 4, 30)], axis=1)
    bump = 0.02 * np.sin(logs[:, 0])
    law = Linearised(
        residuals=bump,
        rows=np.ones((30, 1)),
        targets=np.ones((2, 1)),
        prior_mean=np.zeros(1),
        prior_covariance=np.array([[1e-8]]),
        spread=0.005,
        trust=np.ones(30),
    )
    mean, scale = predict(law, logs, np.array([[1.5, 1.5], [40.0, 40.0]]))
    assert mean[0] == pytest.approx(0.02 * np.sin(1.5), abs=0.003)
    assert abs(mean[1]) < 0.002
    assert scale[1] > 2 * scale[0]
