"""Final losses by one rule; bad rows refused one by one (cases FIT-06, FIT-08)."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.points import EVAL_RULE, TRAIN_RULE, final_train_loss, ladder_points, usable_points

LAST_20 = [
    2.512, 2.497, 2.521, 2.488, 2.506, 2.499, 2.515, 2.484, 2.503, 2.495,
    2.509, 2.481, 2.5, 2.492, 2.511, 2.478, 2.498, 2.489, 2.494, 2.561,
]  # fmt: skip


def train_only(losses: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"step": np.arange(1, len(losses) + 1), "train/loss": losses})


def test_final_train_loss_is_the_median_of_the_last_ten():
    assert final_train_loss(train_only(LAST_20)) == pytest.approx(2.496)
    assert final_train_loss(train_only(LAST_20[:9])) is None


def test_ladder_points_take_the_evaluation_at_the_last_step(ladder):
    points = ladder_points(ladder())
    assert set(points["loss_rule"]) == {EVAL_RULE}
    assert list(points["run"]) == ["d32", "d64", "d96", "d128", "d32-seed1", "d32-seed2"]
    assert points.attrs["refused"] == []


def test_ladder_points_fall_back_for_all_runs_alike(ladder):
    runs = ladder()
    runs[1] = replace(runs[1], trajectory=runs[1].trajectory.drop(columns="eval/loss"))
    points = ladder_points(runs)
    assert set(points["loss_rule"]) == {TRAIN_RULE}
    assert set(points["metric"]) == {"train/loss"}


def test_ladder_points_refuse_with_a_reason_and_merge_copies(ladder):
    runs = ladder()
    runs[0] = replace(runs[0], state="killed")
    broken = runs[1].trajectory.copy()
    broken.loc[broken.index[-1], ["train/loss", "eval/loss"]] = [np.inf, np.inf]
    runs[1] = replace(runs[1], trajectory=broken)
    copy = replace(runs[2], run="d96-again")
    hero = replace(runs[3], run="hero", role="hero")
    points = ladder_points([*runs, copy, hero])
    assert list(points["run"]) == ["d96", "d128", "d32-seed1", "d32-seed2"]
    assert [item["run"] for item in points.attrs["refused"]] == ["d32", "d64"]
    assert "killed" in points.attrs["refused"][0]["reason"]
    assert points.attrs["merged"] == [{"run": "d96-again", "into": "d96"}]


def test_usable_points_refuse_each_bad_row_and_merge_copies():
    rows = [(1e18, 3.52), (1e19, 3.15), *[(1e20, 2.862)] * 4, (1e21, 2.596)]
    rows += [(1e21, "NaN"), (1e20, 0.0), (1e19, -0.12), (1e18, 1.7976931348623157e308), ("missing", 2.9)]
    used, refused, merged = usable_points([{"flops": flops, "loss": loss} for flops, loss in rows])
    assert (len(used), len(refused), len(merged)) == (4, 5, 3)
    assert all(item["reason"] for item in refused)


def test_usable_points_keep_equal_losses_of_different_seeds():
    rows = [{"flops": 1.0, "loss": 2.0, "seed": seed} for seed in (0, 1, 1)]
    used, _, merged = usable_points(rows)
    assert (len(used), len(merged)) == (2, 1)


def test_usable_points_derive_compute_from_parameters_and_tokens():
    used, _, _ = usable_points([{"num_params": 1e6, "tokens": 2e7, "loss": 3.0}])
    assert used["flops"].iloc[0] == 6 * 1e6 * 2e7
    with pytest.raises(ValueError, match="no 'flops'"):
        usable_points([{"loss": 3.0}])


def test_ladder_points_refuse_a_run_whose_counter_stopped_short(ladder):
    runs = ladder()
    short = runs[3].trajectory.copy()
    short["tokens"] *= 0.97
    runs[3] = replace(runs[3], trajectory=short)
    points = ladder_points(runs)
    assert "d128" not in set(points["run"])
    (refused,) = points.attrs["refused"]
    assert refused["run"] == "d128"
    assert "the horizon was not reached" in refused["reason"]
