"""Rules for changes nobody announced, and for announced ones that did not do what was said.

A setting that changes leaves a step between two rows. Its declaration (`events.py`) makes the step expected; without
one, the step is the finding.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rungwise.analysis.alerts import Detector, EveryRow, Row, Signal
from rungwise.analysis.detection.detectors import Basis
from rungwise.analysis.detection.norm_detectors import SETTLED
from rungwise.analysis.detection.rolling import Jump, Steps
from rungwise.analysis.events import Change, Effect
from rungwise.analysis.vocabulary import PARAMETER_GROUPS

STEADY: Final[Mapping[str, tuple[float, float, int]]] = {
    "train/learning_rate": (0.0, 0.3, 0),
    "train/param_norm": (0.0, 0.03, 0),
    **{f"param_norm/{group}": (0.0, 0.03, 0) for group in PARAMETER_GROUPS},
    "train/update_norm": (0.0, 0.5, 0),
    "moe/drop_fraction": (0.003, 0.4, 40),
    "moe/sender_drop_fraction": (0.003, 0.4, 40),
    "moe/receiver_drop_fraction": (0.003, 0.4, 40),
    "moe/expert_load_max_over_mean": (0.0, 0.2, 40),
    "moe/router_entropy": (0.0, 0.1, 40),
    "train/grad_norm": (0.0, 0.4, 40),
}
"""Metrics that step where a setting changes: what is added before the log, the least step of the log that counts, and
for how many rows it must last. A norm of the parameters or a rate does not come back by itself; the others may."""
KEPT: Final = 16
"""Rows of every metric kept to judge what a change does to it."""


class UndeclaredChange(EveryRow):
    """A lasting step of a setting's metrics between two rows, with no change declared there.

    log(value + floor) by `Steps`: a move of the seven-row median within seven rows, `SCORE` times the usual move and at
    least the metric's own least step, of which half is left when it has lasted. Declared changes are waited for `grace`
    steps. The alert names every metric that stepped, and is over after `calm_rows` rows at the new level.
    Memory: 14 rows for the step, 256 rows for what is usual.
    """

    rule, family, calm_rows = "undeclared_change", "run_change", 20
    SCORE: Final = 8.0

    def __init__(self) -> None:
        self.metric = "train/learning_rate"
        self._steps = {name: Steps(least=least / self.SCORE) for name, (_, least, _) in STEADY.items()}
        self._quiet: dict[str, int] = {}
        self._pending: dict[str, tuple[Jump, int]] = {}
        self.stepped: dict[str, Jump] = {}
        """What stepped, by metric, while the alert is open."""
        self._peak = 0.0
        self._rates: deque[float] = deque(maxlen=3 * Steps.WIDTH)
        self._said: Signal | None = None

    def observe(self, row: Row) -> Signal | None:
        if row.progress is not None and row.progress < SETTLED:
            return None
        seen = [] if STEADY.keys().isdisjoint(row.values) else [name for name in STEADY if name in row.values]
        lasted = [name for name in seen if self._has_lasted(name, row)]
        if not lasted:
            return None if self._said is None else self._said._replace(level=0.0)
        for name in lasted:
            self.stepped[name] = self._pending.pop(name)[0]
        self._said = self._signal()
        return self._said

    def _has_lasted(self, name: str, row: Row) -> bool:
        """Whether this row ends the wait for a step of the metric that is still there."""
        value = row.values[name]
        _, least, wait = STEADY[name]
        floor = self._floor(name, value)
        if not 0.0 < value + floor < math.inf:
            return False
        jump = self._steps[name].see(row.step, math.log(value + floor))
        if jump is None or row.step < self._quiet.get(name, 0):
            return False
        pending = self._pending.get(name)
        if pending is None:
            if jump.score < self.SCORE or abs(jump.after - jump.before) < least:
                return False
            pending = (jump, wait)
        first, left = pending
        if (jump.after - first.before) / (first.after - first.before) < 0.5:
            del self._pending[name]  # it came back: a spike, whose end is no step either
            self._steps[name].settle()
            return False
        larger = abs(jump.after - jump.before) > abs(first.after - first.before)
        self._pending[name] = (jump if larger and jump.before == first.before else first, left - 1)
        return left <= 0

    def _floor(self, name: str, value: float = 0.0) -> float:
        """What is added before the log; a tenth of the highest learning rate, which is logged rounded at the end."""
        if name != "train/learning_rate":
            return STEADY[name][0]
        if 0.0 < value < math.inf:
            self._rates.append(value)
        self._peak = max(self._peak, self._rates[0] if self._rates else 0.0)  # not of the step that is being judged
        return 0.1 * self._peak

    def _signal(self) -> Signal:
        self.metric = max(self.stepped, key=lambda name: self.stepped[name].score)
        jump, floor = self.stepped[self.metric], self._floor(self.metric)
        told = [
            f"{name} {math.exp(each.before) - self._floor(name):.4g} → {math.exp(each.after) - self._floor(name):.4g}"
            for name, each in sorted(self.stepped.items(), key=lambda item: -item[1].score)
        ]
        return Signal(
            level=1.0 + 0.1 * len(self.stepped), observed=math.exp(jump.after) - floor,
            expected=math.exp(jump.before) - floor, since=jump.since,
            explanation=f"undeclared change within {Steps.WIDTH} rows of step {jump.since}: {', '.join(told)} "
            f"({jump.score:.0f} times the usual move); no event was declared there",
        )  # fmt: skip

    def declare(self, change: Change, step: int) -> None:
        for name in STEADY:
            if change.moves(name):
                self._steps[name].settle()
                self._pending.pop(name, None)
                self._quiet[name] = max(change.step, step) + change.grace

    def rebaseline(self, step: int) -> None:
        self._pending.clear()
        for steps in self._steps.values():
            steps.settle()

    def rewind(self, step: int) -> None:
        self.rebaseline(step)

    def resolved(self) -> None:
        self.stepped.clear()
        self._said = None


class EffectCheck(EveryRow):
    """Holds what a declared change did against what it was said to do.

    For each effect declared of a metric: median of up to `KEPT` rows before against the first `KEPT` rows after the
    grace (evaluations: the last before, the first after). A move counts beyond three standard errors; a size may be off
    by half of itself. What happened as said is silent and kept in `kept`.
    Memory: `KEPT` rows of each metric.
    """

    rule, family, calm_rows = "unexpected_effect", "run_change", 1

    def __init__(self) -> None:
        self.metric = "train/loss"
        self._past: deque[Row] = deque(maxlen=KEPT)
        self._evaluated: dict[str, float] = {}
        self._open: list[tuple[Change, str, Effect, list[float], list[float]]] = []
        self._said: Signal | None = None
        self.kept: list[str] = []
        """Effects that came as declared, one sentence each."""

    def observe(self, row: Row) -> Signal | None:
        told: Signal | None = None
        for entry in list(self._open):
            change, name, effect, before, after = entry
            value = row.values.get(name)
            if value is None or not math.isfinite(value) or row.step < change.step + self._grace(name, change):
                continue
            after.append(value)
            if len(after) < (1 if name.startswith("eval") else KEPT):
                continue
            self._open.remove(entry)
            told = self._verdict(row, change, name, effect, before=before, after=after) or told
        self._past.append(row)
        if "eval/loss" in row.values:
            self._evaluated |= {name: value for name, value in row.values.items() if name.startswith("eval")}
        if told is None and self._said is not None:
            return self._said._replace(level=0.0)
        self._said = told
        return told

    @staticmethod
    def _grace(name: str, change: Change) -> int:
        return 0 if name.startswith("eval") else change.grace

    def _verdict(
        self, row: Row, change: Change, name: str, effect: Effect, *, before: list[float], after: list[float]
    ) -> Signal | None:
        old, error_old = _centre(before)
        new, error_new = _centre(after)
        moved, error = new - old, math.hypot(error_old, error_new)
        sentence = f"{name} moved {moved:+.4g} ({old:.4g} → {new:.4g}), declared {effect}, after {change}"
        if _as_said(moved, effect, old=old, error=error):
            self.kept.append(sentence)
            return None
        self.metric = name
        sign = -1.0 if effect.direction == "down" else 1.0
        size = None if effect.size is None else sign * effect.size * (abs(old) if effect.relative else 1.0)
        return Signal(
            level=1.0, observed=new, expected=old + (size or 0.0), since=change.step,
            event=str(change), explanation=f"{sentence}: not the effect declared",
        )  # fmt: skip

    def declare(self, change: Change, step: int) -> None:
        for name, effect in change.effects.items():
            before = [value for row in self._past if math.isfinite(value := row.values.get(name, math.nan))]
            if name.startswith("eval"):
                before = [self._evaluated[name]] if math.isfinite(self._evaluated.get(name, math.nan)) else []
            if len(before) >= (1 if name.startswith("eval") else KEPT // 2) and not effect.slope:
                self._open.append((change, name, effect, before, []))

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        self._open.clear()

    def resolved(self) -> None:
        self._said = None


def _centre(values: Iterable[float]) -> tuple[float, float]:
    """Median and its standard error; one value, of an evaluation, is taken to be good to 0.2 %."""
    ordered = sorted(values)
    count = len(ordered)
    middle = 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
    if count < 4:
        return middle, 0.002 * abs(middle)
    away = sorted(abs(value - middle) for value in ordered)
    return middle, 1.253 * 1.4826 * away[count // 2] / math.sqrt(count)


def _as_said(moved: float, effect: Effect, *, old: float, error: float) -> bool:
    slack = 3.0 * error
    if effect.direction == "either":
        return True
    if effect.direction == "none":
        return abs(moved) <= slack + 1e-3 * abs(old)
    moved = moved if effect.direction == "up" else -moved
    if effect.size is None:
        return moved > -slack
    size = effect.size * (abs(old) if effect.relative else 1.0)
    return abs(moved - size) <= 0.5 * size + slack


def change_detectors(basis: Basis) -> Iterator[Detector]:
    """The rules about settings."""
    yield UndeclaredChange()
    yield EffectCheck()
