"""The alert benchmark on the public runs: what `docs/benchmarks.md` claims, where a right value exists."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.benchmarks.divergence import delivered, first_delay, hero_table, oracle_delays
from rungwise.analysis.benchmarks.watched import collapsing, llmc, olmo, own_forecast, reference_hero, repeats, xlstm
from rungwise.analysis.divergence import Monitor, replay, trajectory_rows


def test_own_forecast_and_delay_on_a_planted_run():
    rng = np.random.default_rng(0)
    step = np.arange(1, 5001)
    log = pd.DataFrame({"step": step, "train/loss": 3.0 + 4.0 * step**-0.4 + 0.04 * rng.standard_normal(5000)})
    forecast = own_forecast(log, 3000, horizon=5000)
    curve = forecast.curve_table("train/loss")
    assert curve is not None
    assert curve["loss"].iloc[-1] == pytest.approx(3.0 + 4.0 * 5000**-0.4, abs=0.03)
    rows = list(trajectory_rows(log))
    monitor = Monitor(forecast)
    for row in rows[:2999]:
        monitor.update(row)
    assert 0 < first_delay(monitor, rows[2999:], 0.1) <= 15
    quiet = Monitor(forecast)
    assert delivered(quiet.extend(log)) == []


def test_reference_hero_is_quiet_and_a_shift_is_found(reference_data: Path):
    table, forecast = reference_hero(reference_data)
    alerts = replay(table, forecast)
    assert {alert.family for alert in alerts} == {"forecast_miss"}
    assert {alert.severity for alert in alerts} == {"info"}
    assert "the lead over the forecast shrank" in alerts[0].explanation
    _, cases, _ = hero_table(reference_data)
    assert cases["run_change after evaluations"].tolist()[0] == "none"
    assert cases["run_change after evaluations"].tolist()[1] <= 5
    assert cases["run_change after evaluations"].tolist()[2] <= 2


@pytest.mark.slow
def test_diverging_xlstm_runs_are_found_and_their_peers_left_alone(reference_data: Path):
    runs = [run for run in xlstm(reference_data) if run.name.startswith(("lv1", "8sf", "c", "d"))]
    first = {
        run.name: min((a.step for a in delivered(replay(run.table, peers=run.peers))), default=None) for run in runs
    }
    assert all((first[run.name] or math.inf) <= 450 for run in runs if run.diverged)
    assert sum(run.diverged for run in runs) == 2
    assert [run.name for run in runs if not run.diverged and first[run.name] is not None] == []
    assert len(runs) > 15


@pytest.mark.slow
def test_healthy_public_curves_are_quiet_and_shifts_are_found(reference_data: Path):
    """A seventh of the benchmark: none of these curves was tuned on, but for the llm.c log."""
    healthy = [run for run in repeats(reference_data) if not run.tuned][:6]
    healthy += list(collapsing(reference_data, "c5m"))[:4] + list(olmo(reference_data))[::6]
    assert [run.name for run in healthy if delivered(replay(run.table))] == []
    log = llmc(reference_data)
    rows = list(trajectory_rows(log))
    monitor = Monitor(own_forecast(log, 9000, horizon=len(rows)))
    for row in rows[6000:8999]:
        monitor.update(row)
    assert delivered(monitor.alerts) == []
    assert first_delay(monitor, rows[8999:10500], 0.05) <= 60


@pytest.mark.slow
def test_oracle_needs_as_many_steps_as_published(reference_data: Path):
    delays, alarms = oracle_delays(llmc(reference_data)["train/loss"].to_numpy())
    assert alarms == 0
    medians = [float(np.median(delays[shift])) for shift in (0.02, 0.05, 0.10)]
    assert medians == pytest.approx([50, 14, 7], rel=0.25)
