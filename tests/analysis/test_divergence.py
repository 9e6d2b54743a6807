"""Alarms and their quiet controls, on planted runs."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.analysis.alerts import Alert, overall_state
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.divergence import Monitor, replay, trajectory_rows
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import ladder_points


def flat(levels: list[float], *, noise: float = 0.01, seed: int = 0, **columns: object) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    loss = np.asarray(levels) + noise * rng.standard_normal(len(levels))
    return pd.DataFrame({"step": np.arange(len(levels)), "train/loss": loss, **columns})


def raised(alerts: list[Alert]) -> list[tuple[str, int]]:
    return [(alert.rule, alert.step) for alert in alerts]


@pytest.fixture
def registered(ladder, hero, curves) -> Forecast:
    runs, plan = ladder(4), hero(4).plan
    forecast = forecast_final(ladder_points(runs), plan)
    forecast = forecast.with_curve(forecast_curve(curves(runs, "eval/loss"), plan, final=forecast))
    return forecast.with_curve(forecast_curve(curves(runs, "train/loss"), plan), metric="train/loss")


def test_nonfinite_loss_alerts_once_at_its_step():
    losses = [3.0, 2.9, math.nan, math.nan, math.nan]
    (alert,) = replay(pd.DataFrame({"step": range(5), "train/loss": losses}))
    assert (alert.rule, alert.step, alert.severity, alert.state) == ("nonfinite", 2, "critical", "open")
    assert "best loss so far 2.9" in alert.explanation


def test_nonfinite_words_are_understood_live_and_finite_values_are_judged_again():
    monitor = Monitor()
    for step in range(60):
        monitor.update({"step": step, "train/loss": "NaN" if step == 30 else 3.0 + 0.01 * math.sin(step)})
    (alert,) = monitor.alerts
    assert (alert.rule, alert.step, alert.state) == ("nonfinite", 30, "resolved")
    assert monitor.state == "healthy"


def test_missing_losses_in_evaluation_rows_are_not_nonfinite():
    table = flat([3.0] * 60)
    table["eval/loss"] = np.where(table["step"] % 10 == 0, 3.0, np.nan)
    table.loc[table["step"] % 10 == 0, "train/loss"] = np.nan
    assert replay(table) == []
    assert next(trajectory_rows(table)).keys() == {"step", "eval/loss"}


def test_spike_threshold_contains_the_mean():
    window = [3.0 + 0.05 * (-1) ** k for k in range(20)]
    assert replay(flat([*window, 3.02], noise=0.0)) == []


def test_spike_opens_worsens_and_resolves_as_one_alert():
    levels = [2.5] * 60 + [2.7, 2.9, 3.2, 3.0, 2.8] + [2.5] * 60
    monitor, states = Monitor(), []
    for row in trajectory_rows(flat(levels)):
        states += [alert.state for alert in monitor.update(row) if alert.rule == "loss_spike"]
    assert states[0] == "open"
    assert states[-1] == "resolved"
    assert len([alert for alert in monitor.alerts if alert.rule == "loss_spike"]) == 1
    assert monitor.alerts[0].since == 60


def test_spike_of_one_row_is_quiet_but_a_huge_one_is_not():
    assert replay(flat([2.5] * 60 + [2.65] + [2.5] * 60)) == []
    assert raised(replay(flat([2.5] * 60 + [3.5] + [2.5] * 60)))[0] == ("loss_spike", 60)


def test_declared_change_rebaselines_and_undeclared_change_alerts():
    levels = [2.5] * 50 + [2.80] + [2.75] * 39 + [3.05] * 5
    event = {"step": 50, "kind": "mixture"}
    assert ("loss_spike", 50) in raised(replay(flat(levels)))
    declared = raised(replay(flat(levels), events=[event]))
    assert ("loss_spike", 90) in declared
    assert all(step >= 90 for _, step in declared)
    assert replay(flat([2.5] * 50 + [2.1] * 50), events=[event]) == []
    broken = flat(levels)
    broken.loc[55, "train/loss"] = math.nan
    assert ("nonfinite", 55) in raised(replay(broken, events=[event]))


def test_note_event_does_not_rebaseline():
    levels = [2.5] * 50 + [2.80] + [2.75] * 39
    assert ("loss_spike", 50) in raised(replay(flat(levels), events=[{"step": 50, "kind": "note"}]))


def test_restart_repeating_steps_is_quiet():
    monitor = Monitor()
    steps = [*range(60, 100), *range(80, 140)]
    for step in steps:
        monitor.update({"step": step, "train/loss": 3.0 - 0.006 * step})
    assert monitor.alerts == []


def test_eval_drift_alerts_at_three_percent_over_the_best_and_resolves():
    losses = [2.5, 2.52, 2.5402, 2.5605, 2.581, 2.6016, 2.6224, 2.51]
    (alert,) = replay(pd.DataFrame({"step": range(8), "eval/loss": losses}))
    assert (alert.rule, alert.step, alert.since, alert.expected) == ("eval_drift", 4, 0, 2.5)
    assert alert.state == "resolved"
    assert replay(pd.DataFrame({"step": range(8), "eval/loss": np.linspace(2.6, 2.5, 8)})) == []


@pytest.mark.parametrize("noise", [0.04, 0.1])
@pytest.mark.parametrize("steps", [300, 1500])
def test_short_healthy_runs_are_quiet(ladder, hero, peers, noise: float, steps: int):
    for seed in range(3):
        run = hero(seed, steps=steps, noise=noise)
        assert replay(run.trajectory) == []
        assert replay(run.trajectory, peers=peers(ladder(seed, noise=noise))) == []


def test_hero_within_its_forecast_is_quiet(ladder, hero, peers, registered: Forecast):
    alerts = replay(hero(4).trajectory, registered, peers=peers(ladder(4)))
    assert [alert for alert in alerts if alert.severity != "info"] == []


def test_level_shift_is_found_priced_and_dated(hero, registered: Forecast):
    table = hero(4).trajectory.copy()
    table.loc[table["step"] >= 700, ["train/loss"]] += 0.08
    (alert,) = [alert for alert in replay(table, registered) if alert.rule == "loss_level"]
    assert 700 <= alert.step <= 760
    assert abs(alert.since - 700) <= 20
    assert alert.family == "run_change"
    assert alert.observed - (alert.expected or 0) == pytest.approx(0.08, abs=0.04)
    assert (alert.cost or 0) > 0.1


def test_level_shift_without_a_forecast_is_found():
    rng = np.random.default_rng(1)
    levels = np.full(1500, 3.3)
    levels[1000:] += 0.05
    (alert,) = replay(flat(list(levels + 0.03 * rng.standard_normal(1500)), noise=0.0))
    assert alert.rule == "loss_level"
    assert 1000 <= alert.step <= 1080


def test_successor_of_a_forecast_is_judged_from_the_change_it_was_made_for(hero, registered: Forecast):
    table = hero(4).trajectory.copy()
    table[["train/loss", "eval/loss"]] += 0.25
    earlier = {"step": 300, "kind": "schedule", "change": {"steps": 900}, "forecast": "of the horizon between"}
    event = {"step": 500, "kind": "schedule", "change": {"steps": 1200}, "forecast": registered.hash}
    misses = [alert for alert in replay(table, registered, events=[earlier, event]) if alert.family == "forecast_miss"]
    assert misses
    assert min(alert.step for alert in misses) >= 500
    other = Monitor(registered, events=[event | {"forecast": "of another horizon"}])
    other.extend(table)
    assert any(alert.family == "forecast_miss" and alert.step < 500 for alert in other.alerts)
    assert any("forecast" in sentence for sentence in other.marked), "another horizon's forecast ends there"


def test_steady_offset_from_the_forecast_is_a_forecast_miss_only(hero, registered: Forecast):
    table = hero(4).trajectory.copy()
    table[["train/loss", "eval/loss"]] += 0.25
    alerts = replay(table, registered)
    assert {alert.rule for alert in alerts} == {"forecast_miss"}
    assert {alert.severity for alert in alerts} == {"warning"}
    assert {alert.family for alert in alerts} == {"forecast_miss"}


def test_better_than_forecast_is_information(hero, registered: Forecast):
    table = hero(4).trajectory.copy()
    table[["train/loss", "eval/loss"]] -= 0.2
    alerts = replay(table, registered)
    assert {(alert.rule, alert.severity) for alert in alerts} == {("forecast_miss", "info")}
    assert all("nats ahead of the forecast" in alert.explanation for alert in alerts)
    assert overall_state(alerts) == "healthy"


def test_run_that_never_learns_is_found_against_peers_and_alone(ladder, hero, peers):
    table = hero().trajectory.copy()
    rng = np.random.default_rng(0)
    table["train/loss"] = math.log(256) + 0.02 * rng.standard_normal(len(table))
    against = replay(table, peers=peers(ladder()))
    assert against[0].rule == "not_learning"
    assert against[0].step < 100
    alone = replay(table[["step", "train/loss"]], vocab_size=256)
    assert raised(alone) == [("not_learning", 200)]
    assert replay(hero().trajectory, vocab_size=256) == []


@pytest.mark.parametrize(
    ("metric", "rule", "fault"),
    [
        ("train/grad_norm", "grad_norm", lambda values: values * 4),
        ("moe/drop_fraction", "drop_fraction", lambda v: v + 0.1),
    ],
)
def test_metric_above_every_peer_alerts(ladder, hero, peers, metric: str, rule: str, fault):
    table = hero().trajectory.copy()
    late = table["step"] >= 600
    table.loc[late, metric] = fault(table.loc[late, metric])
    (alert,) = replay(table, peers=peers(ladder()))
    assert alert.rule == rule
    assert 600 <= alert.step <= 640


def test_alert_storm_is_one_alert_per_rule():
    rng = np.random.default_rng(0)
    levels = [3.0] * 100 + list(4.0 + rng.random(100))
    table = flat(levels)
    table.loc[140, "train/loss"] = math.nan
    opened = [alert.rule for alert in replay(table)]
    assert opened.count("loss_spike") == 1
    assert opened.count("nonfinite") == 1


@given(cuts=st.lists(st.integers(0, 400), max_size=6), seed=st.integers(0, 20), fault=st.integers(0, 399))
@settings(max_examples=15)
def test_replay_rows_chunks_and_whole_agree(cuts: list[int], seed: int, fault: int):
    levels = np.full(400, 3.0)
    levels[fault : fault + 150] += 0.4
    table = flat(list(levels), noise=0.03, seed=seed)
    table["eval/loss"] = np.where(table["step"] % 25 == 0, levels, np.nan)
    whole = replay(table)
    by_row, by_chunk = Monitor(), Monitor()
    changes = [change for row in trajectory_rows(table) for change in by_row.update(row)]
    bounds = [0, *sorted(cuts), 400]
    chunked = [c for a, b in itertools.pairwise(bounds) for c in by_chunk.extend(table.iloc[a:b])]
    assert by_row.alerts == by_chunk.alerts == whole
    assert changes == chunked


def test_overall_state_knows_silence_from_health():
    assert Monitor().state == "cannot_judge"
    monitor = Monitor()
    monitor.update({"step": 1, "perf/mfu": 0.4})
    assert monitor.state == "cannot_judge"
    monitor.update({"step": 2, "train/loss": 3.0})
    assert monitor.state == "healthy"
    monitor.update({"step": 3, "train/loss": "NaN"})
    assert monitor.state == "alert"


def test_peers_without_runs_are_refused():
    with pytest.raises(ValueError, match="peers lack columns"):
        Monitor(peers=pd.DataFrame({"train/loss": [1.0]}))
