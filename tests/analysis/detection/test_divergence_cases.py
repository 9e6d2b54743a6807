"""Right answers of the alert cases about losses, and one monitor however it is fed."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.analysis.alerts import Alert
from rungwise.analysis.benchmarks.todays_rules import alarms, fixed_thresholds, floor_rule, six_sigma
from rungwise.analysis.divergence import Monitor, replay, trajectory_rows
from rungwise.analysis.reading.trajectory import Points, build_trajectory


def rules(alerts: list[Alert]) -> list[tuple[str, int]]:
    return [(alert.rule, alert.step) for alert in alerts]


def test_nan_alerts_once_and_is_no_best_loss():
    """ALR-01: [3.0, 2.9, NaN, NaN, NaN]."""
    (alert,) = replay(pd.DataFrame({"step": range(5), "train/loss": [3.0, 2.9, math.nan, math.nan, math.nan]}))
    assert (alert.rule, alert.step) == ("nonfinite", 2)
    assert "best loss so far 2.9000" in alert.explanation


def test_six_sigma_of_today_contains_the_mean():
    """ALR-01: mean 3.0, sd 0.05, next 3.02 scores 0.4 against 6; the threshold is 3.3."""
    window = pd.Series([3.0 + 0.05 * (-1) ** k for k in range(20)])
    scale = 0.05 / window.std()
    window = 3.0 + (window - 3.0) * scale
    for value, fires in ((3.02, False), (3.29, False), (3.31, True)):
        table = pd.DataFrame({"train/loss": [*window, value]})
        assert six_sigma(table, window=20, least=20)[-1] == fires
    assert not six_sigma(pd.DataFrame({"train/loss": [*window[:19], 9.0]}), window=20, least=20).any()


def test_finite_values_after_a_nan_are_judged_against_the_finite_past():
    losses = [2.5 + 0.01 * (-1) ** k for k in range(80)]
    losses[40] = math.nan
    losses[60:63] = [3.4, 3.4, 3.4]
    assert rules(replay(pd.DataFrame({"step": range(80), "train/loss": losses})))[:2] == [
        ("nonfinite", 40),
        ("loss_spike", 60),
    ]


def restarted(offset: float, *, again: int = 140) -> Monitor:
    """ALR-03: steps 60 to 99, then 80 onwards, of loss = 3 - 0.006 step."""
    monitor = Monitor()
    for attempt, steps in ((1, range(60, 100)), (2, range(80, again))):
        for step in steps:
            loss = 3.0 - 0.006 * step + (offset if attempt == 2 else 0.0)
            monitor.update({"step": step, "train/loss": loss, "attempt": attempt})
    return monitor


def test_restart_is_no_jump_and_one_that_does_not_match_is_named():
    assert restarted(0.0).alerts == []
    mismatch = [alert for alert in restarted(0.08).alerts if alert.rule == "resume_mismatch"]
    assert len(mismatch) == 1
    assert (mismatch[0].since, mismatch[0].step) == (80, 82)
    assert "from step 80 on, the loss is +0.08 nats off" in mismatch[0].explanation


def test_restart_that_draws_other_data_is_quiet():
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for steps in (range(1, 400), range(300, 600)):
        for step in steps:
            monitor.update({"step": step, "train/loss": 3.0 - 0.001 * step + 0.05 * rng.standard_normal()})
    assert [alert for alert in monitor.alerts if alert.rule == "resume_mismatch"] == []


@pytest.mark.parametrize(("offset", "found"), [(0.0, False), (0.08, True)])
def test_replay_of_a_canonical_series_sees_the_overlap_too(offset: float, found: bool):
    step = np.r_[60:100, 80:140]
    attempt = np.r_[np.ones(40, dtype=int), np.full(60, 2)]
    loss = 3.0 - 0.006 * step + offset * (attempt == 2)
    points = Points(attempt=attempt, step=step, time=np.arange(100.0), columns={"train/loss": (np.arange(100), loss)})
    trajectory = build_trajectory(points, restored={1: 0, 2: 79})
    rows = list(trajectory_rows(trajectory))
    assert [row["step"] for row in rows] == step.tolist()
    assert any(alert.rule == "resume_mismatch" for alert in replay(trajectory)) == found


def test_drift_under_every_single_limit_is_found_at_the_fourth_evaluation():
    """ALR-04: eight evaluations, each rise under 0.8 %."""
    losses = [2.5, 2.52, 2.5402, 2.5605, 2.581, 2.6016, 2.6224, 2.6434]
    assert replay(pd.DataFrame({"step": range(4), "eval/loss": losses[:4]})) == []
    (alert,) = replay(pd.DataFrame({"step": range(5), "eval/loss": losses[:5]}))
    assert (alert.rule, alert.step, alert.since, alert.observed, alert.expected) == ("eval_drift", 4, 0, 2.581, 2.5)
    assert "3.2%" in alert.explanation
    (alert,) = replay(pd.DataFrame({"step": range(9), "eval/loss": [*losses, 2.51]}))
    assert (alert.state, alert.updated) == ("resolved", 8)
    assert replay(pd.DataFrame({"step": range(8), "eval/loss": [2.5, 2.6, 2.49, 2.48, 2.58, 2.47, 2.46, 2.45]})) == []


def mixture(*, event: bool, level: float = 2.75, nan_at: int | None = None) -> list[Alert]:
    """ALR-06: 2.50 ± 0.01, at 50 a change to 2.75 ± 0.01 (first value 2.80), at 90 a rise to 3.05."""
    rng = np.random.default_rng(0)
    loss = np.r_[np.full(50, 2.5), np.full(40, level), np.full(4, 3.05 if level > 2.5 else level)]
    loss += np.clip(0.01 * rng.standard_normal(loss.size), -0.02, 0.02)
    loss[50] = 2.80 if level > 2.5 else level
    if nan_at is not None:
        loss[nan_at] = math.nan
    events = [{"step": 50, "kind": "mixture"}] if event else []
    return replay(pd.DataFrame({"step": range(loss.size), "train/loss": loss}), events=events)


def test_announced_change_is_no_divergence_and_what_follows_is_judged_by_its_new_level():
    assert min(step for _, step in rules(mixture(event=False))) == 50
    after = rules(mixture(event=True))
    assert all(step >= 90 for _, step in after)
    assert ("loss_spike", 90) in after
    assert [alert for alert in mixture(event=True, level=2.1) if alert.severity != "info"] == []
    assert ("nonfinite", 55) in rules(mixture(event=True, nan_at=55))


@given(cuts=st.lists(st.integers(0, 300), max_size=5), seed=st.integers(0, 20), fault=st.integers(60, 280))
@settings(max_examples=8, deadline=None)
def test_rows_chunks_and_whole_agree_across_a_restart_and_subsets(cuts: list[int], seed: int, fault: int):
    rng = np.random.default_rng(seed)
    step = np.r_[1:201, 151:251]
    loss = 3.0 * step**-0.1 + 0.02 * rng.standard_normal(300) + 0.3 * (np.arange(300) >= fault)
    table = pd.DataFrame({"step": step, "train/loss": loss, "attempt": np.r_[np.ones(200), np.full(100, 2.0)]})
    for name in "abc":
        table[f"eval/{name}/loss"] = np.where(step % 10 == 0, loss, np.nan)
    table["eval/loss"] = np.where(step % 10 == 0, loss, np.nan)
    whole, by_row, by_chunk = replay(table), Monitor(), Monitor()
    changes = [change for row in trajectory_rows(table) for change in by_row.update(row)]
    bounds = [0, *sorted(cuts), 300]
    chunked = [c for a, b in itertools.pairwise(bounds) for c in by_chunk.extend(table.iloc[a:b])]
    assert by_row.alerts == by_chunk.alerts == whole
    assert changes == chunked
    assert whole


def test_todays_rules_fire_where_they_say():
    loss = np.full(400, 3.0) + 0.001 * (-1.0) ** np.arange(400)
    loss[300:] += 0.2
    table = pd.DataFrame({"step": np.arange(2001, 2401), "train/loss": loss, "train/grad_norm": 0.3})
    assert alarms(six_sigma(table)) == [300]
    assert alarms(floor_rule(table))[0] == 314  # the lowest of 15 rows
    assert not fixed_thresholds(table).any()
    assert alarms(fixed_thresholds(table.assign(**{"train/grad_norm": np.where(table["step"] > 2350, 2.5, 0.3)}))) == [
        350
    ]
    worse = pd.DataFrame({"step": range(3), "eval/loss": [2.5, 2.4, 2.45]})
    assert fixed_thresholds(worse).tolist() == [False, False, True]
