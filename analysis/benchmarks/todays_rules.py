"""Rules that teams run today, as they publish them, to stand beside ours: each says at which rows it would alarm.

Windows given in minutes are taken at 20 seconds a step. NaN where a rule has too few rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
FLOOR_ROWS: Final = 15
"""5 minutes."""
MEAN_ROWS: Final = 180
"""60 minutes."""
LOSS_JUMP: Final = 1.0
MAX_GRAD_NORM: Final = 2.0
GRAD_NORM_FROM: Final = 1500
"""Step before which a healthy gradient norm is large."""


def six_sigma(table: pd.DataFrame, *, window: int = 128, least: int = 64, sigma: float = 6.0) -> Flags:
    """Loss over mean + 6 sd of the last 128 (OLMo-core's stability monitor; Levanter and MaxText copy it)."""
    loss: Any = _loss(table)
    past = loss.shift(1).rolling(window, min_periods=least)
    return (loss > past.mean() + sigma * past.std()).to_numpy()


def floor_rule(table: pd.DataFrame) -> Flags:
    """Lowest loss of 5 minutes over the mean of the hour before + max(0.05, 6 sigma) (Marin's hero dashboard)."""
    loss: Any = _loss(table)
    past = loss.shift(FLOOR_ROWS).rolling(MEAN_ROWS, min_periods=20)
    limit = past.mean() + np.maximum(0.05, 6.0 * past.std())
    return (loss.rolling(FLOOR_ROWS, min_periods=5).min() > limit).to_numpy()


def fixed_thresholds(table: pd.DataFrame) -> Flags:
    """The same dashboard's fixed limits: loss floor up by 1.0, gradient norm over 2.0, evaluation worse than before."""
    flags = np.zeros(len(table), dtype=bool)
    if "train/loss" in table:
        loss: Any = _loss(table)
        mean = loss.shift(FLOOR_ROWS).rolling(MEAN_ROWS, min_periods=20).mean()
        flags |= (loss.rolling(FLOOR_ROWS, min_periods=5).min() > mean + LOSS_JUMP).to_numpy()
    if "train/grad_norm" in table:
        flags |= ((table["train/grad_norm"] > MAX_GRAD_NORM) & (table["step"] > GRAD_NORM_FROM)).to_numpy()
    if "eval/loss" in table:
        evaluations: Any = table["eval/loss"].dropna()
        flags[np.flatnonzero(table["eval/loss"].notna())] |= (evaluations.diff() > 0).to_numpy()
    return flags


def _loss(table: pd.DataFrame) -> Any:
    return table["train/loss" if "train/loss" in table else "eval/loss"]


RULES: Final[Mapping[str, Callable[[pd.DataFrame], Flags]]] = {
    "6 sigma over 128": six_sigma,
    "floor rule": floor_rule,
    "fixed thresholds": fixed_thresholds,
}


def alarms(flags: Flags, *, quiet: int = 128) -> list[int]:
    """Positions at which an alarm begins: flagged, and no flag in the `quiet` rows before.

    >>> alarms(np.array([False, True, True, False]))
    [1]
    """
    found = np.flatnonzero(flags)
    return [int(at) for index, at in enumerate(found) if index == 0 or at - found[index - 1] > quiet]
