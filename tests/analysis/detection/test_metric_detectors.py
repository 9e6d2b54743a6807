"""Rules beside the losses: each finds its planted fault, and is quiet on the same run without it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.alerts import Alert
from rungwise.analysis.detection.metric_detectors import comparable_drops
from rungwise.analysis.detection.rolling import Level, Steps, Trend
from rungwise.analysis.divergence import Monitor, replay, trajectory_rows
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.points import ladder_points

NORM = "train/grad_norm"

BLOOM = {
    12695: (2.463556, 0.174), 31214: (2.198845, 0.242), 31215: (2.220424, 0.947), 31216: (2.595213, 2.390),
    31217: (2.241558, 15.886), 31218: (2.345279, 145.119), 31219: (5.098124, 960.351), 31220: (3.492029, 353.201),
    31221: (3.213059, 379.330), 31222: (2.804948, 650.246), 31250: (2.215699, 0.267), 31251: (2.235667, 0.205),
}  # fmt: skip
"""Iteration: loss, gradient norm, as quoted in BigScience's chronicles of the 176B run (Apache-2.0)."""


def noisy(values: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    return values * np.exp(share * np.random.default_rng(seed).standard_normal(len(values)))


def run(steps: int = 1500, /, **columns: np.ndarray) -> pd.DataFrame:
    step = np.arange(steps)
    loss = noisy(2.0 + 1.5 * (step + 20.0) ** -0.3, 0.01, 99)
    return pd.DataFrame({"step": step, "train/loss": loss, **columns})


def rules(alerts: list[Alert]) -> set[str]:
    return {alert.rule for alert in alerts}


@pytest.mark.parametrize(("kink", "found"), [(0.0, False), (2e-4, True)])
def test_trend_finds_a_kink_and_not_a_line(kink: float, found: bool):
    trend, rng = Trend(gap=0.04, rise=0.15), np.random.default_rng(0)
    worst = 0.0
    for step in range(6000):
        value = 1e-4 * step + kink * max(step - 3000, 0) + 0.1 * rng.standard_normal()
        now = trend.see(step, value)
        worst = max(worst, now.level if now and step > 3000 else 0.0)
    assert (worst >= 1.0) == found


def test_trend_takes_a_fall_that_flattens_for_no_rise():
    trend = Trend(gap=0.04, rise=0.15)
    levels = [now.level for step in range(6000) if (now := trend.see(step, 2.0 * math.exp(-step / 800)))]
    assert levels
    assert max(levels) < 1.0


def test_trend_forgets_rows_that_come_again():
    once, twice = Trend(gap=0.04, rise=0.15), Trend(gap=0.04, rise=0.15)
    values = [1e-3 * step + 0.05 * math.sin(step) for step in range(1024)]
    for step, value in enumerate(values):
        once.see(step, value)
    for step, value in enumerate(values[:1000]):
        twice.see(step, value + (5.0 if step >= 896 else 0.0))  # what the lost attempt wrote
    twice.rewind(896)
    for step, value in enumerate(values[896:], start=896):
        twice.see(step, value)
    assert once.now
    assert twice.now
    assert twice.now.slope == pytest.approx(once.now.slope, rel=0.05)
    assert twice.now.rise == pytest.approx(once.now.rise, rel=0.05)
    assert twice.now.score == pytest.approx(once.now.score, rel=0.05)


def test_steps_finds_a_jump_and_neither_a_spike_nor_a_trend():
    scores = {}
    for name, shape in {
        "jump": lambda step: 1.0 * (step >= 300),
        "spike": lambda step: 5.0 * (step == 300),
        "trend": lambda step: 0.01 * step,
    }.items():
        steps, rng = Steps(least=0.01), np.random.default_rng(1)
        seen = [steps.see(step, shape(step) + 0.05 * rng.standard_normal()) for step in range(400)]
        scores[name] = max(jump.score for jump in seen if jump)
    assert scores["jump"] > 8.0
    assert max(scores["spike"], scores["trend"]) < 8.0


def test_level_is_not_moved_by_one_outlier():
    level = Level(64, prior=0.1)
    for step in range(200):
        level.add(step, 1.0 + 0.1 * math.sin(step) + (100.0 if step == 150 else 0.0))
    assert level.centre == pytest.approx(1.0, abs=0.03)
    assert level.span == pytest.approx(64, abs=1)


def test_burst_is_reported_before_the_loss_peaks_and_its_recovery_recognised():
    """BLOOM-176B: the norm leads the loss peak at 31,219; no intervention was needed."""
    monitor = Monitor()
    changes = [
        alert
        for step, (loss, norm) in BLOOM.items()
        for alert in monitor.update({"step": step, "train/loss": loss, NORM: norm})
    ]
    norms = [alert for alert in changes if alert.metric == NORM]
    assert norms[0].step < 31219
    assert norms[0].since == 31216
    assert (norms[0].state, norms[0].severity) == ("open", "warning")
    assert (norms[-1].state, norms[-1].updated) == ("resolved", 31251)
    assert norms[0].probability is not None
    assert norms[0].probability < 1e-3


def test_burst_on_the_published_log_lines(reference_data: Path):
    lines = pd.read_csv(reference_data / "bigscience_chronicles" / "log_lines.csv")
    lines = lines[lines["doc"].str.contains("tr11-176B-ml/chronicles.md")]
    table = pd.DataFrame({"step": lines["iteration"], "train/loss": lines["lm_loss"], NORM: lines["grad_norm"]})
    (alert,) = [alert for alert in replay(table) if alert.metric == NORM]
    assert alert.step < 31219
    assert (alert.state, alert.updated) == ("resolved", 31251)


def test_single_rows_of_a_thousand_times_are_no_burst():
    norm = noisy(np.full(1500, 0.3), 0.13)
    norm[[400, 900, 1200]] *= 1000.0
    norm[401] *= 40.0
    assert replay(run(**{NORM: norm})) == []


def test_rise_that_every_rung_shows_is_no_rise():
    """Norms that double in the last 60 % of every rung and of the run."""
    step = np.arange(1600)
    tokens = 1000.0 * (step + 1)
    shape = 0.3 * (1.0 + np.maximum(step / 1600 - 0.4, 0.0) / 0.6)
    rungs = pd.concat(
        run(1600, **{NORM: noisy(k * shape, 0.05, k), "tokens": tokens}).assign(run=f"r{k}") for k in (1, 2)
    )
    hero = run(1600, **{NORM: noisy(shape, 0.05), "tokens": tokens, "progress/fraction": (step + 1) / 1600})
    alone = [alert for alert in replay(hero) if alert.metric == NORM]
    assert [alert.rule for alert in alone] == ["grad_norm_rise"]
    assert "tokens)" in alone[0].explanation
    assert [alert for alert in replay(hero, peers=rungs) if alert.metric == NORM] == []
    steeper = hero.assign(**{NORM: hero[NORM] * np.exp(np.maximum(step - 1000, 0) / 600)})
    (found,) = [alert for alert in replay(steeper, peers=rungs) if alert.rule == "grad_norm_rise"]
    assert found.step > 1000
    assert "2 rungs at equal progress" in found.explanation


def test_rise_hidden_in_one_group_names_the_group():
    step = np.arange(2100)
    quiet = {
        NORM: noisy(np.full(2100, 1.0), 0.05, 1),
        "grad_norm/experts": noisy(np.full(2100, 0.99), 0.05, 2),
        "grad_norm/router": noisy(np.full(2100, 0.02), 0.05, 3),
    }
    assert replay(run(2100, **quiet)) == []
    risen = quiet | {"grad_norm/router": quiet["grad_norm/router"] * np.exp(np.maximum(step - 1200, 0) / 700)}
    (alert,) = replay(run(2100, **risen))
    assert (alert.rule, alert.metric, alert.severity) == ("group_norm_rise", "grad_norm/router", "warning")
    assert 1200 < alert.step < 2100


def test_sender_and_receiver_drops_are_judged_apart():
    step = np.arange(2100)
    quiet = {
        f"moe/{name}drop_fraction": noisy(np.full(2100, level), 0.1, k)
        for k, (name, level) in enumerate({"": 0.05, "sender_": 0.03, "receiver_": 0.02}.items())
    }
    assert replay(run(2100, **quiet)) == []
    sender = quiet["moe/sender_drop_fraction"] * np.exp(np.maximum(step - 1200, 0) / 500)
    (alert, *_) = replay(run(2100, **quiet | {"moe/sender_drop_fraction": sender}))
    assert (alert.rule, alert.metric) == ("sender_drop_fraction_rise", "moe/sender_drop_fraction")
    assert alert.step < 2000


def test_drops_are_compared_with_rungs_of_the_same_transport_only(ladder, hero, peers):
    table = pd.DataFrame(
        {"run": ["a", "b", "c"], "transport": ["ragged", "pooled", "pooled"], "tokens_per_rank": [8, 8, 4]}
    )
    table["moe/drop_fraction"], table["train/loss"] = 0.1, 2.0
    kept = comparable_drops(table, {"transport": "pooled", "tokens_per_rank": 8})
    assert kept["moe/drop_fraction"].notna().tolist() == [False, True, False]
    assert kept["train/loss"].notna().tolist() == [True] * 3
    assert comparable_drops(table, {})["moe/drop_fraction"].notna().tolist() == [True] * 3
    run, rungs = hero(4, steps=500), peers(ladder(4)[-1:]).assign(transport="ragged")
    forecast = forecast_final(ladder_points(ladder(4)), run.plan)
    pooled = run.trajectory.assign(**{"moe/drop_fraction": run.trajectory["moe/drop_fraction"] + 0.1})
    for transport, found in (("ragged", True), ("pooled", False)):
        of_hero = replace(forecast, target=forecast.target | {"transport": transport})
        assert ("drop_fraction" in rules(replay(pooled, of_hero, peers=rungs))) == found


@pytest.mark.parametrize(
    ("metric", "level", "share", "scale", "rule"),
    [
        ("moe/router_entropy", 3.3, 0.003, -3000.0, "router_entropy_fall"),
        ("moe/expert_load_max_over_mean", 1.3, 0.06, 1500.0, "expert_load_rise"),
        ("moe/rank_load_max_over_mean", 1.1, 0.02, 1500.0, "rank_load_rise"),
        ("moe/router_bias_abs_max", 3.0, 0.1, 500.0, "router_bias_rise"),
        ("moe/frequency_deviation", 0.11, 0.2, 500.0, "imbalance_rise"),
        ("moe_worst_layer/dead_experts", 0.0, 0.0, 1.0, "dead_experts"),
        ("moe/router_bias_abs_max", 3.0, 0.1, 1.0, "frozen"),
    ],
)
def test_router_faults_are_found_and_healthy_routers_quiet(
    metric: str, level: float, share: float, scale: float, rule: str
):
    """From step 1,200 on the metric moves by a factor of e in `scale` steps, or as the rule's name says."""
    step = np.arange(2100)
    healthy = noisy(np.full(2100, level), share)
    assert replay(run(2100, **{metric: healthy})) == []
    broken = healthy * np.exp(np.minimum(np.maximum(step - 1200, 0) / scale, 10.0))
    if rule == "dead_experts":
        broken = np.where(step >= 1200, 2.0, healthy)
    if rule == "frozen":
        broken = np.where(step >= 1200, healthy[1200], healthy)
    alerts = replay(run(2100, **{metric: broken}))
    assert rules(alerts) == {rule}
    assert alerts[0].metric == metric
    assert 1200 < alerts[0].step < 2000


def test_any_metric_that_is_not_finite_alerts_and_no_data_does_not():
    monitor = Monitor()
    for step in range(60):
        row: dict = {"step": step, "train/loss": 3.0 + 0.01 * math.sin(step), NORM: 1.0, "moe/drop_fraction": 0.1}
        row[NORM] = "Infinity" if step == 40 else 1.0 + 0.1 * math.sin(step)
        row["moe/drop_fraction"] = "NaN" if step == 20 else 0.1 + 0.01 * math.sin(step)  # 0 of 0 assignments
        row["param_norm/experts"] = "NaN" if step == 50 else 10.0
        monitor.update(row)
    (alert,) = monitor.alerts
    assert (alert.rule, alert.metric, alert.step, alert.severity) == ("nonfinite_metric", NORM, 40, "critical")


@pytest.mark.parametrize(
    ("metric", "level", "factor"),
    [
        (NORM, 0.3, 1000.0), (NORM, 0.3, 1e-3), ("perf/tokens_per_second", 2.5e6, 1e-3), ("train/loss", 2.5, 1000.0),
        ("train/loss", 2.5, 1.0 / math.log(2.0)), ("moe/drop_fraction", 0.03, 100.0),
    ],
)  # fmt: skip
def test_change_of_unit_is_reported_as_such_and_not_as_divergence(metric: str, level: float, factor: float):
    values = noisy(np.full(600, level), 0.03)
    values[300:] *= factor
    table = run(600).assign(**{metric: values})
    alerts = replay(table)
    found = [alert for alert in alerts if alert.rule == "unit_change"]
    assert [(alert.metric, alert.since) for alert in found] == [(metric, 300)]
    if abs(math.log(factor)) > 1.0:
        assert rules(alerts) == {"unit_change"}
        assert found[0].step <= 310


def test_faults_in_the_new_unit_are_still_found():
    values = noisy(np.full(900, 0.3), 0.05)
    values[300:] *= 1000.0
    values[700:712] *= 30.0
    assert [alert.rule for alert in replay(run(900, **{NORM: values}))] == ["unit_change", "grad_norm"]


def test_an_ordinary_rise_is_no_change_of_unit():
    for factor in (1.3, 3.0, 40.0, 700.0):
        values = noisy(np.full(600, 0.3), 0.03)
        values[300:] *= factor
        assert "unit_change" not in rules(replay(run(600, **{NORM: values})))


@pytest.mark.parametrize(("factor", "severity"), [(1.0, None), (3.0, "warning"), (0.2, "info")])
def test_drops_are_judged_by_their_registered_curve(ladder, hero, factor: float, severity: str | None):
    forecast = forecast_final(ladder_points(ladder(4)), hero(4).plan)
    at = np.linspace(0.01, 1.0, 40)
    band = pd.DataFrame({"progress": at, "loss": 0.05 + 0.1 * np.exp(-at / 0.05)})
    band = band.assign(low=0.7 * band["loss"], high=1.4 * band["loss"])
    forecast = forecast.with_curve(band, metric="moe/drop_fraction")
    table = hero(4).trajectory[["step", "tokens", "train/loss"]]
    progress = table["tokens"] / forecast.target["tokens"]
    drops = noisy(factor * np.interp(progress, at, band["loss"]), 0.1)
    found = [
        alert for alert in replay(table.assign(**{"moe/drop_fraction": drops}), forecast) if "drop" in alert.metric
    ]
    assert [(alert.rule, alert.severity) for alert in found] == (
        [] if severity is None else [("drop_fraction_forecast", severity)]
    )


def test_rows_chunks_and_whole_agree_over_every_kind_of_metric():
    rng = np.random.default_rng(5)
    step = np.arange(900)
    table = run(
        900,
        **{
            NORM: noisy(np.full(900, 0.3), 0.1) * np.where(step > 600, 8.0, 1.0),
            "grad_norm/head": noisy(np.full(900, 0.2), 0.1),
            "moe/drop_fraction": np.where(step > 500, 0.2, 0.05) * np.exp(0.1 * rng.standard_normal(900)),
            "train/learning_rate": np.where(step > 700, 3e-3, 1e-3),
            "perf/tokens_per_second": np.where(step > 400, 6e5, 1e6),
        },
        time=1e9 + 20.0 * step + 2000.0 * (step > 800),
    )
    rows, chunks = Monitor(), Monitor()
    changes = [change for row in trajectory_rows(table) for change in rows.update(row)]
    chunked = [change for cut in range(0, 900, 137) for change in chunks.extend(table.iloc[cut : cut + 137])]
    assert rows.alerts == chunks.alerts == replay(table)
    assert changes == chunked
    assert {"undeclared_change", "silence", "throughput"} <= rules(rows.alerts)
