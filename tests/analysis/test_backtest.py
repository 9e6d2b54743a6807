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


def free_sizes(count: int = 24, seed: int = 5) -> pd.DataFrame:
    """Runs of a law in parameters without embedding, both counts stated."""
    rng = np.random.default_rng(seed)
    bare = np.exp(rng.uniform(np.log(2e7), np.log(2e9), count))
    tokens = bare * np.exp(rng.uniform(np.log(5.0), np.log(150.0), count))
    loss = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28).value(bare, tokens) * np.exp(0.002 * rng.standard_normal(count))
    whole = bare + 50_000 * 12 * np.cbrt(bare / 1.2e3)
    table = pd.DataFrame({"num_params": whole, "num_params_without_embedding": bare, "tokens": tokens, "loss": loss})
    return table.assign(run=[f"r{index}" for index in range(count)], flops=6 * whole * tokens)


def test_backtest_of_free_sizes_scores_the_mixture_of_both_counts():
    table = free_sizes()
    both = backtest(table)
    names = ["num_params", "num_params_without_embedding"]
    alone = {name: backtest(table.drop(columns=other)) for name, other in zip(names, names[::-1], strict=True)}
    for place, row in enumerate(both.rows):
        assert [item["count"] for item in row["counts"]] == names
        for item in row["counts"]:
            single = alone[item["count"]].rows[place]
            assert single["run"] == row["run"]
            assert all(item[key] == single[key] for key in ("point", "low", "high", "error", "inside"))
        low, high = (edge([item["point"] for item in row["counts"]]) for edge in (min, max))
        assert low - 1e-4 <= row["point"] <= high + 1e-4
        if high - low > 1e-3:
            assert low < row["point"] < high
        assert row["score"] == interval_score(row["low"], row["high"], row["observed"], level=0.9)
    apart = [np.ptp([item["point"] for item in row["counts"]]) for row in both.rows]
    assert max(apart) > 0.002
    assert both.summary is not None
    assert [item["count"] for item in both.summary["counts"]] == names
    for item in both.summary["counts"]:
        single = alone[item["count"]].summary
        assert single is not None
        assert item["mean_abs_percent"] == pytest.approx(single["mean_abs_percent"])
        assert item["covered"] == single["covered"]


def test_backtest_of_a_ladder_scores_the_mixture_of_both_counts_of_compute():
    table = ladder().assign(flops_with_head=lambda rungs: rungs["flops"] * (1 + 2.0 * (rungs["flops"] / 1e18) ** -0.3))
    row = backtest(table).rows[-1]
    hero = table.iloc[5].drop("loss").to_dict()
    mixture = forecast_final(table.iloc[:5], hero)
    assert (row["point"], row["low"], row["high"]) == (mixture.point, mixture.low, mixture.high)
    assert [item["count"] for item in row["counts"]] == ["flops", "flops_with_head"]
    head = table.assign(flops=table["flops_with_head"]).drop(columns="flops_with_head")
    alone = forecast_final(head.iloc[:5], {"flops": hero["flops_with_head"]})
    assert row["counts"][1]["point"] == pytest.approx(alone.point)
    assert row["counts"][1]["point"] != pytest.approx(row["counts"][0]["point"], rel=1e-5)


def test_backtest_adds_a_stated_correction_once():
    table = ladder()
    short = table.assign(loss=table["loss"] + 0.1, loss_correction=-0.1, loss_error=0.001)
    (plain, corrected) = (backtest(points).rows[-1] for points in (table.assign(loss_error=0.001), short))
    assert corrected["point"] == pytest.approx(plain["point"])
    assert corrected["observed"] == pytest.approx(plain["observed"])
