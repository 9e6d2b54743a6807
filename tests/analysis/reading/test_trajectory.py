import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.analysis.reading.trajectory import Points, Trajectory, build_trajectory


def trajectory(records, restored) -> Trajectory:
    """From (attempt, step, values) in the order written; record i is written at second i."""
    columns: dict[str, tuple[list, list]] = {}
    for position, (_, _, values) in enumerate(records):
        for name, value in values.items():
            rows, numbers = columns.setdefault(name, ([], []))
            rows.append(position)
            numbers.append(value)
    arrays = {name: (np.array(rows), np.array(numbers, dtype=float)) for name, (rows, numbers) in columns.items()}
    attempt = np.array([record[0] for record in records], dtype=np.int64)
    step = np.array([record[1] for record in records], dtype=np.int64)
    return build_trajectory(Points(attempt, step, np.arange(len(records), dtype=float), arrays), restored=restored)


def loss(attempt: int, steps, offset: float = 0.0):
    return [(attempt, step, {"train/loss": 3 - 0.01 * step + offset}) for step in steps]


FIRST, SECOND = loss(1, range(16)), loss(2, range(10, 20), 0.002)
STRAYS = [(2, 100_000, {"train/loss": 9.0}), (2, 100_000, {"eval/loss": 9.0})]


def test_trajectory_of_a_resumed_run_is_the_later_attempts():
    naive = [record[2]["train/loss"] for record in FIRST + SECOND]
    assert (len(naive), np.mean(naive)) == (26, pytest.approx(2.898846, abs=1e-6))
    built = trajectory(FIRST + SECOND, {1: 0, 2: 10})
    series = built.series("train/loss")
    assert len(series) == 20
    assert (series[9], series[12], series[19]) == pytest.approx((2.91, 2.882, 2.812))
    assert series.mean() == pytest.approx(2.906)
    assert list(built.frame["attempt"]) == [1] * 10 + [2] * 10
    older = built.superseded
    assert list(zip(older["attempt"], older["step"], strict=True)) == [(1, step) for step in range(10, 16)]
    assert older["value"].to_list() == pytest.approx([3 - 0.01 * step for step in range(10, 16)])


@pytest.mark.parametrize("stray", STRAYS)
def test_trajectory_goes_on_after_a_stray_high_step(stray):
    def upto(step: int) -> Trajectory:
        written = [*SECOND[:3], stray, *SECOND[3:]]
        return trajectory(FIRST + written[: 4 + step - 12], {1: 0, 2: 10})

    assert upto(13).latest("train/loss") == pytest.approx(2.872)
    assert upto(19).series("train/loss").mean() == pytest.approx(2.906)
    assert len(upto(19).series("train/loss")) == 20


def test_trajectory_stray_step_is_kept_apart_with_its_value():
    built = trajectory(FIRST + SECOND[:3] + STRAYS[:1] + SECOND[3:], {1: 0, 2: 10})
    assert 100_000 not in built.frame["step"].to_list()
    older = built.superseded
    assert older.loc[older["step"] == 100_000, "value"].tolist() == [9.0]


def test_trajectory_latest_follows_the_live_attempt_not_the_highest_step():
    built = trajectory(FIRST + SECOND[:4], {1: 0, 2: 10})
    assert built.latest("train/loss") == pytest.approx(2.872)
    assert built.frame["step"].to_list() == list(range(14))


def test_trajectory_tells_a_logged_nan_from_a_missing_value():
    built = trajectory([(1, 1, {"train/loss": math.nan}), (1, 2, {"train/grad_norm": 1.0})], {1: 0})
    assert built.frame["train/loss"].isna().tolist() == [True, True]
    assert built.logged("train/loss").tolist() == [True, False]
    assert built.logged("never").tolist() == [False, False]
    assert math.isnan(built.latest("train/loss") or 0)
    assert built.latest("never") is None
    assert len(built.series("never")) == 0


def test_trajectory_merges_records_of_one_step():
    records = [(1, 5, {"train/loss": 2.0, "progress/tokens": 640.0}), (1, 5, {"eval/loss": 2.1})]
    row = trajectory(records, {1: 0}).frame.iloc[0]
    assert (row["step"], row["tokens"], row["time"], row["train/loss"], row["eval/loss"]) == (
        5,
        640,
        1.0,
        2.0,
        2.1,
    )


def test_trajectory_of_nothing_is_empty():
    built = trajectory([], {})
    assert list(built.frame.columns) == ["step", "tokens", "time", "attempt"]
    assert (len(built.frame), len(built.superseded), built.metrics) == (0, 0, ())


def reference(records, restored) -> dict[tuple[int, str], float]:
    """The rules of `build_trajectory`, one value at a time."""
    found: dict[tuple[int, str], float] = {}
    for position, (attempt, step, values) in enumerate(records):
        if any(later > attempt and step > at for later, at in restored.items()):
            continue
        for name, value in values.items():
            afterwards = [s for a, s, v in records[position + 1 :] if a == attempt and name in v]
            if not afterwards or step <= max(afterwards):
                found[step, name] = value
    return found


values = st.dictionaries(st.sampled_from(["train/loss", "eval/loss"]), st.floats(), min_size=1)
attempts = st.lists(
    st.tuples(st.integers(0, 8), st.lists(st.tuples(st.integers(0, 12), values), max_size=10)), max_size=4
)


@settings(max_examples=200)
@given(attempts)
def test_trajectory_equals_the_slow_reference(runs):
    restored = {number: at for number, (at, _) in enumerate(runs, start=1)}
    records = [(number, step, kept) for number, (_, steps) in enumerate(runs, start=1) for step, kept in steps]
    built = trajectory(records, restored)
    fast = {(step, name): value for name in built.metrics for step, value in built.series(name).items()}
    pd.testing.assert_series_equal(
        pd.Series(fast, dtype=float).sort_index(),
        pd.Series(reference(records, restored), dtype=float).sort_index(),
    )
    assert len(fast) + len(built.superseded) == sum(len(kept) for _, _, kept in records)
