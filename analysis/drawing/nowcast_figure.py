"""Figure of how a hero's nowcast moved: what was registered, what each part of the run made of it, what came."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rungwise.analysis.drawing.figure_style import FORECAST, NOWCAST, OUTCOME, canvas


def nowcast_history_figure(
    registered: Mapping[str, float],
    rows: Sequence[Mapping[str, float]],
    *,
    level: float,
    outcome: float | None = None,
    unit: str = "nats per token",
) -> Figure:
    """The final loss with its interval, as registered and as updated along the run.

    Args:
        registered: point, low and high; drawn at the start of the run.
        rows: the same with progress, one a nowcast.
        level: coverage the intervals aim at.
        outcome: the final loss measured, if it is.
    """
    figure, axes = canvas(3.4)
    axes.axhspan(registered["low"], registered["high"], color=FORECAST, alpha=0.10, lw=0)
    whiskers = {"capsize": 4, "lw": 1.6, "ms": 6, "mec": "white", "mew": 0.8, "ls": "none"}
    axes.errorbar([0.0], [registered["point"]], yerr=_reach([registered]), marker="D", color=FORECAST, zorder=4,
                  label=f"registered, {level:.0%} interval", **whiskers)  # fmt: skip
    if rows:
        at, points = ([row[key] for row in rows] for key in ("progress", "point"))
        axes.errorbar(at, points, yerr=_reach(rows), marker="o", color=NOWCAST, zorder=5,
                      label=f"nowcast, {level:.0%} interval", **whiskers)  # fmt: skip
    if outcome is not None:
        axes.axhline(outcome, color=OUTCOME, lw=1.4, ls=(0, (6, 2)))
        axes.plot([1.0], [outcome], "*", color=OUTCOME, ms=12, mec="white", mew=0.8, label="hero outcome", zorder=6)
    axes.set_xlim(-0.03, 1.03)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the run seen")
    axes.set_ylabel(f"final loss ({unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def _reach(rows: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Distances of the interval's ends from the point, (2, rows)."""
    return np.array([[row["point"] - row["low"] for row in rows], [row["high"] - row["point"] for row in rows]])
