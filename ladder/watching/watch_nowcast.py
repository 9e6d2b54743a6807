"""The nowcast of a hero under watch, from its records as they come. Information: no state and no alert rests on it."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final, Self

import pandas as pd

from rungwise.ladder.nowcast import HeroNowcast, make_nowcast, no_longer_forecast
from rungwise.ladder.predict import FamilyRuns
from rungwise.ladder.tables import nowcast_text

LEAST_ADVANCE: Final = 0.01
"""Share of the run that must have been added before the nowcast is made again."""
TOLD_EVERY: Final = 0.05
"""Share of the run between two lines of `--follow`."""


class LiveNowcast:
    """Keeps the values of the forecast's own metric, and makes the nowcast when asked, at most every 1 % of the run.

    Memory: a step and a value a row of that metric, 16 bytes.
    """

    def __init__(self, runs: FamilyRuns):
        assert runs.registered is not None
        self._forecast = runs.registered
        self._plan = runs.plan["hero"] if runs.hero is None else runs.hero.plan
        self._name = runs.plan["hero"]["name"]
        self._steps, self._values = array("q"), array("d")
        self._events: list[Mapping[str, Any]] = []
        self._made: HeroNowcast | None = None
        self._seen = 0
        self._told = 0.0
        self.num_made = 0
        """Nowcasts made so far."""

    @classmethod
    def of(cls, runs: FamilyRuns, run: str) -> Self | None:
        """None for a run that no forecast is about."""
        return cls(runs) if runs.registered is not None and run == runs.plan["hero"]["name"] else None

    def take(self, record: Mapping[str, Any]) -> None:
        """One record of the journal; what a restart took back is forgotten."""
        value = record["values"].get(self._forecast.metric) if record["kind"] == "metrics" else None
        if record["kind"] == "attempt":
            self._forget(record["step"] + 1)
        elif value is not None:
            self._forget(record["step"])
            self._steps.append(record["step"])
            self._values.append(float(value))

    def declare(self, event: Mapping[str, Any]) -> None:
        self._events.append(event)
        self._seen = 0

    def current(self) -> HeroNowcast | None:
        """The nowcast of all values so far, or of 1 % less; None where there is none (`no_longer_forecast`)."""
        last = self._steps[-1] if self._steps else 0
        if last < self._seen or last - self._seen >= LEAST_ADVANCE * self._plan["steps"]:
            self._seen, self._made = last, self._make()
        return self._made

    def news(self) -> str | None:
        """One line where the run has come 5 % further since the last one."""
        current = self.current()
        if current is None or current.made.progress < self._told + TOLD_EVERY:
            return None
        self._told = current.made.progress
        return nowcast_text(current.to_dict())

    def _make(self) -> HeroNowcast | None:
        metric, steps = self._forecast.metric, int(self._plan["steps"])
        if no_longer_forecast(self._forecast, self._plan, self._events, metric) is not None:
            return None
        rows = pd.DataFrame({"progress": [step / steps for step in self._steps], "loss": self._values})
        try:
            made = make_nowcast(self._forecast, rows, run=self._name, steps=steps, metric=metric)
        except ValueError:  # not far enough yet
            return None
        self.num_made += 1
        return made

    def _forget(self, step: int) -> None:
        first = bisect_left(self._steps, step)
        del self._steps[first:], self._values[first:]
