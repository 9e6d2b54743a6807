"""Declared changes: what each kind moves, what it was said to move, and which comparisons it ends.

An event is a plain record, `step`, `kind` (`EVENT_KINDS`) and, optional: `expected`, the effect per metric or one
sentence; `grace`, steps until the effect is judged; `planned`, true where the rungs made the same change at the same
progress; `forecast`, the hash of one made anew for it. Detectors see it as a `Change`.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, runtime_checkable

MOVES: Final[Mapping[str, tuple[str, ...]]] = {
    "transport": ("train/*", "moe/*", "moe_worst_layer/*", "grad_norm/*", "update_norm/*", "perf/*", "eval_dropping/*"),
    "mixture": ("train/*", "moe/*", "moe_worst_layer/*", "grad_norm/*", "update_norm/*", "data/*"),
    "context": ("*",),
    "schedule": ("train/*", "grad_norm/*", "update_norm/*", "progress/*"),
    "precision": ("train/*", "moe/*", "moe_worst_layer/*", "grad_norm/*", "update_norm/*", "param_norm/*", "perf/*"),
    "restart": ("perf/*", "train/param_norm", "param_norm/*"),
    "note": (),
}
"""Metrics whose level may move with a change of each kind, so that their past no longer says what they should be.

Evaluation is dropless and its text is fixed: a transport, a mixture or a precision leaves it where it is.
"""
BREAKS: Final[Mapping[str, tuple[str, ...]]] = {
    "transport": ("moe/*drop*", "moe_worst_layer/*drop*", "moe/tokens_lost*", "moe_worst_layer/tokens_lost*", "perf/*"),
    "mixture": ("train/*", "grad_norm/*", "moe/*", "moe_worst_layer/*"),
    "context": ("*",),
    "schedule": ("*",),
}
"""Metrics that can no longer be held against forecast or rungs, which made no such change."""
DIRECTIONS: Final = ("up", "down", "either", "none")
GRACE: Final = 20
"""Steps after which the effect of a change is judged, where the event says nothing."""
_WORDS = re.compile(
    r"^(?P<slope>slope )?(?P<direction>up|down|either|none)"
    r"(?: (?:by )?(?P<factor>x)?(?P<size>[0-9.]+(?:e-?[0-9]+)?)(?P<percent>%)?)?$"
)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a change was said to do to one metric.

    size: of the move, absolute and positive, in the metric's unit; a share of the level before where `relative`.
    slope: whether its slope moves rather than its level.
    """

    direction: str
    size: float | None = None
    relative: bool = False
    slope: bool = False

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size:.1%}" if self.relative else f" {self.size:g}"
        return f"{'slope ' if self.slope else ''}{self.direction}{size}"


def parse_effect(value: Any) -> Effect:
    """An effect from "up", "down 0.03", "up 14%", "up x2", "slope up", "none", a signed number, or a record of these.

    >>> parse_effect("down 14%"), parse_effect(0.03).direction
    (Effect(direction='down', size=0.14, relative=True, slope=False), 'up')

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(value, Mapping):
        known = {"direction", "size", "relative", "slope"}
        if set(value) <= known and value.get("direction") in DIRECTIONS:
            size = value.get("size")
            return Effect(
                direction=value["direction"], size=None if size is None else abs(float(size)),
                relative=bool(value.get("relative", False)), slope=bool(value.get("slope", False)),
            )  # fmt: skip
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return Effect(direction="up" if value > 0 else "down" if value < 0 else "none", size=abs(float(value)) or None)
    elif isinstance(value, str) and (match := _WORDS.match(value.strip().lower())):
        size = None if match["size"] is None else float(match["size"])
        if size is not None and match["percent"]:
            size /= 100.0
        if size is not None and match["factor"]:
            size = abs(size - 1.0 if match["direction"] == "up" else 1.0 - 1.0 / size)
        relative = size is not None and bool(match["percent"] or match["factor"])
        return Effect(direction=match["direction"], size=size, relative=relative, slope=bool(match["slope"]))
    raise ValueError(f"expected effect {value!r} is none of: up, down 0.03, up 14%, up x2, slope up, either, none")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A declared change as the detectors see it."""

    kind: str
    step: int
    effects: Mapping[str, Effect]
    """By metric name, `*` standing for any text."""
    grace: int = GRACE
    planned: bool = False
    text: str = ""
    """What was said in words."""

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Self:
        """From the record. What cannot be read as an effect is kept as words: a slip of the pen fails no watch."""
        expected, effects, words = event.get("expected"), {}, []
        if isinstance(expected, Mapping):
            for name, value in expected.items():
                try:
                    effects[str(name)] = parse_effect(value)
                except (TypeError, ValueError):
                    words.append(f"{name} {value}")
        elif expected:
            words.append(str(expected))
        words += [str(event[key]) for key in ("what", "text", "note", "message") if event.get(key)]
        return cls(
            kind=str(event.get("kind", "note")), step=int(event["step"]), effects=effects, text="; ".join(words),
            grace=int(event.get("grace", GRACE)), planned=bool(event.get("planned", False)),
        )  # fmt: skip

    def effect(self, metric: str) -> Effect | None:
        """The effect declared for a metric: its own name counts before a pattern, and a subset moves the mean too."""
        if metric in self.effects:
            return self.effects[metric]
        found = (effect for name, effect in self.effects.items() if fnmatch.fnmatchcase(metric, name))
        return next(found, self._effect_of_subsets() if metric == "eval/loss" else None)

    def _effect_of_subsets(self) -> Effect | None:
        """What the evaluation's mean does where only subsets were spoken of: as they do, by an unknown share."""
        effects = [
            effect for name, effect in self.effects.items()
            if name.startswith("eval/") and name.endswith("/loss") and effect.direction != "none"
        ]  # fmt: skip
        ways = {effect.direction for effect in effects}
        return Effect(direction=ways.pop() if len(ways) == 1 else "either") if ways else None

    def moves(self, metric: str) -> bool:
        """Whether the metric's level may change with it: as declared, else as its kind does."""
        effect = self.effect(metric)
        if effect is not None:
            return effect.direction != "none"
        return _matches(metric, MOVES.get(self.kind, ()))

    def allows_rise(self, metric: str) -> bool:
        """Whether a rise of the metric is among what this change may do."""
        effect = self.effect(metric)
        return self.moves(metric) if effect is None else effect.direction in ("up", "either")

    def breaks(self, metric: str) -> bool:
        """Whether the metric can no longer be compared with forecast and rungs."""
        return not self.planned and _matches(metric, BREAKS.get(self.kind, ()))

    def __str__(self) -> str:
        return f"the declared {self.kind} change at step {self.step}"


@runtime_checkable
class Informed(Protocol):
    """A detector that takes a declared change into account itself, rather than forgetting its past."""

    def declare(self, change: Change, step: int) -> None:
        """A change was declared; `step` is that of the first row after it."""
        ...


def place_of_renewal(events: Sequence[Mapping[str, Any]], forecast_hash: str) -> int:
    """Where among a run's events, in order, the last one stands that registered this forecast as a successor; else -1.

    The forecast is of the schedule declared there: schedules declared up to it do not end comparisons with it.
    """
    return max((n for n, event in enumerate(events) if event.get("forecast") == forecast_hash), default=-1)


def preceding(changes: Iterable[Change], step: int, *, within: int) -> Change | None:
    """The last change, notes left out, at most `within` steps before `step`; None without one."""
    near = [change for change in changes if change.kind != "note" and 0 <= step - change.step <= within]
    return max(near, key=lambda change: change.step, default=None)


def _matches(metric: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns)
