"""Gradient norm and drop fraction along a larger run: planted curves back, better than a copy of the next smaller."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.whole_curves.curve_rows import smooth_curve
from rungwise.analysis.whole_curves.metric_curves import forecast_metric

METRIC = "train/grad_norm"
PROGRESS = np.arange(1, 401) / 400
AT = np.linspace(0.02, 1.0, 50)


def grad_norm(log_size: float, warmup: float = 0.1) -> np.ndarray:
    """Peaks at the end of the warm-up, higher on larger runs."""
    phase = np.interp(PROGRESS, [0, warmup, 1], [0, 0.1, 1])
    return (0.2 + 0.03 * log_size) * (1 + 2 * np.exp(-(((phase - 0.1) / 0.08) ** 2)))


def table(name: str, log_size: float, rng, *, spread: float = 0.1, warmup: float = 0.1, rate: float = 1e-3) -> Any:
    values = grad_norm(log_size, warmup) * np.exp(spread * rng.standard_normal() + 0.1 * rng.standard_normal(400))
    learning_rate = rate * np.minimum(PROGRESS / warmup, 1.0) * (1.05 - PROGRESS)
    learning_rate[warmup < PROGRESS] = rate * (1.0 - 0.9 * (PROGRESS[warmup < PROGRESS] - warmup))
    frame = {"run": name, "flops": np.exp(log_size), "progress": PROGRESS, METRIC: values}
    return pd.DataFrame({**frame, "learning_rate": learning_rate})


def test_metric_forecast_beats_a_copy_of_the_next_smaller_and_holds_the_run():
    """Runs that spread by 10 %: a copy takes over the next smaller's own luck."""
    errors, inside, all_inside = [], [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tables = [table(f"r{k}", float(k), rng) for k in range(10)]
        expected = np.interp(AT, PROGRESS, grad_norm(10.0))
        truth = expected * np.exp(0.1 * rng.standard_normal())
        forecast = forecast_metric(pd.concat(tables), {"flops": np.exp(10.0)}, METRIC, progress=AT)
        copy = np.exp(smooth_curve(PROGRESS, tables[-1][METRIC], AT))
        errors.append([np.abs(np.log(each / expected)).mean() for each in (forecast["value"], copy)])
        inside.append(np.mean((forecast["low"] <= truth) & (truth <= forecast["high"])))
        all_inside.append(np.all((forecast["low_all"] <= truth) & (truth <= forecast["high_all"])))
    ours, copied = np.mean(errors, axis=0)
    assert ours < 0.9 * copied
    assert np.mean(inside) >= 0.85
    assert np.mean(all_inside) >= 0.8


def test_metric_forecast_compares_runs_at_equal_phase_of_their_schedules():
    """A warm-up of a fixed number of steps: 40 % of the small runs, 10 % of the hero."""
    rng = np.random.default_rng(1)
    tables = [table(f"r{k}", float(k), rng, spread=0.0, warmup=w) for k, w in enumerate((0.4, 0.3, 0.25, 0.2))]
    schedule = table("hero", 4.0, rng, warmup=0.1)[["progress", "learning_rate"]]
    truth = grad_norm(4.0, 0.1)
    missed = [
        np.abs(
            np.log(
                forecast_metric(
                    pd.concat(tables), {"flops": np.exp(4.0)}, METRIC, progress=PROGRESS[8:], schedule=each
                )["value"]
                / truth[8:]
            )
        ).mean()
        for each in (schedule, None)
    ]
    assert missed[0] < 0.5 * missed[1]


def test_metric_forecast_prefers_runs_of_the_targets_learning_rate():
    """Nine runs at one rate, and a tenth, of another rate and three times the norm, nearest to a target of the nine."""
    rng = np.random.default_rng(2)
    tables = [table(f"r{k}", float(k), rng, spread=0.0, rate=1e-3) for k in range(9)]
    odd = table("odd", 8.5, rng, spread=0.0, rate=2e-4)
    odd[METRIC] *= 3.0
    schedule = tables[0][["progress", "learning_rate"]]
    target = {"flops": np.exp(9.0)}
    missed = [
        np.abs(np.log(forecast_metric(pd.concat([*tables, odd]), target, METRIC, progress=AT, schedule=each)["value"]
                      / np.interp(AT, PROGRESS, grad_norm(9.0)))).mean()
        for each in (schedule, None)
    ]  # fmt: skip
    assert missed[0] < 0.15 < missed[1]


def test_drop_fractions_with_zeros_are_forecast_as_they_are(ladder, hero):
    runs, run = ladder(3), hero(3)
    tables = []
    for each in runs:
        rows = each.trajectory
        drops = np.where(rows["moe/drop_fraction"] < 0.003, 0.0, rows["moe/drop_fraction"])
        progress = rows["tokens"] / each.plan["tokens"]
        tables.append(pd.DataFrame({"run": each.run, **each.plan, "progress": progress, "moe/drop_fraction": drops}))
    forecast = forecast_metric(pd.concat(tables), run.plan, "moe/drop_fraction", progress=[0.02, 0.1, 0.5, 1.0])
    truth = 0.1 * np.exp(-np.array([0.02, 0.1, 0.5, 1.0]) / 0.05) + 0.005
    assert np.all((forecast["low"] <= truth) & (truth <= forecast["high"]))
    assert np.all(forecast["low"] >= 0.0)


def test_metric_forecast_uses_parameters_among_runs_of_one_compute():
    rng = np.random.default_rng(4)
    tables = [
        table(f"r{k}", float(k), rng, spread=0.0).assign(flops=1.0 + 0.01 * rng.random(), num_params=np.exp(float(k)))
        for k in range(5)
    ]
    forecast = forecast_metric(
        pd.concat(tables), {"flops": 1.0, "num_params": np.exp(5.0)}, METRIC, progress=PROGRESS[8:]
    )
    assert np.abs(np.log(forecast["value"] / grad_norm(5.0)[8:])).mean() < 0.12


def test_metric_forecast_hardly_believes_a_trend_of_runs_of_nearly_one_size():
    """Ten runs within 20 % of each other in size, 10 % apart by luck: a line through them says anything."""
    missed = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tables = [table(f"r{k}", 5.0 + 0.02 * k, rng) for k in range(10)]
        forecast = forecast_metric(pd.concat(tables), {"flops": np.exp(6.3)}, METRIC, progress=AT)
        missed.append(np.abs(np.log(forecast["value"] / np.interp(AT, PROGRESS, grad_norm(6.3)))).mean())
    assert np.mean(missed) < 0.17


def test_metric_forecast_follows_a_trend_that_the_rungs_span():
    """Four rungs over four e-folds, no luck: nearly the whole step to a target one further."""
    rng = np.random.default_rng(6)
    tables = [table(f"r{k}", float(k), rng, spread=0.0) for k in range(4)]
    forecast = forecast_metric(pd.concat(tables), {"flops": np.exp(4.0)}, METRIC, progress=AT)
    steps = np.log([forecast["value"].mean() / grad_norm(3.0).mean(), grad_norm(4.0).mean() / grad_norm(3.0).mean()])
    assert steps[0] > 0.6 * steps[1] > 0.0


def test_metric_forecast_refuses_bad_input():
    rng = np.random.default_rng(5)
    tables: Any = pd.concat([table(f"r{k}", float(k), rng) for k in range(3)])
    with pytest.raises(UnfitForecast, match="2 rungs"):
        forecast_metric(tables[tables["run"] != "r0"], {"flops": 100.0}, METRIC)
    with pytest.raises(ValueError, match="share none of"):
        forecast_metric(tables, {"tokens": 100.0}, METRIC)
    with pytest.raises(ValueError, match="lack columns"):
        forecast_metric(tables, {"flops": 100.0}, "train/update_norm")
    with pytest.raises(ValueError, match="must lie within"):
        forecast_metric(tables, {"flops": 100.0}, METRIC, progress=[2.0])
