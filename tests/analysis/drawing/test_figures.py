"""Figures hold what they should, are told apart without colour, and touch no global state."""

import subprocess
import sys
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.drawing.evidence_figures import backtest_figure, collapse_figure, leave_one_out_figure
from rungwise.analysis.drawing.figure_style import RUNG_LINES, RUNG_MARKERS, RUNG_SHADES, rung_styles
from rungwise.analysis.drawing.figures import (
    drops_figure,
    floor_profile_figure,
    ladder_fit_figure,
    metric_figure,
    trajectory_figure,
)
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.leave_out import leave_one_rung_out
from rungwise.analysis.forecast import backtest_final, forecast_final
from rungwise.analysis.nowcast import nowcast
from rungwise.analysis.points import ladder_points
from rungwise.analysis.whole_curves.metric_curves import forecast_metric


def drawn(figure: Figure) -> int:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    return len(buffer.getvalue())


def labels_of(figure: Figure) -> list[str]:
    boxes = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None] + figure.legends
    return [text.get_text() for box in boxes for text in box.get_texts()]


def by_progress(run, metric: str) -> Any:
    rows = run.trajectory[["tokens", metric]].dropna()
    return pd.DataFrame({"progress": rows["tokens"] / run.plan["tokens"], "loss": rows[metric], metric: rows[metric]})


def test_figures_draw_a_planted_ladder(ladder, hero, curves):
    runs, run = ladder(), hero()
    forecast = forecast_final(ladder_points(runs), run.plan)
    band = forecast_curve(curves(runs, "train/loss"), run.plan)
    rungs = {each.run: by_progress(each, "train/loss") for each in runs[:4]}
    plain = band.drop(columns=["low_all", "high_all"])
    figures = [
        ladder_fit_figure(forecast, outcome=1.25),
        trajectory_figure(by_progress(run, "train/loss"), band, rungs=rungs, alerts=[{"progress": 0.4, "rule": "x"}]),
        trajectory_figure(None, plain),
        drops_figure({each.run: by_progress(each, "moe/drop_fraction") for each in [*runs[:4], run]}),
        floor_profile_figure(forecast),
    ]
    assert all(drawn(figure) > 2000 for figure in figures)
    assert labels_of(figures[0])[-1] == "hero outcome"
    assert "band for the whole curve" in labels_of(figures[1])
    assert "band for the whole curve" not in labels_of(figures[2])
    assert all(any(axes.get_xlabel() for axes in figure.axes) for figure in figures)


def test_fit_figure_shows_each_rungs_residual(ladder, hero):
    forecast = forecast_final(ladder_points(ladder()), hero().plan)
    residuals = ladder_fit_figure(forecast).axes[1]
    (points,) = [line for line in residuals.lines if line.get_marker() == "o"]
    flops, loss = (np.array([row[key] for row in forecast.used]) for key in ("flops", "loss"))
    law = forecast.laws[0]
    predicted = law["floor"] + law["amplitude"] * flops ** -law["exponent"]
    np.testing.assert_allclose(np.asarray(points.get_ydata(), dtype=float), 100 * (loss / predicted - 1), rtol=1e-6)


def test_nowcast_is_drawn_beside_the_registered_band(ladder, hero, curves):
    runs, run = ladder(), hero()
    band = forecast_curve(curves(runs, "train/loss"), run.plan)
    seen = by_progress(run, "train/loss").query("progress <= 0.4")
    figure = trajectory_figure(seen, band, updated=nowcast(band, seen).updated)
    assert {"registered forecast", "nowcast", "nowcast band", "hero"} <= set(labels_of(figure))
    assert drawn(figure) > 2000


def test_metric_figure_draws_a_gradient_norm(ladder, hero, curves):
    runs, run, metric = ladder(), hero(), "train/grad_norm"
    forecast = forecast_metric(curves(runs, metric).rename(columns={"loss": metric}), run.plan, metric)
    rungs = {each.run: by_progress(each, metric)[["progress", metric]] for each in runs[:4]}
    figure = metric_figure(by_progress(run, metric)[["progress", metric]], forecast, rungs=rungs, metric=metric)
    assert figure.axes[0].get_ylabel() == metric
    assert drawn(figure) > 2000


def test_collapse_figure_draws_the_share_of_excess(ladder, curves):
    table = curves(ladder()[:4], "eval/loss")
    figure = collapse_figure(table, floor=0.6)
    above, below = figure.axes
    assert len(above.lines) == 4
    assert all(np.asarray(line.get_ydata(), dtype=float)[-1] == pytest.approx(1.0) for line in above.lines)
    assert len(below.lines) == 5
    assert drawn(figure) > 2000
    with pytest.raises(ValueError, match="must lie below every final loss"):
        collapse_figure(table, floor=1.5)


def test_backtest_figure_tells_hits_from_misses_by_their_marks():
    rows = [
        {"run": "a", "observed": 2.0, "point": 2.01, "low": 1.98, "high": 2.04},
        {"run": "b", "observed": 2.0, "point": 2.10, "low": 2.05, "high": 2.15},
        {"run": "c", "observed": 2.0, "point": 1.99, "low": None, "high": None, "extrapolation_ratio": 8.0},
    ]
    figure = backtest_figure(rows)
    labels = labels_of(figure)
    assert [label.rsplit("interval ")[-1] for label in labels[1:]] == ["holds it", "misses it", "not known"]
    marks = [line.get_marker() for line in figure.axes[0].lines if line.get_label() in labels[1:]]
    assert marks == ["D", "X", "o"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b", "c (8×)"]
    assert drawn(figure) > 2000


def test_backtest_figure_draws_what_the_backtest_returns(ladder):
    assert drawn(backtest_figure(backtest_final(ladder_points(ladder())))) > 2000


def test_leave_one_out_names_the_rung_and_draws_it(ladder, hero):
    points, target = ladder_points(ladder()), hero().plan
    rows = leave_one_rung_out(points, target)
    assert [row["rung"] for row in rows] == ["d32", "d64", "d96", "d128"]
    kept: Any = points[points["rung"] != "d96"]
    without = forecast_final(kept.reset_index(drop=True), target)
    assert rows[2]["point"] == pytest.approx(without.point)
    figure = leave_one_out_figure(forecast_final(points, target), rows)
    assert len(figure.axes[0].get_yticks()) == 4
    assert drawn(figure) > 2000
    with pytest.raises(UnfitForecast, match="3 rungs leave fewer than 3"):
        leave_one_rung_out(ladder_points(ladder()[:3]), target)


def test_rungs_differ_by_line_and_by_mark_as_well_as_by_shade():
    for count in (2, 3, 4, 5):
        styles = rung_styles(count)
        assert len({str(style["ls"]) for style in styles}) == count
        assert len({style["color"] for style in styles}) == count
    assert len(set(RUNG_MARKERS)) == len(RUNG_MARKERS)
    assert len(RUNG_LINES) == len(RUNG_SHADES)
    brightness = [
        sum(int(shade[i : i + 2], 16) * w for i, w in ((1, 0.3), (3, 0.59), (5, 0.11))) for shade in RUNG_SHADES
    ]
    assert np.all(np.diff(brightness) < -15)  # told apart in grey


def test_ladder_figure_without_an_interval_draws(ladder, hero):
    points = ladder_points(ladder()[:3])
    forecast = forecast_final(points, hero().plan)
    assert forecast.low is None
    assert drawn(ladder_fit_figure(forecast)) > 2000
    assert drawn(floor_profile_figure(forecast)) > 2000


def test_figures_import_no_pyplot():
    modules = ("evidence_figures", "figures", "figure_style")
    code = "; ".join(f"import rungwise.analysis.drawing.{name}" for name in modules)
    code += "; import sys; print('matplotlib.figure' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]
