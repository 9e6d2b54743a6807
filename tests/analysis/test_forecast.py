"""The forecast record: values, refusals, conditions, and a hash that survives the disk."""

import json

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.forecast import Forecast, backtest_final, forecast_final
from rungwise.analysis.points import ladder_points
from rungwise.analysis.vocabulary import dump_json, load_json

FLOPS = [1e18, 1e19, 1e20, 1e21]
OWN_LADDER = [3.52, 3.15, 2.852, 2.596]
DESIGN_KEYS = {
    *("metric", "target", "point", "low", "high", "level", "laws", "status", "degrees_of_freedom", "used", "refused"),
    *("extrapolation_ratio", "conditions", "floor_profile", "curve", "hash"),
}


def own_points(top: float = 2.596) -> pd.DataFrame:
    return pd.DataFrame({"run": list("abcd"), "flops": FLOPS, "loss": [*OWN_LADDER[:3], top]})


def test_forecast_with_a_pinned_floor_gives_the_t_interval():
    forecast = forecast_final(own_points(), {"flops": 1e23}, floor=1.6, floor_reason="Paloma macro")
    interval = (forecast.low, forecast.point, forecast.high)
    assert interval == pytest.approx((2.226002, 2.246585, 2.267845), abs=2e-6)
    assert (forecast.degrees_of_freedom, forecast.floor, forecast.floor_reason) == (2, 1.6, "Paloma macro")
    assert forecast.extrapolation_ratio == pytest.approx(100.0)


@pytest.mark.parametrize(("final", "hero"), [(2.496, 2.247851), (2.561, 2.30326), (2.478, 2.232695)])
def test_forecast_moves_with_the_final_loss_rule(final: float, hero: float):
    moved = own_points(2.596 + final - 2.4945)
    assert forecast_final(moved, {"flops": 1e23}, floor=1.6).point == pytest.approx(hero, abs=2e-6)


def test_forecast_uses_four_of_twelve_bad_rows():
    rows = [(1e18, 3.52), (1e19, 3.15), *[(1e20, 2.862)] * 4, (1e21, 2.596), (1e21, "NaN"), (1e20, 0.0)]
    forecast = forecast_final([{"flops": c, "loss": loss} for c, loss in rows], {"flops": 1e23}, floor=1.6)
    assert forecast.point == pytest.approx(2.249679, abs=2e-6)
    assert (len(forecast.used), len(forecast.refused), len(forecast.merged)) == (4, 2, 3)


def test_forecast_states_what_a_free_floor_leaves_open():
    forecast = forecast_final(own_points(), {"flops": 1e23})
    assert forecast.degrees_of_freedom == 1
    assert "do not identify the floor" in forecast.status
    assert forecast.floor_range is not None
    np.testing.assert_allclose(
        [forecast.floor_range[key] for key in ("floor_low", "floor_high", "point_low", "point_high")],
        [1.2546, 1.4814, 2.200808, 2.229055],
        atol=2e-3,
    )
    assert sum(row["weight"] for row in forecast.floor_profile) == pytest.approx(1.0)
    assert forecast.laws[0]["value"] == forecast.point
    assert {law["role"] for law in forecast.laws} == {"forecast", "best_fit", "control"}


def test_forecast_of_the_planted_ladder_holds_the_hero(ladder, hero):
    forecast = forecast_final(ladder_points(ladder(3)), hero(3).plan)
    outcome = hero(3).trajectory["eval/loss"].iloc[-1]
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low < outcome < forecast.high
    assert 0 < (forecast.noise or 0) < 0.01
    assert forecast.degrees_of_freedom == 3
    widths = forecast.half_width
    assert all(value is not None and value > 0 for value in widths.values())
    assert widths["compute_factor"] > 1.0  # type: ignore[operator]


def test_forecast_conditions_flag_what_is_outside_the_rungs(ladder, hero):
    forecast = forecast_final(ladder_points(ladder()), {**hero().plan, "seq_len": 512})
    assert forecast.conditions["seq_len"] == {"rungs": [256.0, 256.0], "hero": 512.0, "outside": True}
    assert not forecast.conditions["tokens_per_active_param"]["outside"]
    assert forecast.conditions["steps"]["outside"]
    assert any("seq_len" in warning for warning in forecast.warnings)


def test_forecast_conditions_are_settings_not_sizes_costs_or_names():
    names = "seq_len tokens_per_step tokens_per_rank num_ranks sender_capacity_factor receiver_capacity_factor"
    settings = {"optimizer": "muon", "transport": "pooled_wave", **dict.fromkeys(names.split(), 2.0)}
    names = "seed hidden_dim num_params data_replicas flops_with_head flops_causal flops_causal_with_head"
    ours = {"name": "d32", "rung": "d32", "role": "rung", **dict.fromkeys(names.split(), 2.0)}
    forecast = forecast_final(own_points().assign(**settings, **ours), {**settings, **ours, "flops": 1e23})
    assert set(forecast.conditions) == set(settings)
    assert not any(condition["outside"] for condition in forecast.conditions.values())


def test_forecast_refuses_another_ratio_of_tokens_to_parameters(ladder, hero):
    plan = {**hero().plan, "tokens": 2 * hero().plan["tokens"]}
    with pytest.raises(ValueError, match="tokens per active parameter"):
        forecast_final(ladder_points(ladder()), plan)


def test_forecast_refuses_a_target_inside_the_ladder():
    with pytest.raises(ValueError, match="inside the ladder"):
        forecast_final(own_points(), {"flops": 1e21})


def test_forecast_below_three_rungs_carries_the_estimate():
    with pytest.raises(UnfitForecast, match="2 usable rungs") as caught:
        forecast_final(own_points().iloc[:2], {"flops": 1e20})
    assert caught.value.estimate == pytest.approx(3.15**2 / 3.52)
    with pytest.raises(UnfitForecast) as caught:
        forecast_final(own_points().iloc[:0], {"flops": 1e20})
    assert caught.value.estimate is None


def test_forecast_of_three_rungs_has_a_point_and_no_interval():
    forecast = forecast_final(own_points().iloc[:3], {"flops": 1e22})
    assert (forecast.low, forecast.high, forecast.degrees_of_freedom) == (None, None, 0)
    assert "no degree of freedom" in forecast.status
    assert forecast_final(own_points().iloc[:3], {"flops": 1e22}, floor=1.6).low is not None


def test_forecast_record_round_trips_with_its_hash(ladder, hero):
    forecast = forecast_final(ladder_points(ladder()), hero().plan)
    record = load_json(dump_json(forecast.to_dict()))
    again = Forecast.from_dict(record)
    assert again == forecast
    assert again.hash == forecast.hash == record["hash"]
    assert record.keys() >= DESIGN_KEYS
    json.dumps(record, allow_nan=False)


def test_forecast_record_of_another_shape_is_refused():
    record = forecast_final(own_points(), {"flops": 1e23}).to_dict()
    with pytest.raises(ValueError, match="schema"):
        Forecast.from_dict({**record, "schema": 99})
    with pytest.raises(ValueError, match="extra"):
        Forecast.from_dict({**record, "extra": 1})


def test_backtest_holds_out_the_upper_rungs(ladder):
    (row,) = backtest_final(ladder_points(ladder()))
    assert row["rung"] == "d128"
    assert row["inside"]
    assert abs(row["error"]) < 0.1
