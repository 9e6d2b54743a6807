"""The life of one alert: it opens at its limit, says more only when it is worse, and closes well under it."""

from rungwise.analysis.alerts import Alert, Episode, Row, Signal, overall_state


class Levels:
    """A detector that fires as planned: one level and severity a row."""

    rule, metric, family, calm_rows = "planted", "train/loss", "run_change", 5

    def observe(self, row: Row) -> Signal | None:
        level, severity = row.values["level"], "critical" if row.values["critical"] else "warning"
        words = f"level {level:g}"
        return Signal(level=level, observed=level, expected=3.0, since=row.step, explanation=words, severity=severity)

    def rebaseline(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...
    def resolved(self) -> None: ...


def lived(*levels: float, critical_from: int = 99, acknowledged_at: int | None = None) -> tuple[Episode, list[Alert]]:
    """An episode and the changes it told, over rows of these levels."""
    episode, told = Episode(Levels()), []
    for step, level in enumerate(levels):
        values = {"level": level, "critical": float(step >= critical_from)}
        changed = episode.observe(Row(step=step, tokens=None, progress=None, values=values))
        told += [changed] if changed else []
        if step == acknowledged_at and (known := episode.acknowledge(step)):
            told.append(known)
    return episode, told


def states(told: list[Alert]) -> list[tuple[int, str]]:
    return [(alert.updated, alert.state) for alert in told]


def test_alert_opens_at_its_limit_and_counts_what_it_does_not_say():
    episode, told = lived(0.9, 1.0, 1.2, 1.4, 0.8, 1.1)
    assert states(told) == [(1, "open")]
    assert episode.alert is not None
    assert episode.alert.held_back == 3


def test_alert_worsens_by_half_or_by_severity_and_not_by_less():
    _, told = lived(1.0, 1.4, 1.5, 2.2, 2.3, 2.3, critical_from=5)
    assert states(told) == [(0, "open"), (2, "worsening"), (4, "worsening"), (5, "worsening")]
    assert [alert.severity for alert in told] == ["warning", "warning", "warning", "critical"]
    assert told[1].explanation == "level 1.5"


def test_alert_near_its_limit_neither_flickers_nor_closes():
    _, told = lived(1.0, *[0.6, 1.0] * 20)
    assert states(told) == [(0, "open")]


def test_alert_recovers_and_is_over_after_its_calm_rows_and_can_open_anew():
    _, told = lived(2.0, *[0.1] * 5, 1.0)
    assert states(told) == [(0, "open"), (3, "recovering"), (5, "resolved"), (6, "open")]
    assert [alert.step for alert in told] == [0, 0, 0, 6]


def test_alert_that_recovers_and_fires_again_is_open_as_before():
    _, told = lived(2.0, 0.1, 0.1, 0.1, 1.2)
    assert states(told) == [(0, "open"), (3, "recovering"), (4, "open")]


def test_alert_acknowledged_says_no_more_until_it_is_worse_or_over():
    assert states(lived(1.0, 1.2, *[0.1] * 5, acknowledged_at=0)[1]) == [
        (0, "open"),
        (0, "acknowledged"),
        (6, "resolved"),
    ]
    _, told = lived(1.0, 1.2, 1.6, acknowledged_at=0)
    assert states(told) == [(0, "open"), (0, "acknowledged"), (2, "worsening")]


def test_overall_state_asks_for_attention_while_nobody_knows():
    (opened, known), silent = lived(1.0, acknowledged_at=0)[1], []
    assert overall_state([opened]) == "alert"
    assert overall_state([known]) == overall_state(silent) == "healthy"
    assert overall_state(silent, judged=False) == "cannot_judge"
