"""A power law through the optima of several sweeps, with only those exponents that the sweeps tell apart.

y* = coefficient · hidden_dim^a · tokens_per_step^b · tokens^d, y a learning rate or a batch. Along a ladder width,
batch and tokens rise together; an exponent of batch or tokens is fitted only where that one was varied alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy import stats

from rungwise.analysis.sweeps.optimum import OptimumStatus

SAME: Final = 1.1
"""Sizes within this factor are one size: whole steps round tokens by a few percent."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One constant of the law: its value, its interval if it was fitted, why it was held if not."""

    value: float
    low: float | None = None
    high: float | None = None
    held: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweepLaw:
    """The law and what it rests on. `exponents` has one entry a term; a quantity is never a term of its own law."""

    quantity: str
    coefficient: Constant
    exponents: dict[str, Constant]
    level: float
    num_optima: int
    left_out: tuple[str, ...]
    """Sweeps without an optimum, one phrase each."""
    scatter: float | None
    """Root mean squared residual of log y*, over what its standard errors allow; None without a degree of freedom."""
    degrees_of_freedom: int
    predictions: tuple[dict[str, Any], ...] = ()
    """y* for each asked size: name, value, low, high. Its error takes held exponents as right."""

    def value(self, **sizes: float) -> float:
        """y* at these sizes."""
        logs = (constant.value * math.log(sizes[term]) for term, constant in self.exponents.items())
        return self.coefficient.value * math.exp(sum(logs))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json` and the sweep's file."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        exponents = {term: vars(constant) for term, constant in self.exponents.items()}
        return {
            **plain,
            "coefficient": vars(self.coefficient),
            "exponents": exponents,
            "left_out": list(self.left_out),
            "predictions": list(self.predictions),
        }


def fit_sweep_law(
    rows: Sequence[Mapping[str, Any]],
    *,
    quantity: str,
    held: Mapping[str, float],
    at: Sequence[Mapping[str, Any]] = (),
    level: float = 0.9,
) -> SweepLaw | None:
    """Weighted least squares of log y* on the logs of the sizes that were varied alone; None without an optimum.

    Each optimum weighs 1 / its squared standard error. Where they scatter more than those errors say, the intervals
    grow by that factor (Birge's ratio) and take Student's t with the law's own degrees of freedom, else the optima's.

    Args:
        rows: one a sweep: `name`, the sizes of `held`, and `optimum` (`Optimum.to_dict()`). Only optima inside their
            grid take part.
        quantity: what y is: `learning_rate` or `tokens_per_step`.
        held: term → exponent it keeps where the rows do not identify it; its keys are the law's terms.
        at: `name` and sizes for which the law's value is wanted.
    """
    inside = [row for row in rows if _usable(row["optimum"])]
    left_out = tuple(f"{row['name']}: {row['optimum']['status']}" for row in rows if not _usable(row["optimum"]))
    if not inside:
        return None
    reasons = {term: _why_held(inside, term, terms=tuple(held)) for term in held}
    free = [term for term in held if reasons[term] is None][: len(inside) - 1]
    fixed = {term: exponent for term, exponent in held.items() if term not in free}
    design, offset = _design(inside, free, fixed)
    target = np.array([math.log(row["optimum"]["value"]) for row in inside]) - offset
    error = np.array([row["optimum"]["log_error"] for row in inside])
    theta, *_ = np.linalg.lstsq(design / error[:, None], target / error, rcond=None)
    covariance = np.linalg.inv(design.T @ (design / error[:, None] ** 2))
    degrees = len(inside) - design.shape[1]
    ratio = float(np.sum(((target - design @ theta) / error) ** 2)) / degrees if degrees else None
    worse = ratio is not None and ratio > 1.0
    tail = degrees if worse else min(row["optimum"]["degrees"] for row in inside)
    covariance *= float(stats.t.ppf(0.5 + level / 2, tail)) ** 2 * (ratio if ratio is not None and worse else 1.0)
    spread = np.sqrt(np.diag(covariance))
    exponents = {
        term: Constant(value=held[term], held=reasons[term] or "too few optima")
        if term not in free
        else _constant(theta[1 + free.index(term)], spread[1 + free.index(term)])
        for term in held
    }
    coefficient = Constant(
        value=math.exp(theta[0]), low=math.exp(theta[0] - spread[0]), high=_exp(theta[0] + spread[0])
    )
    return SweepLaw(
        quantity=quantity,
        coefficient=coefficient,
        exponents=exponents,
        level=level,
        num_optima=len(inside),
        left_out=left_out,
        scatter=None if ratio is None else math.sqrt(ratio),
        degrees_of_freedom=degrees,
        predictions=tuple(_predict(at, free, fixed, theta, covariance)),
    )


def _design(
    rows: Sequence[Mapping[str, Any]], free: Sequence[str], fixed: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Columns 1 and the logs of what is fitted, and what the held exponents add to log y*."""
    logs = {term: np.array([math.log(row[term]) for row in rows]) for term in (*free, *fixed)}
    offset = sum((exponent * logs[term] for term, exponent in fixed.items()), start=np.zeros(len(rows)))
    return np.stack([np.ones(len(rows)), *(logs[term] for term in free)], axis=1), offset


def _predict(
    at: Sequence[Mapping[str, Any]],
    free: Sequence[str],
    fixed: Mapping[str, float],
    theta: np.ndarray,
    covariance: np.ndarray,
) -> Iterable[dict[str, Any]]:
    design, offset = _design(at, free, fixed)
    half = np.sqrt(np.einsum("ij,jk,ik->i", design, covariance, design))
    for place, centre, width in zip(at, design @ theta + offset, half, strict=True):
        low, high = math.exp(centre - width), _exp(centre + width)
        yield {"name": place["name"], "value": math.exp(centre), "low": low, "high": high}


def _usable(optimum: Mapping[str, Any]) -> bool:
    return optimum["status"] == OptimumStatus.INSIDE and bool(optimum["log_error"])


def _constant(value: float, half: float) -> Constant:
    return Constant(value=float(value), low=float(value - half), high=float(value + half))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _why_held(rows: Sequence[Mapping[str, Any]], term: str, *, terms: tuple[str, ...]) -> str | None:
    """None where `term` was varied: the width between any two rows, another size with all the others equal."""
    others = () if term == "hidden_dim" else tuple(other for other in terms if other != term)
    for index, row in enumerate(rows):
        for other in rows[:index]:
            if not _same(row, other, term) and all(_same(row, other, name) for name in others):
                return None
    values = sorted({row[term] for row in rows})
    if values[-1] <= SAME * values[0]:
        return f"one {term} swept"
    return f"{term} varied only along with {' and '.join(others)}"


def _same(row: Mapping[str, Any], other: Mapping[str, Any], term: str) -> bool:
    return max(row[term], other[term]) <= SAME * min(row[term], other[term])
