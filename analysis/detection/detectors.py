"""What a run is judged by, and the detectors that judge its losses.

Each detector is one class over one metric, fed a row at a time, with its memory stated; families of them are one
`Builder` each, and `divergence.BUILDERS` lists those. Constants and what they were tuned on: docs/benchmarks.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from rungwise.analysis.alerts import Detector
from rungwise.analysis.detection.drift import EvalDrift, LossDrift
from rungwise.analysis.detection.forecast_miss import ForecastMiss
from rungwise.analysis.detection.gap import EvalGap
from rungwise.analysis.detection.level import LevelShift
from rungwise.analysis.detection.pricing import Pricing
from rungwise.analysis.detection.resume import ResumeMismatch
from rungwise.analysis.detection.spike import LossSpike, NonFinite
from rungwise.analysis.forecast import Forecast


@dataclass(frozen=True, kw_only=True, eq=False)
class Basis:
    """What a run is judged by: its registered forecast, the ladder's other runs, and the size of its vocabulary."""

    forecast: Forecast | None = None
    peers: pd.DataFrame | None = None
    vocab_size: int | None = None


Builder = Callable[[Basis], Iterable[Detector]]
"""Makes the detectors of one subject that this basis allows."""


def loss_detectors(basis: Basis) -> Iterator[Detector]:
    """The rules for losses, training and evaluation."""
    forecast = basis.forecast
    pricing = Pricing(forecast) if forecast is not None else None
    yield from (NonFinite(), LossSpike(), LevelShift(forecast), LossDrift(pricing), ResumeMismatch())
    yield EvalDrift()
    yield LevelShift(forecast, rule="eval_level", metric="eval/loss")
    yield EvalGap()
    if forecast is not None and forecast.curve:
        yield ForecastMiss(forecast)
