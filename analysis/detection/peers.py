"""Rules that judge a run against its ladder at equal progress (at equal step where its horizon is unknown)."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rungwise.analysis.alerts import Detector, Row, Signal
from rungwise.analysis.detection.detectors import Basis

Array = NDArray[np.float64]

WARMUP: Final = 0.03
"""Share of the run in which peers differ too much to compare."""


class PeerCurves:
    """One metric of the peers, smoothed, to be read at a progress or a step."""

    def __init__(self, peers: pd.DataFrame, metric: str):
        self._curves: list[tuple[Array, Array, Array]] = []
        if metric not in peers.columns:
            return
        for _, rows in peers.groupby("run", sort=True):
            horizon = _positions(rows)
            column = pd.Series(np.asarray(rows[metric], dtype=float))
            known = np.isfinite(column.to_numpy())
            if known.sum() < 3:
                continue
            values = column.loc[known].rolling(max(5, int(known.sum()) // 50), center=True, min_periods=1).median()
            steps = rows["step"].to_numpy(dtype=float)[known]
            self._curves.append((horizon[known], steps, values.to_numpy(dtype=float)))

    def __bool__(self) -> bool:
        return bool(self._curves)

    def at(self, row: Row) -> Array:
        """Each peer's value at the row's position; peers that were shorter are left out."""
        found = []
        for progress, steps, values in self._curves:
            axis, where = (steps, float(row.step)) if row.progress is None else (progress, min(row.progress, 1.0))
            if axis[0] <= where <= axis[-1] * 1.001:
                found.append(float(np.interp(where, axis, values)))
        return np.array(found)


def _positions(rows: pd.DataFrame) -> Array:
    known = "tokens" in rows.columns and bool(rows["tokens"].notna().all())
    column = rows["tokens" if known else "step"].to_numpy(dtype=float)
    return column / column.max()


class AgainstPeers:
    """One metric against a limit made of the peers' values at the same position. Over the last rows, the median of

    (value - peers' median) / (limit - peers' median)

    and no more than its last value: a run that is coming back is not accused. Memory: `rows` rows.
    """

    family, calm_rows = "run_change", 10

    def __init__(
        self,
        peers: pd.DataFrame,
        *,
        rule: str,
        metric: str,
        limit: Callable[[Array], float],
        rows: int,
        meaning: str,
        severity: str = "warning",
    ):
        self.rule, self.metric = rule, metric
        self._curves = PeerCurves(peers, metric)
        self._limit, self._meaning, self._severity = limit, meaning, severity
        self._recent: deque[float] = deque(maxlen=rows)
        self._since: int | None = None

    def observe(self, row: Row) -> Signal | None:
        value = row.values.get(self.metric)
        if value is None or not math.isfinite(value) or not self._curves:
            return None
        if row.progress is not None and row.progress < WARMUP:
            return None
        peers = self._curves.at(row)
        if not peers.size:
            return None
        expected, limit = float(np.median(peers)), self._limit(peers)
        self._recent.append((value - expected) / max(limit - expected, 1e-12))
        if len(self._recent) < (self._recent.maxlen or 1):
            return None
        level = min(float(np.median(self._recent)), self._recent[-1])
        observed = expected + level * (limit - expected)
        if level < 1.0:
            self._since = None
        elif self._since is None:
            self._since = row.step
        where = f"step {row.step}" if row.progress is None else f"{row.progress:.0%} of the run"
        return Signal(
            level=level,
            observed=observed,
            expected=expected,
            since=row.step if self._since is None else self._since,
            severity=self._severity,
            explanation=f"{self.metric} {observed:.4g} at {where} against {expected:.4g} on {peers.size} "
            f"{'rung' if peers.size == 1 else 'rungs'} (limit {limit:.4g}): {self._meaning}",
        )

    def rebaseline(self, step: int) -> None:
        self._recent.clear()

    def rewind(self, step: int) -> None:
        self._recent.clear()

    def resolved(self) -> None:
        self._since = None


class Pinned:
    """A loss still within 3 % of ln(vocabulary), a uniform guess, after 200 steps and 5 % of the run."""

    rule, metric, family, calm_rows = "not_learning", "train/loss", "run_change", 10
    STEPS: Final = 200
    SHARE: Final = 0.97

    def __init__(self, vocab_size: int):
        self._uniform = math.log(vocab_size)
        self._recent: deque[float] = deque(maxlen=20)

    def observe(self, row: Row) -> Signal | None:
        loss = row.values.get(self.metric)
        if loss is None or not math.isfinite(loss):
            return None
        self._recent.append(loss)
        early = row.step < self.STEPS or (row.progress is not None and row.progress < 0.05)
        if early or len(self._recent) < (self._recent.maxlen or 1):
            return None
        now = float(np.median(self._recent))
        return Signal(
            level=1.0 if now > self.SHARE * self._uniform else 0.0,
            observed=now,
            expected=self._uniform,
            since=row.step,
            severity="critical",
            explanation=f"loss {now:.4f} after {row.step} steps is still a uniform guess, {self._uniform:.4f}",
        )

    def rebaseline(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...
    def resolved(self) -> None: ...


def peer_detectors(basis: Basis) -> Iterator[Detector]:
    """The rules for the metrics that the peers have; without them, that a loss leaves the uniform guess.

    Raises:
        ValueError: the peers' table lacks a column.
    """
    peers = basis.peers
    against = [] if peers is None or not len(peers) else _against(peers)
    yield from against
    if basis.vocab_size and not any(detector.rule == "not_learning" for detector in against):
        yield Pinned(int(basis.vocab_size))


def _against(peers: pd.DataFrame) -> list[AgainstPeers]:
    if missing := {"run", "step"} - set(peers.columns):
        raise ValueError(f"peers lack columns {sorted(missing)}; give run, step, tokens and metrics by name")
    rules = [
        AgainstPeers(
            peers, rule="not_learning", metric="train/loss", rows=6, severity="critical",
            limit=lambda values: float(np.median(values)) * 1.25 + 0.1, meaning="it does not learn as its ladder did",
        ),
        AgainstPeers(
            peers, rule="grad_norm", metric="train/grad_norm", rows=20,
            limit=lambda values: 2.5 * float(values.max()), meaning="far above every rung at this point",
        ),
        AgainstPeers(
            peers, rule="drop_fraction", metric="moe/drop_fraction", rows=20,
            limit=lambda values: 1.5 * float(values.max()) + 0.03, meaning="more than on any rung at this point",
        ),
    ]  # fmt: skip
    return [rule for rule in rules if rule.metric in peers.columns]
