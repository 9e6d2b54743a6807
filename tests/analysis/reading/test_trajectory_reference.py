"""Trajectories of public runs, by the defaults: right answers and the figures of public tools, never worse.

They read the folder that RUNGWISE_REFERENCE_DATA names. What is measured is `benchmarks/trajectory.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.benchmarks.trajectory import (
    curve_score,
    grad_norm_scores,
    marin,
    marin_table,
    nowcast_scores,
    olmo,
    schedule_scores,
    speed_table,
    supercollapse,
)
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.nowcast import nowcast


@pytest.mark.parametrize(
    ("task", "smallest", "error"),
    [
        ("chess", 4, 0.26),
        ("chess", 5, 0.24),
        ("chess", 6, 0.107),
        ("chess", 7, 0.045),
        ("c5m", 4, 0.024),
        ("c5m", 5, 0.048),
    ],
)
def test_largest_run_from_the_smallest(reference_data: Path, task: str, smallest: int, error: float):
    """Percent from 5 % of the run on; the bounds are the published procedure's own errors on the same runs."""
    score = curve_score(supercollapse(reference_data, task, smallest))
    assert score["error %"] <= error
    assert score["in band"] >= 0.9
    assert score["in simultaneous band"]
    assert not score["rises"]


@pytest.mark.parametrize(("multiple", "error"), [("1xC", 1.2), ("2xC", 0.6), ("5xC", 0.4), ("10xC", 0.35)])
def test_olmo_3b_from_its_ladder(reference_data: Path, multiple: str, error: float):
    """Every law here forecasts the end of 3B too low, by up to 1.3 %; the band must say so."""
    score = curve_score(olmo(reference_data, multiple))
    assert score["error %"] <= error
    assert score["in band"] >= 0.95
    assert score["in simultaneous band"]


def test_reference_hero_lies_in_the_band_from_5_to_40_percent(reference_data: Path):
    case = marin(reference_data)
    (completed,) = case.rungs.attrs["completed"]
    assert completed["reached"] == pytest.approx(0.8003, abs=1e-3)
    score = curve_score(case)
    assert score["in band"] == 1.0
    assert score["in simultaneous band"]
    table = marin_table(reference_data)
    ours, theirs = (np.abs(table[key] - table["measured"]).mean() for key in ("ours", "team's forecast"))
    assert ours < theirs
    even = forecast_curve(case.rungs, case.target, progress=np.linspace(0.0501, 1.0, 20))
    assert np.all(np.diff(even["loss"]) < 0)
    assert even.attrs["steps_ratio"] == pytest.approx(19.44, abs=0.01)


def test_reference_heros_early_lead_is_within_what_its_steps_leave_open(reference_data: Path):
    """Told that the hero takes as many steps as its top rung, the same ladder would say more of its start."""
    case = marin(reference_data)
    few = {**case.target, "steps": float(np.max(case.rungs["steps"]))}
    starts = [forecast_curve(case.rungs, target, progress=[0.0501]).iloc[0] for target in (case.target, few)]
    widths = [np.log(start["high"] / start["low"]) for start in starts]
    assert widths[0] > 1.3 * widths[1]


def test_reference_heros_first_40_percent_narrow_its_final_interval(reference_data: Path):
    case = marin(reference_data)
    registered = forecast_curve(case.rungs, case.target)
    made = nowcast(registered, case.truth, degrees=registered.attrs["degrees"])
    widths = [each["high"] - each["low"] for each in (made.final, made.registered_final)]
    assert widths[0] < 0.85 * widths[1]
    assert abs(made.final["loss"] - made.registered_final["loss"]) < 0.03


def test_multi_power_law_on_six_held_out_schedules(reference_data: Path):
    scores: Any = schedule_scores(reference_data)
    assert len(scores) == 3
    assert scores["R²"].min() >= 0.997
    assert scores["error %"].max() < 0.21
    assert set(scores["starts agreeing"]) == {"8/8"}


@pytest.mark.slow
def test_gradient_norm_is_forecast_better_than_by_copying_the_next_smaller(reference_data: Path):
    scores: Any = grad_norm_scores(reference_data)
    assert np.all(scores["ours %"] < scores["copy %"])
    assert np.average(scores["ours %"] / scores["copy %"], weights=scores["runs held out"]) < 0.92
    assert scores["largest: ours %"].mean() < scores["largest: copy %"].mean()
    assert np.average(scores["in band"], weights=scores["runs held out"]) >= 0.88


@pytest.mark.slow
def test_nowcasts_of_public_runs_hold_and_help(reference_data: Path):
    scores: Any = nowcast_scores(reference_data)
    assert scores["in band"].mean() >= 0.85
    assert scores["end in interval"].mean() >= 0.85
    assert scores["width of the end, ratio"].median() < 0.85
    language = scores[scores["set"].str.startswith("OLMo")]
    assert language["nowcast error %"].mean() < 0.4 * language["registered error %"].mean()


def test_speed_table_measures_processor_time():
    (row,) = speed_table().to_dict("records")
    assert row["CPU s, median of 5"] > 0
