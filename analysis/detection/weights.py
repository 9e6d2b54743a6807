"""Weights changed by something that is not the optimizer: a corrupted restore, an expert zeroed, flipped bits.

No update u moves the norm of weights w by more than its own, | |w + u| - |w| | <= |u|; and the cosine at which updates
lie to the weights,

c = (|w + u|² - |w|² - |u|²) / (2 |w| |u|)

moves little from step to step. Both norms are logged by parameter group, so both can be held against every step.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from rungwise.analysis.alerts import EveryRow, Row, Signal
from rungwise.analysis.detection.rolling import Level
from rungwise.analysis.detection.skipped import SKIPPED
from rungwise.analysis.events import Change
from rungwise.analysis.vocabulary import PARAMETER_GROUPS

NORMS: Final[Mapping[str, str]] = {f"param_norm/{group}": f"update_norm/{group}" for group in PARAMETER_GROUPS}
TOTAL: Final[Mapping[str, str]] = {"train/param_norm": "train/update_norm"}
"""Of a run that logs no groups."""


class WeightsAltered(EveryRow):
    """A norm of the parameters that moved in one step as its update cannot have moved it.

    Impossible, and critical: |w| moved by more than |u|. Unlike any other step, and a warning: c is `SIGMA` of its own
    spreads from its level of the last rows. Either must exceed `LEAST` of the norm, which rounding explains. Only
    successive steps are compared, over a restart too; a step whose update was left out moved nothing.
    Memory: c of 32 rows by group, and the norms of the last `STEPS` steps, to which a restart may return.
    """

    rule, family, calm_rows = "weights_altered", "fault", 200
    ROWS: Final = 32
    FEW: Final = 20
    """Steps compared before a group is judged."""
    SIGMA: Final = 20.0
    """A head under AdamW moved by 15 in healthy runs, any other group by 6."""
    LEAST: Final = 1e-5
    STEPS: Final = 4096

    def __init__(self) -> None:
        self.metric = "train/param_norm"
        self._past: deque[tuple[int, dict[str, float]]] = deque(maxlen=self.STEPS)
        self._cosines: dict[str, Level] = {}
        self._firing = False

    def observe(self, row: Row) -> Signal | None:
        names = TOTAL if NORMS.keys().isdisjoint(row.values) else NORMS
        if names.keys().isdisjoint(row.values):
            return None
        norms = {name: value for name in names if 0.0 < (value := row.values.get(name, math.nan)) < math.inf}
        before = self._past[-1][1] if self._past and self._past[-1][0] == row.step - 1 else {}
        left_out = row.values.get(SKIPPED) or row.values.get("train/counted_tokens") == 0.0
        found = [
            signal
            for name in norms
            if name in before
            and not left_out
            and 0.0 <= (update := row.values.get(names[name], math.nan)) < math.inf
            and (signal := self._compare(row, name, before[name], update)) is not None
        ]
        self._past.append((row.step, before if left_out else norms))
        if not found:
            return Signal(0.0, next(iter(norms.values()), 0.0), None, row.step, "") if self._firing else None
        self._firing = True
        worst = max(found, key=lambda signal: signal.level)
        self.metric = f"param_norm/{worst.carrier}" if worst.carrier else "train/param_norm"
        more = f"; so did {len(found) - 1} more groups" if len(found) > 1 else ""
        return worst._replace(explanation=worst.explanation + more)

    def _compare(self, row: Row, name: str, before: float, update: float) -> Signal | None:
        """How the norm went from `before` to this row's, against what an update of that norm does; None if alike."""
        after = row.values[name]
        known = self._cosines.setdefault(name, Level(self.ROWS, prior=0.05))
        count, cosine, spread = known.count, known.centre, known.spread
        if update > 0.0:
            known.add(row.step, (after**2 - before**2 - update**2) / (2.0 * before * update))
        if count < self.FEW:
            return None
        expected = math.sqrt(max(before**2 + update**2 + 2.0 * cosine * before * update, 0.0))
        rounding = self.LEAST * before
        beyond = abs(after - before) / (update + rounding) if abs(cosine) <= 1.0 else 0.0
        unlike = abs(after - expected) / (self.SIGMA * spread * update + rounding)
        if max(beyond, unlike) < 1.0:
            return None
        why = (
            "no update of that size can do this" if beyond >= 1.0
            else f"{self.SIGMA * unlike:.0f} spreads from how updates have lain to these weights"
        )  # fmt: skip
        return Signal(
            level=max(beyond, unlike), observed=after, expected=expected, since=row.step,
            severity="critical" if beyond >= 1.0 else "warning", probability=0.0 if beyond >= 1.0 else None,
            carrier=name.partition("/")[2] if name in NORMS else None,
            explanation=f"{name} went from {before:.6g} to {after:.6g} in one step ({after / before - 1.0:+.2%}), "
            f"where its update of {update:.3g} leads to {expected:.6g}: {why}; something other than the optimizer "
            "changed these weights, or its state was lost",
        )  # fmt: skip

    def declare(self, change: Change, step: int) -> None:
        moved = [name for name in (*NORMS, *TOTAL) if change.moves(name)]
        if self._past and moved:
            at, norms = self._past[-1]
            self._past[-1] = at, {name: norm for name, norm in norms.items() if name not in moved}
        for name in moved:
            self._cosines.pop(name, None)

    def rebaseline(self, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        while self._past and self._past[-1][0] >= step:
            self._past.pop()

    def resolved(self) -> None:
        self._firing = False
