"""Which runs a fitted surface rests on: what leaving out each one would move."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rungwise.analysis.fitting.surface_fit import HUBER_DELTA, fit_surface, surface_problem, surface_rows


def rank_influence(
    params: ArrayLike, tokens: ArrayLike, loss: ArrayLike, *, form: str = "chinchilla", delta: float = HUBER_DELTA
) -> Any:
    """A table of the runs, the most influential first: row, params, tokens, loss, residual, moves, token_exponent.

    moves: root mean square change of log loss over all runs when the run is left out; token_exponent: change of that
    constant (zero where it is shared). Both to first order, H the robust Gauss-Newton matrix (Cook 1977, with Huber's
    psi for the residual): delta theta = H^-1 J_i psi(r_i) / (1 - h_i).
    """
    rows = surface_rows(params, tokens, loss)
    fit = fit_surface(params, tokens, loss, form=form, delta=delta)
    problem = surface_problem(rows, form=form, delta=delta)
    residuals, jacobian = (array[0] for array in problem.residuals(fit.theta[None]))
    free = np.flatnonzero(problem.free)
    jacobian = jacobian[:, free]
    share = np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))
    inverse = np.linalg.pinv(jacobian.T @ (share[:, None] * jacobian))
    leverage = np.clip(share * np.einsum("ni,ij,nj->n", jacobian, inverse, jacobian), 0.0, 0.99)
    pull = np.clip(residuals, -delta, delta)
    change = (jacobian * (pull / (1.0 - leverage))[:, None]) @ inverse
    table = pd.DataFrame(
        {
            "row": np.arange(rows.loss.size),
            "params": np.asarray(params, dtype=float),
            "tokens": np.asarray(tokens, dtype=float),
            "loss": rows.loss,
            "residual": residuals,
            "moves": np.sqrt(np.mean((change @ jacobian.T) ** 2, axis=1)),
            "token_exponent": change[:, free == 4].sum(axis=1),
        }
    )
    return table.sort_values("moves", ascending=False, ignore_index=True)
