"""Detectors one by one: closed forms, planted faults, and each with its quiet control."""

import math

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.alerts import Row, Signal
from rungwise.analysis.detection.baseline import Window
from rungwise.analysis.detection.drift import LossDrift
from rungwise.analysis.detection.gap import EvalGap
from rungwise.analysis.detection.level import LevelShift
from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.detection.reference import Reference
from rungwise.analysis.detection.sequential import Charts, false_alarm_rows, height_for
from rungwise.analysis.detection.spike import LossSpike
from rungwise.analysis.forecast import forecast_final


def row(step: int, **values: float) -> Row:
    return Row(step=step, tokens=None, progress=None, values={name.replace("__", "/"): v for name, v in values.items()})


def fed(detector, losses, metric: str = "train/loss", *, every: int = 1) -> list[tuple[int, Signal]]:
    """Signals at level 1 and above, with their steps."""
    rows = (Row(step=every * (k + 1), tokens=None, progress=None, values={metric: x}) for k, x in enumerate(losses))
    signals = [(r.step, detector.observe(r)) for r in rows]
    return [(step, signal) for step, signal in signals if signal is not None and signal.level >= 1.0]


@pytest.mark.parametrize("allowance", [0.2, 0.5, 1.25])
def test_chart_height_and_false_alarm_rows_are_inverse(allowance: float):
    assert false_alarm_rows(height_for(3e6, allowance), allowance) == pytest.approx(3e6, rel=1e-6)


def test_false_alarms_of_white_noise_come_as_often_as_said():
    """Siegmund's formula against simulation: 200,000 rows, an alarm wanted each 500."""
    rng = np.random.default_rng(0)
    charts, alarms = Charts((0.5,), rows=500.0), 0
    for step, score in enumerate(rng.standard_normal(200_000).tolist()):
        if charts.add(step, score) >= 1.0:
            alarms += 1
            charts.reset()
    assert alarms == pytest.approx(400, rel=0.15)


def test_chart_dates_a_shift_and_says_how_unusual_it_is():
    charts = Charts((0.25, 1.0), rows=1e6)
    levels = [charts.add(step, 0.0 if step < 50 else 2.0) for step in range(60)]
    assert max(levels[:50]) == 0.0
    assert charts.level >= 1.0
    assert charts.since == 50
    assert charts.probability(60) < 60e-6
    assert charts.probability(10**12) == 1.0


def test_line_is_not_bent_by_outliers_nor_taught_to_rise():
    rng = np.random.default_rng(1)
    window = Window(256)
    for step in range(100, 356):
        x = math.log(step)
        window.add(step, x, 3.0 - 0.4 * x + 0.01 * rng.standard_normal() + (1.0 if step % 50 == 0 else 0.0))
    line = window.line()
    assert line.slope == pytest.approx(-0.4, abs=0.01)
    assert line.at(math.log(300)) == pytest.approx(3.0 - 0.4 * math.log(300), abs=0.003)
    assert line.spread == pytest.approx(0.01, rel=0.35)
    rising = Window(64)
    for step in range(64):
        rising.add(step, float(step), 0.01 * step)
    assert rising.line(rise=0.0).slope == 0.0


@pytest.mark.parametrize(("shift", "delay"), [(0.02, 300), (0.05, 60), (0.1, 12)])
def test_level_shift_without_a_forecast_is_found_soon(shift: float, delay: int):
    rng = np.random.default_rng(3)
    step = np.arange(1, 6001)
    loss = 3.0 + 4.0 * step**-0.35 + 0.04 * rng.standard_normal(6000)
    assert fed(LevelShift(), loss) == []
    found, signal = fed(LevelShift(), loss + shift * (step > 4000))[0]
    assert 0 < found - 4000 <= delay
    assert abs(signal.since - 4000) < 100
    assert signal.observed - (signal.expected or 0) == pytest.approx(shift, rel=0.7)
    assert (signal.probability or 1) < 0.01


def test_clean_falling_curves_without_noise_are_quiet():
    """What misleads a straight line in log step: warm-up, a convex fall, a plateau, a decay to nothing."""
    step = np.arange(1, 3001)
    convex = 2.0 + 4.0 * np.exp(-step / 60) + 1.5 * step**-0.3
    plateau = np.where(step < 300, 4.0 - np.log(np.minimum(step, 200)) / 4, 4.0 - np.log(200) / 4 - 0.0002 * step)
    decayed = 3.0 + 2.0 * step**-0.3 - 0.2 * np.clip((step - 2000) / 1000, 0, 1)
    for loss in (convex, plateau, decayed):
        assert fed(LevelShift(), loss) == []


def test_slow_rise_under_every_threshold_is_found():
    rng = np.random.default_rng(0)
    step = np.arange(8000)
    flat = 3.0 + 0.04 * rng.standard_normal(8000)
    assert fed(LossDrift(), flat) == []
    found, signal = fed(LossDrift(), flat + 1e-5 * np.maximum(step - 2000, 0))[0]
    assert found < 7500
    assert signal.level < 3.0


def test_spike_that_recovers_is_a_warning_and_one_that_stays_turns_critical():
    rng = np.random.default_rng(0)
    quiet = 2.5 + 0.01 * rng.standard_normal(500)
    short, lasting = quiet.copy(), quiet.copy()
    short[100:130] += np.linspace(0.5, 0.0, 30)
    lasting[100:] += 0.3
    assert {signal.severity for _, signal in fed(LossSpike(), short)} == {"warning"}
    signals = fed(LossSpike(), lasting)
    turned = [step for step, signal in signals if signal.severity == "critical"]
    assert turned[0] == 101 + LossSpike.PATIENCE - 1
    assert "not recovering" in signals[-1][1].explanation


def test_evaluation_parting_from_training_is_information():
    rng = np.random.default_rng(0)
    seen = []
    for fault in (0.0, 0.15):
        detector = EvalGap()
        for step in range(1, 2001):
            values = {"train/loss": 3.0 - (fault if step > 1200 else 0.0) + 0.04 * rng.standard_normal()}
            if step % 50 == 0:
                values["eval/loss"] = 3.05 + 0.003 * rng.standard_normal()
            signal = detector.observe(Row(step=step, tokens=None, progress=None, values=values))
            if signal is not None and signal.level >= 1.0:
                seen.append((fault, step, signal.severity))
                break
    ((fault, step, severity),) = seen
    assert (fault, severity) == (0.15, "info")
    assert 1200 < step <= 1350


def subsets(*, noisy: float = 0.0, everywhere: float = 0.0, onset: int = 30) -> list[Row]:
    rng = np.random.default_rng(5)
    rows = []
    for k in range(45):
        late = k >= onset
        parts = {f"eval/{name}/loss": 3.0 - 0.1 * math.log(k + 1) + 0.01 * rng.standard_normal() + late * everywhere
                 for name in "abcdefgh"}  # fmt: skip
        parts["eval/a/loss"] += late * noisy
        values = {**parts, "eval/loss": float(np.mean(list(parts.values())))}
        rows.append(Row(step=100 * (k + 1), tokens=None, progress=None, values=values))
    return rows


def alarms(rows: list[Row]) -> list[tuple[int, Signal]]:
    detector = LevelShift(rule="eval_level", metric="eval/loss")
    signals = [(index, detector.observe(each)) for index, each in enumerate(rows)]
    return [(index, signal) for index, signal in signals if signal is not None and signal.level >= 1.0]


def test_one_noisy_subset_does_not_move_the_verdict_and_all_of_them_do():
    assert alarms(subsets()) == []
    assert alarms(subsets(noisy=0.8)) == []
    index, signal = alarms(subsets(everywhere=0.1))[0]
    assert 30 <= index <= 34
    assert signal.carrier in tuple("abcdefgh")
    without = [
        Row(step=each.step, tokens=None, progress=None, values={"eval/loss": each.values["eval/loss"]})
        for each in subsets(noisy=0.8)
    ]
    assert alarms(without) != []  # negative control: the mean alone is moved by 0.1


def test_gap_is_priced_with_its_range_over_the_floors():
    """Reference hero: 0.012 nats above 2.04 with floor 1.5 is 28 % more compute."""
    points = [
        {"run": name, "flops": flops, "loss": loss}
        for name, flops, loss in [
            ("a", 2.6497e19, 3.0154), ("b", 1.7261e20, 2.7809), ("c", 1.3813e21, 2.5638), ("d", 7.7418e21, 2.4063),
        ]
    ]  # fmt: skip
    target = {"flops": 2.6109e24}
    cost = Pricing(forecast_final(points, target, floor=1.5)).cost(2.04, 0.012)
    assert cost["cost"] == pytest.approx(0.28, abs=0.005)
    assert (cost["cost_low"] or 1) < 0.24
    assert 0.28 < (cost["cost_high"] or 0) < 0.6
    assert Pricing(forecast_final(points, target, floor=1.5)).cost(2.04, -0.01) == {}


def test_reference_reads_the_registered_curve_and_its_slope(ladder, hero):
    from rungwise.analysis.points import ladder_points

    table = pd.DataFrame({"progress": [0.1, 0.2, 0.4, 1.0], "loss": [3.0, 2.8, 2.6, 2.5], "low": 2.0, "high": 4.0})
    forecast = forecast_final(ladder_points(ladder()), hero().plan).with_curve(table, metric="train/loss")
    reference = Reference.of(forecast, "train/loss")
    assert reference is not None
    assert reference.at(0.05) is None
    middle = reference.at(0.3)
    assert middle is not None
    assert (middle.loss, middle.slope) == pytest.approx((2.7, -0.2 / math.log(2)))
    end = reference.at(1.7)
    assert end is not None
    assert end.loss == pytest.approx(2.5)
    assert Reference.of(forecast, "eval/loss") is None
