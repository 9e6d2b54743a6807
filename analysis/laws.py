"""Scaling laws as values: what is fitted, its gradient, and the table of forms.

Legend: L loss (nats per token), C training compute (FLOPs), E floor (nats per token, the loss no compute
removes), A amplitude, alpha exponent. `fit.py` finds the constants; `intervals.py` says how far to believe
them.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = E + A * C^-alpha.

    >>> round(float(PowerLaw(floor=1.6, amplitude=95.25, exponent=0.09412).value(1e21)), 3)
    2.605
    """

    floor: float
    amplitude: float
    exponent: float

    def value(self, flops: ArrayLike) -> NDArray[np.float64]:
        """Loss at `flops`, nats per token, same shape."""
        return self.floor + self._excess(flops)

    def gradient(self, flops: ArrayLike) -> NDArray[np.float64]:
        """Derivatives of the loss by (floor, amplitude, exponent) on a new last axis of length 3."""
        excess = self._excess(flops)
        by_exponent = -np.log(np.asarray(flops, dtype=float)) * excess
        return np.stack([np.ones_like(excess), excess / self.amplitude, by_exponent], axis=-1)

    def flops_at(self, loss: float) -> float:
        """Compute at which the law reaches `loss`; infinite at or below the floor."""
        if loss <= self.floor:
            return math.inf
        return ((loss - self.floor) / self.amplitude) ** (-1.0 / self.exponent)

    def compute_factor(self, loss: float, change: float) -> float:
        """Factor of compute that a `change` in loss (nats, positive) is worth at `loss`.

        factor = ((L - E + change) / (L - E))^(1 / alpha)
        """
        if loss <= self.floor:
            return math.inf
        return (1.0 + change / (loss - self.floor)) ** (1.0 / self.exponent)

    def _excess(self, flops: ArrayLike) -> NDArray[np.float64]:
        return np.exp(math.log(self.amplitude) - self.exponent * np.log(np.asarray(flops, dtype=float)))


@dataclass(frozen=True, kw_only=True)
class LawForm:
    """One row of the table: a form that can be fitted."""

    name: str
    formula: str
    num_parameters: int
    floor: float | None
    """Floor the form fixes; None leaves it free."""


LAWS: Final = {
    form.name: form
    for form in (
        LawForm(name="power_floor", formula="E + A * C^-alpha", num_parameters=3, floor=None),
        LawForm(name="power", formula="A * C^-alpha", num_parameters=2, floor=0.0),
    )
}
"""`power_floor` is the forecast's law; `power` is its control, which always bends too little."""
