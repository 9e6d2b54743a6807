"""The back-test: what is held out, how it is scored, and that it uses the forecast itself."""

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.backtest import backtest, interval_score
from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.laws import PowerLaw, SurfaceLaw
from rungwise.analysis.forecast import forecast_final

LAW = PowerLaw(1.6, 95.25, 0.09412)


def ladder(count: int = 6, seed: int = 0) -> pd.DataFrame:
    flops = np.geomspace(1e18, 3e20, count)
    noise = 0.001 * np.random.default_rng(seed).standard_normal(count)
    return pd.DataFrame(
        {"run": [f"r{i}" for i in range(count)], "flops": flops, "loss": LAW.value(flops) * np.exp(noise)}
    )


def test_backtest_forecasts_each_upper_rung_from_those_below():
    table = ladder()
    found = backtest(table)
    assert [row["run"] for row in found.rows] == ["r3", "r4", "r5"]
    row = found.rows[-1]
    alone = forecast_final(table.iloc[:5], {"flops": table["flops"].iloc[5]})
    assert (row["point"], row["low"], row["high"]) == (alone.point, alone.low, alone.high)
    assert row["error"] == pytest.approx(alone.point - table["loss"].iloc[5])
    copied = abs(table["loss"].iloc[4] - table["loss"].iloc[5])
    assert row["skill"] == pytest.approx(1 - abs(row["error"]) / copied)
    assert row["compute_factor"] > 1.0


def test_backtest_summary_is_of_its_rows():
    found = backtest(ladder(8, seed=3))
    summary, judged = found.summary, [row for row in found.rows if row["inside"] is not None]
    assert summary is not None
    assert summary["held_out"] == len(found.rows)
    assert summary["covered"] == pytest.approx(np.mean([row["inside"] for row in judged]))
    assert summary["mean_abs_percent"] == pytest.approx(np.mean([abs(row["percent"]) for row in found.rows]))
    assert summary["nominal"] == 0.9


def test_backtest_counts_a_rung_off_the_law_as_outside():
    table = ladder()
    table.loc[5, "loss"] *= 1.04
    assert backtest(table).rows[-1]["inside"] is False
    assert backtest(ladder()).rows[-1]["inside"] is True


def test_backtest_of_free_sizes_holds_out_upper_shares_once():
    rng = np.random.default_rng(4)
    params = np.exp(rng.uniform(np.log(5e7), np.log(3e9), 36))
    tokens = params * np.exp(rng.uniform(np.log(5.0), np.log(150.0), 36))
    loss = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28).value(params, tokens) * np.exp(0.002 * rng.standard_normal(36))
    found = backtest(pd.DataFrame({"num_params": params, "tokens": tokens, "loss": loss}))
    assert len(found.rows) == 18
    assert len({row["run"] for row in found.rows}) == 18
    assert found.summary is not None
    assert found.summary["mean_abs_percent"] < 1.0
    assert all(row["extrapolation_ratio"] > 1.0 for row in found.rows)


def test_backtest_refuses_three_rungs():
    with pytest.raises(UnfitForecast, match="3 usable runs leave none"):
        backtest(ladder(3))


def test_interval_score_is_winklers():
    assert interval_score(2.0, 2.2, 2.1, level=0.9) == pytest.approx(0.2)
    assert interval_score(2.0, 2.2, 1.95, level=0.9) == pytest.approx(0.2 + 20 * 0.05)
    assert interval_score(2.0, 2.2, 2.3, level=0.5) == pytest.approx(0.2 + 4 * 0.1)
