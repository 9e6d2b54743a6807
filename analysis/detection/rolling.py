"""What a detector remembers of one series, in constant time and memory a row: its level, a step in it, its trend.

Every class states its memory in rows; `span` is what that was in steps. None keeps rows it no longer needs, and none
depends on how rows were handed over: live and replayed series leave the same state.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

MEDIAN_ERROR: Final = 1.57
"""Variance of a median over that of a mean, of Gaussian values."""


class Level:
    """Centre and spread of the last rows: exponentially weighted, each row clipped at `CLIP` spreads.

    Memory: about `rows` rows. Until there are that many every row weighs the same, and the spread is held towards
    `prior` as `PRIOR_ROWS` rows would.
    """

    CLIP: Final = 3.0
    PRIOR_ROWS: Final = 8

    def __init__(self, rows: int, *, prior: float):
        self._rows, self._prior = rows, prior
        self.forget()

    def forget(self) -> None:
        self.count = 0
        self.centre = 0.0
        self._square = self._prior**2
        self._first = self._last = 0

    @property
    def spread(self) -> float:
        return math.sqrt(self._square)

    @property
    def span(self) -> int:
        """Steps that the memory reaches back over."""
        share = min(1.0, self._rows / self.count) if self.count else 0.0
        return round(share * (self._last - self._first))

    def score(self, value: float) -> float:
        """Spreads that `value` lies above the centre."""
        return (value - self.centre) / self.spread

    def add(self, step: int, value: float) -> None:
        if self.count == 0:
            self.centre, self._first = value, step
        self.count, self._last = self.count + 1, step
        reach = self.CLIP * self.spread
        off = min(max(value - self.centre, -reach), reach)
        self.centre += off / min(self.count, self._rows)
        self._square += (off * off - self._square) / min(self.count + self.PRIOR_ROWS, self._rows)


class Jump(NamedTuple):
    """A series moved from one level to another between two rows."""

    since: int
    before: float
    after: float
    score: float
    """Size over the usual size of its moves within as many rows."""


class Steps:
    """Finds a lasting jump: the median of the last `WIDTH` rows against that of those before, over their usual move.

    Memory: 2 × `WIDTH` rows for the jump, `rows` rows for what is usual. A spike of less than half of `WIDTH` rows is
    none, nor is a trend.
    """

    WIDTH: Final = 7
    EVERY: Final = 4
    """Of overlapping moves every fourth is counted among the usual ones."""
    CLOSER_LOOK: Final = 4.0

    def __init__(self, rows: int = 256, *, least: float):
        self._usual = Level(rows // self.EVERY, prior=least)
        self._least = least
        self.forget()

    def forget(self) -> None:
        self._usual.forget()
        self._rows = 0
        self.settle()

    def settle(self) -> None:
        """Take the present level for granted; what is usual stays known."""
        self._steps: deque[int] = deque(maxlen=self.WIDTH)
        self._last: deque[float] = deque(maxlen=self.WIDTH)
        self._values: deque[float] = deque(maxlen=2 * self.WIDTH + 1)
        self._medians: deque[tuple[int, float]] = deque(maxlen=self.WIDTH + 1)

    def see(self, step: int, value: float) -> Jump | None:
        """The jump this row completes or continues; its score says how unusual it is. None while there are few rows."""
        self._last.append(value)
        self._values.append(value)
        self._steps.append(step)
        if len(self._last) < self.WIDTH:
            return None
        self._medians.append((self._steps[0], sorted(self._last)[self.WIDTH // 2]))
        if len(self._medians) <= self.WIDTH:
            return None
        (_, before), (since, after) = self._medians[0], self._medians[-1]
        move = after - before
        ready = self._usual.count * self.EVERY >= 2 * self.WIDTH
        score = abs(move - self._usual.centre) / max(self._usual.spread, self._least) if ready else 0.0
        if score > self.CLOSER_LOOK and not self._is_abrupt(move):
            score = 0.0
        self._rows += 1
        if self._rows % self.EVERY == 0:
            self._usual.add(step, move)
        return Jump(since, before, after, score)

    def _is_abrupt(self, move: float) -> bool:
        """Whether most of the move happened between two rows: a norm that grows fast at the peak rate is no step."""
        seen = list(self._values)
        sign = 1.0 if move > 0 else -1.0
        return max(sign * (b - a) for a, b in pairwise(seen)) >= 0.6 * abs(move)


@dataclass(frozen=True)
class Departure:
    """How the last blocks of a series lie against the line through those before. In the units of the series."""

    level: float
    """1 where every threshold is met."""
    since: int
    gap: float
    """Over the line continued (a falling line is continued flat)."""
    rise: float
    """Over the mean of the blocks before."""
    slope: float
    """Of the line before, a step; `slope_after` of the last blocks."""
    slope_after: float
    score: float
    degrees: int
    """Gap over its standard error, with the line's degrees of freedom: a Student t."""
    span: int


class Trend:
    """Finds a series rising faster than it used to, slow or fast: dyadic blocks, at each length the same test.

    At block lengths `ROWS` × 1, 2, 4, …: the median of the last 8, 12, 16 of up to `BLOCKS` blocks against the line
    through those before. A block of `ROWS` rows is their median, a longer one the mean of two. To count, a gap must be
    `SIGMA` standard errors of the line's forecast, `WANDER` times what such gaps usually are in this series, and `gap`
    in size; and the rise at least `rise`.

    Memory: `BLOCKS` blocks of each length, so the run's own whole past, the older the coarser.
    """

    ROWS: Final = 16
    BLOCKS: Final = 40
    RECENT: Final = (8, 12, 16)
    LEAST: Final = 16
    SIGMA: Final = 4.2
    WANDER: Final = 3.0
    USUAL: Final = 0.01
    """What a gap is taken to be usually while fewer than `PRIOR` were seen."""
    PRIOR: Final = 4

    def __init__(self, *, gap: float, rise: float):
        self._gap, self._rise = gap, rise
        self.forget()

    def forget(self) -> None:
        self._open: list[tuple[int, float]] = []
        self._blocks: list[deque[tuple[float, float]]] = []
        self._halves: list[tuple[float, float] | None] = []
        self._squares: list[list[float]] = []
        self._found: list[Departure | None] = []

    def rewind(self, step: int) -> None:
        """Forget blocks from `step` on; those rows come again."""
        self._open = [pair for pair in self._open if pair[0] < step]
        for blocks in self._blocks:
            while blocks and blocks[-1][0] >= step:
                blocks.pop()
        self._halves = [None if half and half[0] >= step else half for half in self._halves]

    def see(self, step: int, value: float) -> Departure | None:
        """The largest departure as of this row, over all lengths; None while there are few rows."""
        self._open.append((step, value))
        if len(self._open) < self.ROWS:
            return self.now
        middle = _median([value for _, value in self._open])
        block = (0.5 * (self._open[0][0] + step), middle)
        self._open.clear()
        for length in range(64):
            if length == len(self._blocks):
                self._blocks.append(deque(maxlen=self.BLOCKS))
                self._halves.append(None)
                self._squares.append([self.PRIOR * self.USUAL**2, float(self.PRIOR)])
                self._found.append(None)
            self._blocks[length].append(block)
            self._found[length] = self._judge(length)
            half = self._halves[length]
            if half is None:
                self._halves[length] = block
                break
            self._halves[length] = None
            block = (0.5 * (half[0] + block[0]), 0.5 * (half[1] + block[1]))
        return self.now

    @property
    def now(self) -> Departure | None:
        return max((found for found in self._found if found), key=lambda found: found.level, default=None)

    def _judge(self, length: int) -> Departure | None:
        blocks, squares = list(self._blocks[length]), self._squares[length]
        found = [self._compare(blocks, r, squares) for r in self.RECENT if len(blocks) - r >= self.LEAST]
        if not found:
            return None
        worst = max(found, key=lambda departure: departure.level)
        if worst.level < 0.5:
            keep = 1.0 - 1.0 / 64.0
            squares[:] = [keep * squares[0] + found[0].gap ** 2, keep * squares[1] + 1.0]
        return worst

    def _compare(self, blocks: list[tuple[float, float]], number: int, squares: list[float]) -> Departure:
        before, recent = blocks[:-number], blocks[-number:]
        lowest = min(range(len(before)), key=lambda place: before[place][1])
        before = before[min(lowest, len(before) - self.LEAST) :]  # a fall that is over says nothing of a rise
        count = len(before)
        mean, slope, noise, centre, spread = _line(before)
        at = sum(step for step, _ in recent) / number
        # A falling line is continued flat from its end: it must flatten one day.
        end = before[-1][0]
        gap = _median([y - mean - slope * ((x if slope > 0 else end) - centre) for x, y in recent])
        error = noise * math.sqrt(MEDIAN_ERROR / number + 1 / count + (at - centre) ** 2 / spread)
        rise = _median([y for _, y in recent]) - mean
        usual = math.sqrt(squares[0] / squares[1])
        score = gap / max(error, 1e-9)
        level = min(score / self.SIGMA, gap / (self.WANDER * usual), gap / self._gap, rise / self._rise)
        return Departure(
            level=max(level, 0.0), since=round(recent[0][0]), gap=gap, rise=rise, slope=slope,
            slope_after=_line(recent)[1], score=score, degrees=count - 2, span=round(recent[-1][0] - before[0][0]),
        )  # fmt: skip


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def _line(points: list[tuple[float, float]]) -> tuple[float, float, float, float, float]:
    """Least squares through (x, y): mean of y, slope, scatter about it, mean of x, sum of squares of x about that."""
    count = len(points)
    centre = sum(x for x, _ in points) / count
    mean = sum(y for _, y in points) / count
    spread = sum((x - centre) ** 2 for x, _ in points) or 1.0
    slope = sum((x - centre) * y for x, y in points) / spread
    left = sum((y - mean - slope * (x - centre)) ** 2 for x, y in points)
    return mean, slope, math.sqrt(left / (count - 2)), centre, spread
