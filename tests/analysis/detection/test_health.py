"""Silence, stalls, missing metrics, throughput and deadlines: what a run does not say is never health."""

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.alerts import Alert
from rungwise.analysis.divergence import Monitor, replay
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.points import ladder_points


def rules(alerts: list[Alert]) -> list[str]:
    return [alert.rule for alert in alerts]


def timed(monitor: Monitor, times: list[float], *, first: int = 0) -> list[Alert]:
    return [
        alert
        for step, time in enumerate(times, start=first)
        for alert in monitor.update({"step": step, "time": time, "train/loss": 3.0 - 0.001 * step})
    ]


def test_silence_alerts_at_its_limit_and_once():
    monitor = Monitor(silence_s=600.0)
    assert timed(monitor, [30.0 * k for k in range(21)]) == []  # last at 600 s
    assert monitor.tick(900.0) == []
    (alert,) = monitor.tick(1200.0)
    assert (alert.rule, alert.family, alert.step, alert.state) == ("silence", "fault", 20, "open")
    assert monitor.tick(1500.0) == []
    assert monitor.state == "alert"
    (over,) = timed(monitor, [1600.0], first=21)
    assert (over.rule, over.state) == ("silence", "resolved")
    assert monitor.state == "healthy"


def test_finished_runs_may_be_silent_and_slow_ones_are_not_silent():
    finished = Monitor()
    timed(finished, [30.0 * k for k in range(20)])
    assert finished.tick(9000.0, ended=True) == []
    slow = Monitor()
    timed(slow, [300.0 * k for k in range(20)])
    assert slow.tick(19 * 300.0 + 2900.0) == []
    assert rules(slow.tick(19 * 300.0 + 3100.0)) == ["silence"]


def test_first_step_may_compile_and_nothing_read_is_said():
    monitor = Monitor()
    assert monitor.tick(0.0) == []
    assert monitor.tick(1500.0) == []
    assert monitor.state == "cannot_judge"
    (alert,) = monitor.tick(3700.0)
    assert alert.rule == "silence"
    assert "nothing was read" in alert.explanation
    assert monitor.state == "alert"


def test_heartbeats_without_steps_are_a_stall():
    monitor = Monitor()
    timed(monitor, [10.0 * k for k in range(50)])
    assert monitor.tick(1000.0, heartbeat=990.0) == []
    (alert,) = monitor.tick(1100.0, heartbeat=1095.0)
    assert alert.rule == "silence"
    assert "stalled at step 49" in alert.explanation
    assert "signs of life" in alert.explanation


def test_clock_that_is_behind_the_records_is_said():
    monitor = Monitor()
    timed(monitor, [5000.0 + 10.0 * k for k in range(50)])
    (alert,) = monitor.tick(1000.0)
    assert "set the clocks" in alert.explanation


def test_replay_gives_the_silence_a_live_watch_gave():
    times = np.r_[np.arange(100) * 10.0, 5000.0 + np.arange(100) * 10.0]
    table = pd.DataFrame({"step": np.arange(200), "time": times, "train/loss": 3.0})
    live = Monitor()
    for row in table.to_dict("records"):
        if row["step"] == 100:
            for now in (1300.0, 1595.0, 2000.0, 4000.0):
                live.tick(now)
        live.update(row)
    assert rules(live.alerts) == ["silence"]
    assert live.alerts == replay(table)
    assert live.alerts[0].step == 99


def test_metric_that_stops_while_others_go_on_alerts():
    table = pd.DataFrame({"step": np.arange(300), "train/loss": 3.0 - 0.001 * np.arange(300), "train/grad_norm": 1.0})
    table["train/grad_norm"] += 0.1 * np.sin(table["step"])
    table["eval/loss"] = np.where(table["step"] % 40 == 0, 3.0 - 0.001 * table["step"], np.nan)
    assert replay(table) == []
    stopped = table.copy()
    stopped.loc[stopped["step"] >= 150, "train/grad_norm"] = np.nan
    (alert,) = replay(stopped)
    assert (alert.rule, alert.metric, alert.since) == ("missing_metric", "train/grad_norm", 149)
    assert 199 <= alert.step <= 208
    stopped.loc[stopped["step"] >= 250, "train/grad_norm"] = 1.0
    assert replay(stopped)[0].state == "resolved"
    evaluations = table.copy()
    evaluations.loc[evaluations["step"] > 100, "eval/loss"] = np.nan
    (alert,) = replay(evaluations)
    assert (alert.metric, alert.since) == ("eval/loss", 80)
    assert 200 <= alert.step <= 208


def test_metric_that_ends_with_a_declared_transport_is_not_missed():
    table = pd.DataFrame({"step": np.arange(300), "train/loss": 3.0, "moe/sender_drop_fraction": 0.02})
    table["moe/sender_drop_fraction"] += 0.001 * np.sin(table["step"])
    table.loc[table["step"] >= 150, "moe/sender_drop_fraction"] = np.nan
    assert rules(replay(table)) == ["missing_metric"]
    assert replay(table, events=[{"step": 150, "kind": "transport"}]) == []


def rated(rate: np.ndarray) -> pd.DataFrame:
    """A run of 10 million tokens a step at these tokens a second."""
    return pd.DataFrame(
        {"step": np.arange(len(rate)), "time": np.cumsum(1e7 / rate), "train/loss": 3.0, "perf/tokens_per_second": rate}
    )


def noise(rows: int) -> np.ndarray:
    return np.exp(0.02 * np.random.default_rng(0).standard_normal(rows))


@pytest.mark.parametrize(("rows", "found"), [(8, False), (300, True)])
def test_throughput_that_stays_down_alerts_and_a_hiccup_does_not(rows: int, found: bool):
    step = np.arange(700)
    alerts = replay(rated(1e6 * noise(700) * np.where((step >= 300) & (step < 300 + rows), 0.6, 1.0)))
    assert rules(alerts) == (["throughput"] if found else [])
    if found:
        assert alerts[0].step - 300 <= 45  # 200 s of work lost at 0.4 of 17 s a row, and half of 20 rows
        assert "% under the usual" in alerts[0].explanation
        assert 0.37 <= float(alerts[0].explanation.split(", ")[1].split("%")[0]) / 100 <= 0.43
        assert alerts[0].state == "resolved"


@pytest.mark.parametrize(("minutes", "found"), [(8, False), (45, True)])
def test_small_loss_of_throughput_must_last(minutes: int, found: bool):
    """18 % under, as another job on the machine takes for a while: 12 s a row."""
    step = np.arange(700)
    rate = 1e6 * noise(700) * np.where((step >= 300) & (step < 300 + 5 * minutes), 0.82, 1.0)
    alerts = replay(rated(rate))
    assert rules(alerts) == (["throughput"] if found else [])
    if found:
        assert 900.0 <= 12.2 * (alerts[0].step - 300) <= 1500.0


@pytest.mark.parametrize(("last", "found"), [(80, False), (250, True)])
def test_slow_spells_a_run_has_had_before_are_no_news(last: int, found: bool):
    """A backup every 400 rows takes 40 % for 25 rows, short of an alert; the last one must cost far more to be one."""
    step = np.arange(2000)
    slow = (step % 400 >= 300) & (step % 400 < 325)
    slow[1900:] = False
    usual = rated(1e6 * noise(2000) * np.where(slow, 0.6, 1.0))
    assert replay(usual) == []
    slow[1700 : 1700 + last] = True
    pace = np.where(slow, np.where(step >= 1700, 0.8, 0.6), 1.0)
    assert rules(replay(rated(1e6 * noise(2000) * pace))) == (["throughput"] if found else [])


def test_wandering_throughput_is_judged_by_its_own_wandering():
    """A shared machine: the rate goes up and down by a fourth, once in 377 rows; the first ebb may be news."""
    step = np.arange(3000)
    wander = np.exp(0.25 * np.sin(step / 60.0))
    assert [alert.step for alert in replay(rated(1e6 * noise(3000) * wander)) if alert.step > 377] == []
    late = replay(rated(1e6 * noise(3000) * wander * np.where(step >= 2000, 0.4, 1.0)))
    assert [alert.rule for alert in late if alert.step > 377] == ["throughput"]


def test_pause_between_two_attempts_is_no_slow_row():
    """Slow for 20 rows before it was killed, fast for the rest; it came back a day later."""
    step = np.arange(600)
    table = rated(1e6 * noise(600) * np.where((step >= 280) & (step < 300), 0.6, 1.0))
    table["attempt"] = np.where(step < 300, 1, 2)
    table.loc[step >= 300, "time"] += 86400.0
    assert "throughput" not in rules(replay(table))


def test_throughput_is_taken_from_tokens_where_it_is_not_logged():
    step = np.arange(400)
    pace = np.where(step >= 200, 30.0, 10.0)
    table = pd.DataFrame({"step": step, "time": np.cumsum(pace), "tokens": 1e6 * (step + 1), "train/loss": 3.0})
    (alert,) = replay(table)
    assert alert.rule == "throughput"
    assert alert.observed == pytest.approx(1e6 / 30.0)


def test_declared_slowdown_is_quiet():
    step = np.arange(600)
    rate = np.where(step >= 300, 0.6e6, 1e6)
    table = pd.DataFrame(
        {"step": step, "time": np.cumsum(1e7 / rate), "train/loss": 3.0, "perf/tokens_per_second": rate}
    )
    assert replay(table, events=[{"step": 300, "kind": "precision"}]) == []


@pytest.mark.parametrize(("stall_s", "late"), [(0.0, False), (2500.0, True)])
def test_deadline_out_of_reach_is_said_with_the_horizon_that_fits(ladder, hero, stall_s: float, late: bool):
    """1,200 steps of 10 s with 1,000 s to spare; a stall halfway eats them."""
    run = hero(4)
    forecast = forecast_final(ladder_points(ladder(4)), run.plan)
    table = run.trajectory[["step", "tokens", "train/loss"]].iloc[:900].copy()
    table["time"] = 10.0 * table["step"] + np.where(table["step"] > 600, stall_s, 0.0)
    monitor = Monitor(forecast, deadline=13_000.0)
    monitor.extend(table)
    found = [alert for alert in monitor.alerts if alert.rule == "schedule_risk"]
    assert len(found) == late
    if late:
        (alert,) = found
        assert alert.step in range(600, 640)
        assert alert.severity == "warning"
        assert alert.observed > 13_000.0
        assert "stalls and restarts included" in alert.explanation
        fits = float(alert.explanation.split("until then ")[1].split(" of ")[0])
        assert 0.5 * forecast.target["tokens"] < fits < forecast.target["tokens"]
