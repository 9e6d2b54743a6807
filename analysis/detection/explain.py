"""What an alert says beyond its rule: who carries it, what was declared before it, how the ladder fared with the same.

Detectors say what was seen, what was expected, since when and how unusual. Here an alert that opens or worsens gets the
rest, once, as fields and in its sentence.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from rungwise.analysis.alerts import Alert, Row
from rungwise.analysis.detection.norm_detectors import GROUP_PREFIX
from rungwise.analysis.events import Change, preceding

REACH: Final = 0.1
"""A change explains what begins within this share of the steps so far after it; `LEAST_REACH` steps at least."""
LEAST_REACH: Final = 50
MOST_ROWS: Final = 20_000
"""Of a rung, thinned evenly, to look for precedents in."""

Replay = Callable[[pd.DataFrame], list[Alert]]


class Parts:
    """Which part of a norm carries its rise: squared norms of the parts, now and over the run's own past.

    Memory: of every fourth row, a mean of each square over 16 of them, kept at counts that double.
    """

    FAST: Final = 16
    EVERY: Final = 4

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._fast: dict[str, float] = {}
        self._past: dict[str, list[tuple[int, float]]] = {}
        self._rows = 0

    def add(self, row: Row) -> None:
        self._rows += 1
        if self._rows % self.EVERY:
            return
        count = self._rows // self.EVERY
        keep = count & (count - 1) == 0 or count % 1024 == 0
        for name, value in row.values.items():
            if name.startswith(self._prefix) and math.isfinite(value):
                square = value * value
                fast = self._fast.get(name)
                self._fast[name] = square if fast is None else fast + (square - fast) / min(count, self.FAST)
                if keep:
                    self._past.setdefault(name, []).append((row.step, self._fast[name]))

    def carrier(self, row: Row) -> tuple[str, str] | None:
        """The part whose square grew most since half as many steps ago, and a sentence; None without parts."""
        if not self._fast:
            return None
        then = {name: _at(self._past.get(name, []), row.step // 2) for name in self._fast}
        growth = {name: now - then[name] for name, now in self._fast.items()}
        name = max(growth, key=lambda part: growth[part])
        whole, grown = sum(self._fast.values()), sum(value for value in growth.values() if value > 0)
        share, part = self._fast[name] / whole, name.removeprefix(self._prefix)
        of_rise = growth[name] / grown if grown > 0 else share
        return part, f"{part} carries {of_rise:.0%} of the rise and {share:.0%} of the squared norm"


def _at(past: list[tuple[int, float]], step: int) -> float:
    """The oldest value kept from `step` on, else the newest."""
    return next((value for at, value in past if at >= step), past[-1][1] if past else 0.0)


class Explainer:
    """Knows the run's context as its rows pass by.

    Memory: squared norms by group (`Parts`), the best and the last loss of each evaluated subset, the declared changes.

    Args:
        peers: rows of the ladder's other runs. replay: judges one of them alone.
    """

    def __init__(self, peers: pd.DataFrame | None = None, *, replay: Replay | None = None):
        self._groups = Parts(GROUP_PREFIX)
        self._subsets: dict[str, tuple[float, float]] = {}
        self._changes: list[Change] = []
        self._peers = peers if peers is not None and len(peers) and {"run", "step"} <= set(peers.columns) else None
        self._replay = replay
        self._found: dict[str, dict[str, list[Alert]]] = {}
        self._added: dict[tuple[str, str, int], list[str]] = {}

    def observe(self, row: Row) -> None:
        self._groups.add(row)
        for name, value in row.values.items():
            if name.startswith("eval/") and name.endswith("/loss") and math.isfinite(value):
                best, _ = self._subsets.get(name, (value, value))
                self._subsets[name] = (min(best, value), value)

    def declare(self, change: Change) -> None:
        self._changes.append(change)

    def explain(self, alert: Alert, row: Row) -> Alert:
        """The alert with carrier, event and precedent where they are known and it does not have them."""
        if alert.state not in ("open", "worsening"):
            return alert
        key = (alert.rule, alert.metric, alert.step)
        if key in self._added:  # it worsens: a new sentence, the same context
            return replace(alert, explanation="; ".join([alert.explanation, *self._added[key]]))
        added = self._added[key] = []
        if alert.carrier is None and (carrier := self._carrier(alert, row)):
            alert = replace(alert, carrier=carrier[0])
            added.append(carrier[1])
        if alert.event is None and (change := self._event(alert)) is not None:
            alert = replace(alert, event=str(change))
            after = max(alert.since - change.step, 0)
            added.append(f"it began {after} steps after {change}{f' ({change.text})' if change.text else ''}")
        if alert.precedent is None and (precedent := self._precedent(alert)):
            alert = replace(alert, precedent=precedent)
            added.append(precedent)
        return replace(alert, explanation="; ".join([alert.explanation, *added])) if added else alert

    def _event(self, alert: Alert) -> Change | None:
        reach = max(LEAST_REACH, round(REACH * alert.step))
        return preceding((change for change in self._changes if change.step <= alert.step),
                         max(alert.since, max((c.step for c in self._changes), default=0)), within=reach)  # fmt: skip

    def _carrier(self, alert: Alert, row: Row) -> tuple[str, str] | None:
        if alert.family != "run_change":
            return None
        if alert.metric in ("train/loss", "train/grad_norm"):
            found = self._groups.carrier(row)
            return found and (found[0], f"of the gradient, {found[1]}")
        if alert.metric == "eval/loss" and len(self._subsets) > 1:
            rises = {name: last - best for name, (best, last) in self._subsets.items()}
            name = max(rises, key=lambda subset: rises[subset])
            total = sum(rise for rise in rises.values() if rise > 0)
            if total > 0:
                subset = name.removeprefix("eval/").removesuffix("/loss")
                return subset, f"{subset} carries {rises[name] / total:.0%} of the subsets' rise ({rises[name]:+.4g})"
        return None

    def _precedent(self, alert: Alert) -> str | None:
        if self._peers is None or self._replay is None or alert.family != "run_change":
            return None
        if alert.metric not in self._peers.columns:
            return None
        if alert.metric not in self._found:
            self._found[alert.metric] = _replayed(self._peers, alert.metric, self._replay)
        runs = self._found[alert.metric]
        same = {run: [past for past in alerts if past.rule == alert.rule] for run, alerts in runs.items()}
        same = {run: alerts for run, alerts in same.items() if alerts}
        if not same:
            return f"none of {len(runs)} rungs had this in its own past"
        return "on the ladder, " + "; ".join(_ended(self._peers, run, alerts) for run, alerts in list(same.items())[:3])


def _replayed(peers: pd.DataFrame, metric: str, replay: Replay) -> dict[str, list[Alert]]:
    wanted = [name for name in ("step", "tokens", "train/loss", metric) if name in peers.columns]
    found = {}
    for run, rows in peers.groupby("run", sort=True):
        table = rows[list(dict.fromkeys(wanted))].iloc[:: len(rows) // MOST_ROWS + 1]
        found[str(run)] = replay(table)
    return found


def _ended(peers: pd.DataFrame, run: str, alerts: Iterable[Alert]) -> str:
    """How a rung with the same finding went on."""
    first = next(iter(alerts))
    rows = peers.loc[peers["run"].astype(str) == run]
    came = f"{run} had it at {first.step / float(rows['step'].to_numpy().max()):.0%} of its run"
    after = f", over by step {first.updated}" if first.state == "resolved" else ", to its end"
    if "train/loss" not in rows.columns:
        return came + after
    losses = rows["train/loss"].to_numpy(dtype=float)
    return f"{came}{after}, and finished at loss {np.median(losses[np.isfinite(losses)][-20:]):.4f}"
