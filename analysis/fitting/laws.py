"""Scaling laws as values: what is fitted, its gradient, and the table of forms.

Legend: L loss (nats per token), C training compute (FLOPs), N parameters, D training tokens, E floor (nats per
token, the loss no compute removes), A and B amplitudes, alpha and beta exponents, kappa outer exponent. `fit.py` and
`surface_fit.py` find the constants; `intervals.py` and `surface.py` say how far to believe them. Laws of whole curves
under a learning-rate schedule are `schedule_law.py`.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True)
class SurfaceLaw:
    """L(N, D) = E + (A * N^-alpha + B * D^-beta)^kappa.

    kappa = 1 is Hoffmann et al. 2022 (arXiv 2203.15556, approach 3); kappa = 1 and alpha = beta is Gadre et al.
    2024 (arXiv 2403.08540), where loss at equal compute depends on tokens per parameter alone; E = 0 with kappa free
    is Kaplan et al. 2020 (arXiv 2001.08361).

    >>> round(float(SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28).value(70e9, 1.4e12)), 4)
    1.9366
    """

    floor: float
    size_amplitude: float
    size_exponent: float
    token_amplitude: float
    token_exponent: float
    outer_exponent: float = 1.0

    def value(self, params: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Loss at `params` and `tokens`, nats per token, broadcast together."""
        size, data = self._terms(params, tokens)
        return self.floor + (size + data) ** self.outer_exponent

    def gradient(self, params: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Derivatives by (floor, size_amplitude, size_exponent, token_amplitude, token_exponent, outer_exponent)."""
        size, data = self._terms(params, tokens)
        inner = size + data
        by_inner = self.outer_exponent * inner ** (self.outer_exponent - 1.0)
        columns = (
            np.ones_like(inner),
            by_inner * size / self.size_amplitude,
            -by_inner * size * np.log(np.asarray(params, dtype=float)),
            by_inner * data / self.token_amplitude,
            -by_inner * data * np.log(np.asarray(tokens, dtype=float)),
            inner**self.outer_exponent * np.log(inner),
        )
        return np.stack(columns, axis=-1)

    def compute_exponent(self, params: float, tokens: float) -> float:
        """-d log(L - E) / d log C where parameters and tokens grow together."""
        size, data = (float(term) for term in self._terms(params, tokens))
        return 0.5 * self.outer_exponent * (self.size_exponent * size + self.token_exponent * data) / (size + data)

    def along_compute(self, params: float, tokens: float) -> PowerLaw:
        """The power law in C = 6 N D that touches this one at a run, at that run's tokens per parameter."""
        exponent = self.compute_exponent(params, tokens)
        excess = float(self.value(params, tokens)) - self.floor
        amplitude = math.exp(math.log(excess) + exponent * math.log(6.0 * params * tokens))
        return PowerLaw(self.floor, amplitude, exponent)

    def _terms(self, params: ArrayLike, tokens: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        log_params, log_tokens = np.broadcast_arrays(np.log(params), np.log(tokens))
        size = np.exp(math.log(self.size_amplitude) - self.size_exponent * log_params)
        return size, np.exp(math.log(self.token_amplitude) - self.token_exponent * log_tokens)

    def to_dict(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "size_amplitude": self.size_amplitude,
            "size_exponent": self.size_exponent,
            "token_amplitude": self.token_amplitude,
            "token_exponent": self.token_exponent,
            "outer_exponent": self.outer_exponent,
        }


@dataclass(frozen=True, kw_only=True)
class LawForm:
    """One row of the table: a form that can be fitted."""

    name: str
    formula: str
    num_parameters: int
    floor: float | None
    """Floor the form fixes; None leaves it free."""
    surface: bool = False
    """A law in parameters and tokens; else in compute alone."""
    shared_exponent: bool = False
    outer_free: bool = False


LAWS: Final = {
    form.name: form
    for form in (
        LawForm(name="power_floor", formula="E + A * C^-alpha", num_parameters=3, floor=None),
        LawForm(name="power", formula="A * C^-alpha", num_parameters=2, floor=0.0),
        LawForm(
            name="chinchilla", formula="E + A * N^-alpha + B * D^-beta", num_parameters=5, floor=None, surface=True
        ),
        LawForm(
            name="overtraining",
            formula="E + A * N^-alpha + B * D^-alpha",
            num_parameters=4,
            floor=None,
            surface=True,
            shared_exponent=True,
        ),
        LawForm(
            name="outer_power",
            formula="E + (A * N^-alpha + B * D^-beta)^kappa",
            num_parameters=6,
            floor=None,
            surface=True,
            outer_free=True,
        ),
        LawForm(
            name="kaplan",
            formula="(A * N^-alpha + B * D^-beta)^kappa",
            num_parameters=5,
            floor=0.0,
            surface=True,
            outer_free=True,
        ),
        LawForm(name="floorless", formula="A * N^-alpha + B * D^-beta", num_parameters=4, floor=0.0, surface=True),
    )
}
"""`power_floor` forecasts a ladder of one recipe, the surface forms one whose sizes and tokens vary freely; `power`
and `floorless` are their controls, which always bend too little."""
