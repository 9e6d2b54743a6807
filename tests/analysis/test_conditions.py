"""What a forecast takes for granted: laws refused where they cannot hold, and recipes off their optimum."""

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.conditions import compare_conditions, ratio_spread, recipe_warnings, unstated_conditions
from rungwise.analysis.fitting.laws import SurfaceLaw
from rungwise.analysis.forecast import Forecast, forecast_final

LAW = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28)


def free_runs(count: int = 12) -> pd.DataFrame:
    params = np.geomspace(5e7, 1e9, count)
    tokens = params * np.where(np.arange(count) % 2, 20.0, 80.0)
    return pd.DataFrame({"num_params": params, "tokens": tokens, "loss": LAW.value(params, tokens)})


def method_of(forecast: Forecast) -> dict:
    assert forecast.method is not None
    return forecast.method


def test_law_in_compute_is_refused_where_tokens_per_parameter_differ():
    ladder = pd.DataFrame({"num_params": np.geomspace(5e7, 1e9, 5)}).assign(tokens=lambda t: 20 * t["num_params"])
    ladder["loss"] = LAW.value(ladder["num_params"], ladder["tokens"])
    assert method_of(forecast_final(ladder, {"num_params": 1e10, "tokens": 21.5e10}))["law"] == "compute"
    with pytest.raises(ValueError, match="within 10%"):
        forecast_final(ladder, {"num_params": 1e10, "tokens": 23e10})


def test_law_in_both_is_refused_on_one_line_and_says_so():
    ladder = pd.DataFrame({"num_params": np.geomspace(5e7, 1e9, 10)}).assign(tokens=lambda t: 20 * t["num_params"])
    ladder["loss"] = LAW.value(ladder["num_params"], ladder["tokens"])
    with pytest.raises(ValueError, match="lie on one line"):
        forecast_final(ladder, {"num_params": 1e10, "tokens": 40e10})


def test_law_in_both_is_used_where_sizes_and_tokens_vary():
    forecast = forecast_final(free_runs(), {"num_params": 1e10, "tokens": 2e11})
    assert method_of(forecast)["law"] == "parameters and tokens"
    assert forecast.point == pytest.approx(float(LAW.value(1e10, 2e11)), rel=0.01)
    assert {law["role"] for law in forecast.laws} >= {"forecast", "chinchilla", "overtraining", "outer_power"}


def test_hero_in_another_count_of_compute_is_refused():
    flops = [1e18, 1e19, 1e20, 1e21]
    rungs = pd.DataFrame({"flops": flops, "loss": [3.52, 3.15, 2.852, 2.596]})
    with pytest.raises(ValueError, match="in the same count"):
        forecast_final(rungs, {"flops_with_head": 1e23, "num_params": 1e10, "tokens": 2e11})
    with pytest.raises(ValueError, match="in the same count"):
        forecast_final(
            rungs.rename(columns={"flops": "flops_with_head"}).assign(num_params=1e9, tokens=2e10), {"flops": 1e23}
        )


def test_both_counts_are_fitted_and_their_disagreement_is_in_the_interval():
    flops = np.array([2.65e19, 1.73e20, 1.38e21, 7.74e21])
    head = np.array([5.5e19, 2.7e20, 1.8e21, 9.2e21])
    rungs = pd.DataFrame({"flops": flops, "loss": 1.5 + 84.71 * flops**-0.08996})
    alone = forecast_final(rungs, {"flops": 2.61e24})
    both = forecast_final(rungs.assign(flops_with_head=head), {"flops": 2.61e24, "flops_with_head": 2.7e24})
    counts = {row["count"]: row for row in method_of(both)["counts"]}
    assert counts["flops"]["point"] == pytest.approx(alone.point)
    assert counts["flops_with_head"]["point"] != pytest.approx(alone.point, abs=1e-3)
    points = sorted(row["point"] for row in counts.values())
    assert points[0] < both.point < points[1]
    assert (both.high or 0.0) - (both.low or 9.0) > min(row["high"] - row["low"] for row in counts.values())


def test_recipes_off_their_optimum_are_named():
    table = free_runs(3).assign(
        run=["a", "b", "c"], recipe_excess=[0.004, 0.006, 0.0], recipe_at_edge=[False, False, True]
    )
    found = recipe_warnings(table)
    assert len(found) == 2
    assert found[0].startswith("the recipe of b costs 0.60%")
    assert "c lies at its grid's edge" in found[1]
    forecast = forecast_final(free_runs().assign(recipe_excess=0.01), {"num_params": 1e10, "tokens": 2e11})
    assert any("swept optimum" in warning for warning in forecast.warnings)
    assert "recipe_excess" not in forecast.conditions


def test_conditions_nobody_states_are_listed():
    table = free_runs(4).assign(seq_len=4096, steps=100.0)
    conditions = compare_conditions(table, {"num_params": 1e10, "tokens": 2e11, "seq_len": 4096, "steps": 100.0})
    unstated = unstated_conditions(conditions)
    assert {"mixture", "epochs per source", "dropless evaluation"} <= set(unstated)
    assert not {"context", "steps", "horizon"} & set(unstated)
    assert ratio_spread(conditions) == pytest.approx(3.0)
