"""Resampled fits: right spread, and every draw accounted for."""

import numpy as np
import pytest

from rungwise.analysis.fitting.bootstrap import bootstrap_surface
from rungwise.analysis.fitting.laws import SurfaceLaw

LAW = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28)


def rows(seed: int, noise: float = 0.004, sizes: int = 9, ratios: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    params, ratio = np.meshgrid(np.geomspace(4e7, 8e9, sizes), np.geomspace(2.0, 200.0, ratios))
    params, tokens = params.ravel(), (params * ratio).ravel()
    noisy = noise * np.random.default_rng(seed).standard_normal(params.size)
    return params, tokens, LAW.value(params, tokens) * np.exp(noisy)


@pytest.mark.parametrize("kind", ["residual", "pair", "wild"])
def test_bootstrap_spread_is_that_of_repeated_noise(kind):
    repeats = [bootstrap_surface(*rows(seed), draws=1, delta=1.0).laws[0].size_exponent for seed in range(60)]
    drawn = bootstrap_surface(*rows(0), kind=kind, draws=200, delta=1.0)
    assert drawn.errors()["size_exponent"] == pytest.approx(np.std(repeats) / np.sqrt(2), rel=0.4)
    assert sum(drawn.degenerate.values()) + len(drawn.laws) == 200


def test_bootstrap_new_run_is_wider_than_the_curve_and_covers():
    drawn = bootstrap_surface(*rows(1), draws=200)
    target = ([3e9], [6e10])
    new = [float(drawn.quantile(*target, at)[0]) for at in (0.05, 0.95)]
    curve = [float(drawn.quantile(*target, at, new_run=False)[0]) for at in (0.05, 0.95)]
    assert new[1] - new[0] > 2 * (curve[1] - curve[0])
    assert curve[0] < float(LAW.value(3e9, 6e10)) < curve[1]


def test_bootstrap_counts_draws_that_fix_nothing():
    params = np.array([1e8, 1e8, 1e8, 1e8, 1e8, 1e8, 1e8, 1e9, 1e9])
    tokens = np.array([2e9, 2e9, 2e9, 2e9, 2e9, 2e9, 8e9, 2e9, 8e9])
    drawn = bootstrap_surface(params, tokens, LAW.value(params, tokens) * 1.001 ** np.arange(9), kind="pair", draws=100)
    assert drawn.degenerate["collinear"] > 20
    assert sum(drawn.degenerate.values()) + len(drawn.laws) == 100


def test_bootstrap_refuses_few_runs_and_unknown_kinds():
    params, tokens, loss = rows(0)
    with pytest.raises(ValueError, match="too few to resample"):
        bootstrap_surface(params[::8], tokens[::8], loss[::8])
    with pytest.raises(ValueError, match="residual, pair or wild"):
        bootstrap_surface(params, tokens, loss, kind="jackknife")  # type: ignore[arg-type]
