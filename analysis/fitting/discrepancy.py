"""What a law misses on its own rows, carried to runs beyond them.

log loss = law(theta) + discrepancy + noise, linear in theta about the fit, theta with its priors, the discrepancy a
Gaussian process over (log N, log D) (Kennedy and O'Hagan 2001). Its size and reach and the size of the noise are
integrated over a small grid, weighted by the likelihood of the rows. The uncertainty of the law, of its form and of a
new run then come out of one calculation, and grow with the distance from the rows.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

Array = NDArray[np.float64]

REACH: Final = (2.0, 4.0, 8.0)
"""Correlation lengths tried, e-folds of parameters or tokens: a discrepancy that changes faster is noise."""
SIZE: Final = (0.3, 1.0, 2.0, 4.0, 8.0)
"""Sizes of the discrepancy tried, in units of the rows' robust spread."""
NOISE: Final = (0.5, 0.7, 1.0)
"""Sizes of the noise tried, in the same units."""
REACH_PRIOR: Final = (3.0, 1.0)
"""Median and log spread of the reach: about one decade of compute along the ladder."""
SIZE_PRIOR: Final = (1.0, 1.5)
"""Median and log spread of the size: of the order of the noise, otherwise open."""


@dataclass(frozen=True, kw_only=True)
class Linearised:
    """A fitted law about its optimum: log-loss residuals (n,), derivatives on rows (n, p) and targets (t, p).

    prior_mean (p,) and prior_covariance (p, p) are of the constants relative to the optimum; spread is the rows'
    robust residual spread, trust (n,) in (0, 1] how far each row is believed.
    """

    residuals: Array
    rows: Array
    targets: Array
    prior_mean: Array
    prior_covariance: Array
    spread: float
    trust: Array


def predict(law: Linearised, row_logs: Array, target_logs: Array) -> tuple[Array, Array]:
    """Correction to the law's log loss at the targets and its standard deviation for a new run, (t,) each.

    Args:
        row_logs, target_logs: (log N, log D) of rows (n, 2) and targets (t, 2).
    """
    gap = np.linalg.norm(row_logs[:, None] - row_logs[None], axis=-1)
    reach_out = np.linalg.norm(target_logs[:, None] - row_logs[None], axis=-1)
    y = law.residuals - law.rows @ law.prior_mean
    shared = law.rows @ law.prior_covariance @ law.rows.T
    towards = law.targets @ law.prior_covariance @ law.rows.T
    own = np.einsum("ij,jk,ik->i", law.targets, law.prior_covariance, law.targets)
    scores, means, variances = [], [], []
    for reach in REACH:
        kernel, kernel_out = _matern(gap / reach), _matern(reach_out / reach)
        for size in SIZE:
            variance = (size * law.spread) ** 2
            for noise in NOISE:
                row_noise = (noise * law.spread) ** 2
                covariance = variance * kernel + shared + np.diag(row_noise / law.trust)
                factor = linalg.cholesky(covariance + 1e-14 * np.eye(y.size), lower=True)
                white = linalg.solve_triangular(factor, y, lower=True)
                cross = linalg.solve_triangular(factor, (variance * kernel_out + towards).T, lower=True)
                likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
                scores.append(likelihood + _log_prior(reach, REACH_PRIOR) + _log_prior(size, SIZE_PRIOR))
                means.append(law.targets @ law.prior_mean + cross.T @ white)
                tail = _new_run_variance(law.residuals, law.rows.shape[1], row_noise, law.spread)
                variances.append(variance + own - np.sum(cross**2, axis=0) + tail)
    weight = np.exp(np.array(scores) - max(scores))
    weight /= weight.sum()
    mean = weight @ np.array(means)
    total = weight @ (np.array(variances) + (np.array(means) - mean) ** 2)
    return mean, np.sqrt(np.maximum(total, 0.0))


def _matern(scaled: Array) -> Array:
    """Matérn covariance of smoothness 3/2."""
    root = np.sqrt(3.0) * scaled
    return (1.0 + root) * np.exp(-root)


def _log_prior(value: float, prior: tuple[float, float]) -> float:
    return float(-0.5 * (np.log(value / prior[0]) / prior[1]) ** 2)


def _new_run_variance(residuals: Array, constants: int, row_noise: float, spread: float) -> float:
    """Noise of a new run: at least the geometric mean of the robust and the plain variance of the rows.

    A new run may be an outlier as often as a row was; the robust spread alone leaves that out.
    """
    plain = float(np.sum(residuals**2)) / max(residuals.size - constants, 1)
    return max(row_noise, spread * np.sqrt(plain))
