"""Figures hold what they should and touch no global state."""

import subprocess
import sys
from io import BytesIO

import pandas as pd
from matplotlib.figure import Figure

from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.figures import drops_figure, floor_profile_figure, ladder_fit_figure, trajectory_figure
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.points import ladder_points


def drawn(figure: Figure) -> int:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    return len(buffer.getvalue())


def by_progress(run, metric: str) -> pd.DataFrame:
    rows = run.trajectory[["tokens", metric]].dropna()
    return pd.DataFrame({"progress": rows["tokens"] / run.plan["tokens"], "loss": rows[metric], metric: rows[metric]})


def test_figures_draw_a_planted_ladder(ladder, hero, curves):
    runs, run = ladder(), hero()
    forecast = forecast_final(ladder_points(runs), run.plan)
    band = forecast_curve(curves(runs, "train/loss"), run.plan)
    rungs = {each.run: by_progress(each, "train/loss") for each in runs[:4]}
    figures = [
        ladder_fit_figure(forecast, outcome=1.25),
        trajectory_figure(by_progress(run, "train/loss"), band, rungs=rungs, alerts=[{"progress": 0.4, "rule": "x"}]),
        trajectory_figure(None, band),
        drops_figure({each.run: by_progress(each, "moe/drop_fraction") for each in [*runs[:4], run]}),
        floor_profile_figure(forecast),
    ]
    assert all(drawn(figure) > 2000 for figure in figures)
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels[-1] == "hero outcome"
    assert all(axes.get_xlabel() for figure in figures for axes in figure.axes[:1])


def test_ladder_figure_without_an_interval_draws(ladder, hero):
    points = ladder_points(ladder()[:3])
    forecast = forecast_final(points, hero().plan)
    assert forecast.low is None
    assert drawn(ladder_fit_figure(forecast)) > 2000
    assert drawn(floor_profile_figure(forecast)) > 2000


def test_analysis_imports_neither_jax_nor_pyplot():
    modules = "alerts curves detectors divergence figures fit forecast intervals laws peers points registry"
    code = "; ".join(f"import rungwise.analysis.{name}" for name in modules.split())
    code += "; import sys; print([m for m in ('jax', 'flax', 'mlflow', 'matplotlib.pyplot') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
