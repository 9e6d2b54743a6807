"""Published incidents, as series made from published figures: the watch says what is right, in time, and no more."""

from dataclasses import replace
from functools import cache

import pytest

from rungwise.analysis.alerts import Alert
from rungwise.analysis.benchmarks.incidents import (
    SWITCH,
    Incident,
    gradient_norm_rise,
    incidents,
    judge,
    misjudged,
    tables,
)

ALL = {incident.name: incident for incident in incidents()}


@cache
def judged(name: str) -> list[Alert]:
    return judge(ALL[name])


@pytest.mark.parametrize("name", ALL)
def test_incident_is_judged_rightly(name: str):
    assert misjudged(ALL[name], judged(name)) is None


def test_declared_rise_of_the_norm_is_a_slope_change_with_its_carrier():
    (alert,) = judged("gradient norm 0.28 → 0.59, declared")
    assert (alert.carrier, alert.severity) == ("head", "info")
    assert alert.event == f"the declared transport change at step {SWITCH}"
    assert "a slope change, not an undeclared rise" in alert.explanation
    assert "of the squared norm" in alert.explanation


@pytest.mark.parametrize(("every", "noise"), [(50, 0.05), (100, 0.02), (100, 0.0)])
def test_undeclared_rise_is_slow_and_found_within_15_000_steps(every: int, noise: float):
    table = gradient_norm_rise(every=every, noise=noise)
    (alert,) = judge(Incident(name="", table=table, verdict=""))
    assert (alert.rule, alert.severity) == ("grad_norm_rise", "warning")
    assert SWITCH < alert.step <= SWITCH + 15_000
    assert judge(Incident(name="", table=gradient_norm_rise(every=every, noise=noise, slope=1.0), verdict="")) == []


def test_a_wrong_verdict_is_seen():
    quiet, loud = ALL["macro moved by one noisy subset"], ALL["rung stopped at 80 %"]
    assert misjudged(loud, []) == "none of silence spoke"
    (alert,) = judged(loud.name)
    assert misjudged(quiet, [alert]) == "silence spoke"
    assert misjudged(loud, [replace(alert, step=1)]) == "silence spoke at step 1"


def test_table_has_a_row_an_incident():
    some = [ALL[name] for name in ("non-finite by step 2", "rung stopped at 80 %", "macro moved by one noisy subset")]
    ((title, table, note),) = tables(some)
    assert title == "Published incidents"
    assert table["incident"].tolist() == [incident.name for incident in some]
    assert table["the watch"].tolist() == ["nonfinite at 2 (critical)", "silence at 16,060 (warning)", "nothing"]
    assert set(table["right"]) == {"yes"}
    assert "made from published figures" in note
