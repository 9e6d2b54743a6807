"""Public ways to forecast a final loss, written out or called, to measure ours against: point and 90 % interval."""

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rungwise.analysis.fitting.bootstrap import bootstrap_surface
from rungwise.analysis.fitting.fit import fit_law
from rungwise.analysis.fitting.surface import forecast_surface, lower_rows
from rungwise.analysis.fitting.surface_fit import fit_surface

Array = NDArray[np.float64]
Rows = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Loss at each target (t,), and its interval where the method has one."""

    point: Array
    low: Array | None = None
    high: Array | None = None


def ours(rows: Rows, targets: Rows) -> Prediction:
    found = forecast_surface(rows, targets["params"], targets["tokens"])
    return Prediction(point=found.quantile(0.5), low=found.quantile(0.05), high=found.quantile(0.95))


def robust(rows: Rows, targets: Rows) -> Prediction:
    """Hoffmann's approach 3 as refitted by Epoch and OLMo: Huber 1e-3 on log loss, at its global optimum."""
    return _plain(rows, targets, delta=1e-3, scale="log")


def robust_interval(rows: Rows, targets: Rows, *, draws: int = 400) -> Prediction:
    """The same with the interval of its users: pair bootstrap of the constants, plus resampled residuals."""
    drawn = bootstrap_surface(rows["params"], rows["tokens"], rows["loss"], kind="pair", draws=draws)
    at = (targets["params"], targets["tokens"])
    return Prediction(point=robust(rows, targets).point, low=drawn.quantile(*at, 0.05), high=drawn.quantile(*at, 0.95))


def squares(rows: Rows, targets: Rows) -> Prediction:
    """Least squares on loss (VPNLS, ml-scalefit)."""
    return _plain(rows, targets, delta=math.inf, scale="nats")


def squares_log(rows: Rows, targets: Rows) -> Prediction:
    return _plain(rows, targets, delta=math.inf, scale="log")


def floorless(rows: Rows, targets: Rows) -> Prediction:
    """Two powers without a floor."""
    return _plain(rows, targets, delta=1e-3, scale="log", form="floorless")


def shared(rows: Rows, targets: Rows) -> Prediction:
    """Gadre et al.: one exponent, least squares on loss."""
    return _plain(rows, targets, delta=math.inf, scale="nats", form="overtraining")


def in_compute(rows: Rows, targets: Rows) -> Prediction:
    """Power law in compute with a free floor, through all rows alike."""
    fit = fit_law(rows["flops"], rows["loss"], delta=math.inf)
    return Prediction(point=fit.law.value(targets["flops"]))


def inflated(rows: Rows, targets: Rows) -> Prediction:
    """`robust_interval` times the constant that would have scored best on the upper rows of the training set."""
    lower = lower_rows(rows["flops"])
    below, above = ({key: column[mask] for key, column in rows.items()} for mask in (lower, ~lower))
    inner, factors = robust_interval(below, above), np.geomspace(0.5, 8.0, 41)
    scores = [mean_score(_stretch(inner, factor), above["loss"]) for factor in factors]
    return _stretch(robust_interval(rows, targets), float(factors[int(np.argmin(scores))]))


def simple_scaling_laws(rows: Rows, targets: Rows) -> Prediction:
    """The package of that name, its separable law with its interval for a new run."""
    import polars  # pyright: ignore[reportMissingImports]
    from simple_scaling_laws import fit  # pyright: ignore[reportMissingImports]

    names = {"params": "model_size__n_params", "tokens": "dataset_size__n_subjects"}
    count = rows["loss"].size
    table: dict[str, Any] = {
        "training_run_id": [f"r{index}" for index in range(count)],
        "train_set_id": [f"t{index}" for index in range(count)],
        "test_set_id": ["test"] * count,
        "optimizer_seed": [0] * count,
        **{name: rows[key] for key, name in names.items()},
        "test_loss__loss": rows["loss"],
    }
    points = polars.DataFrame({name: targets[key] for key, name in names.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says of every such point that it extrapolates
        model = fit(polars.DataFrame(table), law="separable-power", n_draws=200, seed=0)
        found = model.predict(points, kind="new-run", quantiles=[0.05, 0.5, 0.95])
    columns = {suffix: next(name for name in found.columns if name.endswith(suffix)) for suffix in ("q050", "q950")}
    middle = next(name for name in found.columns if name.endswith("median"))
    return Prediction(
        point=found[middle].to_numpy(), low=found[columns["q050"]].to_numpy(), high=found[columns["q950"]].to_numpy()
    )


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def mean_score(prediction: Prediction, observed: Array, *, level: float = 0.9) -> float:
    """Mean Winkler score, nats."""
    assert prediction.low is not None
    assert prediction.high is not None
    miss = np.maximum(np.maximum(prediction.low - observed, observed - prediction.high), 0.0)
    return float(np.mean(prediction.high - prediction.low + 2.0 / (1.0 - level) * miss))


def coverage(prediction: Prediction, observed: Array) -> NDArray[np.bool_]:
    assert prediction.low is not None
    assert prediction.high is not None
    return (prediction.low <= observed) & (observed <= prediction.high)


def _plain(rows: Rows, targets: Rows, *, form: str = "chinchilla", **options: Any) -> Prediction:
    fit = fit_surface(rows["params"], rows["tokens"], rows["loss"], form=form, **options)
    return Prediction(point=fit.law.value(targets["params"], targets["tokens"]))


def _stretch(prediction: Prediction, factor: float) -> Prediction:
    """The interval about the point, each side times `factor`."""
    assert prediction.low is not None
    assert prediction.high is not None
    point = prediction.point
    low, high = point - factor * (point - prediction.low), point + factor * (prediction.high - point)
    return Prediction(point=point, low=low, high=high)


POINT_METHODS: Final[dict[str, Callable[[Rows, Rows], Prediction]]] = {
    "Huber, 5 constants": robust,
    "least squares": squares,
    "least squares, log": squares_log,
    "shared exponent": shared,
    "no floor": floorless,
    "power law in C": in_compute,
    **({"simple-scaling-laws": simple_scaling_laws} if installed("simple_scaling_laws") else {}),
}
INTERVAL_METHODS: Final[dict[str, Callable[[Rows, Rows], Prediction]]] = {
    "Huber + pair bootstrap": robust_interval,
    **({"simple-scaling-laws, new run": simple_scaling_laws} if installed("simple_scaling_laws") else {}),
    "Huber + bootstrap, inflated": inflated,
}
