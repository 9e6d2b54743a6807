"""A plain table of runs: units, unfinished runs, odd ones, and files."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.laws import PowerLaw
from rungwise.analysis.forecast import forecast_final
from rungwise.analysis.rows import load_points, odd_runs, usable_points

LAW = PowerLaw(1.6, 95.25, 0.09412)
FLOPS = np.geomspace(1e18, 1e21, 7)


def ladder(seed: int = 0) -> pd.DataFrame:
    noise = 0.001 * np.random.default_rng(seed).standard_normal(FLOPS.size)
    return pd.DataFrame(
        {"run": [f"r{i}" for i in range(FLOPS.size)], "flops": FLOPS, "loss": LAW.value(FLOPS) * np.exp(noise)}
    )


def test_unfinished_runs_are_refused_each_with_its_reason():
    table = ladder().assign(
        state=["finished", "killed", *["finished"] * 5],
        progress=[1.0, 1.0, 0.8, *[1.0] * 4],
        decay_complete=[True, True, True, False, *[True] * 3],
    )
    used, refused, _ = usable_points(table)
    assert list(used["run"]) == ["r0", "r4", "r5", "r6"]
    assert [item["reason"].split(",")[0] for item in refused[:1]] == ["run is killed"]
    assert "80% of the horizon" in refused[1]["reason"]
    assert "decay was not completed" in refused[2]["reason"]


def test_unfinished_run_with_a_stated_correction_is_used_and_widens_the_interval():
    table = ladder()
    stopped = table.assign(progress=[*[1.0] * 6, 0.8], loss_correction=[np.nan] * 6 + [-0.066], loss_error=0.0)
    stopped.loc[6, "loss"] += 0.066
    exact = forecast_final(stopped, {"flops": 1e23})
    assert exact.point == pytest.approx(forecast_final(table, {"flops": 1e23}).point)
    stopped.loc[6, "loss_error"] = 0.02
    doubtful = forecast_final(stopped, {"flops": 1e23})
    assert doubtful.high is not None
    assert exact.high is not None
    assert doubtful.high - doubtful.point > 1.2 * (exact.high - exact.point)
    assert doubtful.used[-1]["loss_error"] == 0.02


def test_tokens_that_look_like_steps_stop_the_analysis():
    rows = [{"num_params": 1e8, "tokens": 4000, "loss": 3.1}, {"num_params": 2e8, "tokens": 8000, "loss": 2.9}]
    with pytest.raises(ValueError, match="are its tokens steps"):
        usable_points(rows)
    with pytest.raises(ValueError, match="a unit is wrong"):
        usable_points([{"flops": 1e18, "num_params": 1e2, "tokens": 2e3, "loss": 3.1}])


def test_tokens_beyond_what_the_steps_hold_are_refused():
    rows = [
        {"run": "a", "num_params": 1e6, "tokens": 2.62144e8, "steps": 2000, "tokens_per_step": 131072, "loss": 3.0},
        {"run": "b", "num_params": 1e6, "tokens": 2000 * 524288, "steps": 2000, "tokens_per_step": 131072, "loss": 3.0},
    ]
    used, refused, _ = usable_points(rows)
    assert list(used["run"]) == ["a"]
    assert "trainer's counter" in refused[0]["reason"]


def test_empty_or_constant_sizes_stop_the_analysis():
    with pytest.raises(ValueError, match="column num_params of the points is empty"):
        usable_points(ladder().assign(num_params=np.nan))
    with pytest.raises(ValueError, match="one column is a default"):
        usable_points(ladder().assign(num_params=1e9, tokens=2e10))


def test_odd_runs_are_named_one_by_one_and_left_out():
    table = ladder()
    table.loc[2, "loss"] *= 1.06
    table.loc[4, "loss"] = 11.76
    found = odd_runs(table)
    assert [item["run"] for item in found] == ["r4", "r2"]
    assert odd_runs(table.drop(index=[0, 6])) == []  # five runs: any of them may be the odd one
    assert all("off the law" in item["reason"] for item in found)
    forecast = forecast_final(table, {"flops": 1e23})
    assert "r4" in {item["run"] for item in forecast.refused}
    assert "r4" not in {row["run"] for row in forecast.used}


@pytest.mark.parametrize("seed", range(4))
def test_healthy_ladders_have_no_odd_runs(seed: int):
    assert odd_runs(ladder(seed)) == []


def test_load_points_reads_files_and_refuses_others(tmp_path: Path):
    table = ladder()
    table.to_csv(tmp_path / "runs.csv", index=False)
    table.to_parquet(tmp_path / "runs.parquet")
    table.to_json(tmp_path / "runs.jsonl", orient="records", lines=True)
    for name in ("runs.csv", "runs.parquet", "runs.jsonl"):
        pd.testing.assert_frame_equal(load_points(tmp_path / name), table, check_exact=False)
    (tmp_path / "empty.csv").write_text("run,loss\n")
    for name, message in {"none.csv": "is no file", "runs.xlsx": "ends in", "empty.csv": "0 rows"}.items():
        if name == "runs.xlsx":
            (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match=message):
            load_points(tmp_path / name)
    assert load_points(table) is table


def test_file_to_figure_in_four_lines(tmp_path: Path):
    from rungwise.analysis.drawing.figures import ladder_fit_figure

    ladder().to_csv(tmp_path / "runs.csv", index=False)
    points = load_points(tmp_path / "runs.csv")
    forecast = forecast_final(points, {"flops": 1e23})
    ladder_fit_figure(forecast).savefig(tmp_path / "forecast.png")
    assert (tmp_path / "forecast.png").stat().st_size > 10_000
