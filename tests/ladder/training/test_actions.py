"""What a trainer does by itself when a step goes wrong."""

import math
from pathlib import Path

import numpy as np
import pytest

from rungwise.analysis.reading.records import read_records
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.training.actions import ActionsConfig, SkipLimits, write_skipped
from rungwise.ladder.training.preemption import StopRun
from rungwise.ladder.watching.watch import live_watch

SKIPPING = ActionsConfig(skip_nonfinite=True, skip_deviations=6.0, skip_window=64)


def _series(count: int) -> list[dict[str, float]]:
    noise = np.random.default_rng(0).standard_normal((count, 2))
    return [{"train/loss": 2.0 + 0.01 * loss, "train/grad_norm": 0.5 + 0.02 * norm} for loss, norm in noise]


def _limits(rows: list[dict[str, float]], config: ActionsConfig = SKIPPING) -> SkipLimits:
    limits = SkipLimits(config)
    for row in rows:
        limits.add(row)
    return limits


def test_limits_are_mean_plus_deviations_of_the_last_window():
    rows = _series(200)
    losses, norms = (np.array([row[name] for row in rows[-64:]]) for name in ("train/loss", "train/grad_norm"))
    expected = (losses.mean() + 6 * losses.std(), norms.mean() + 6 * norms.std())
    assert _limits(rows).now == pytest.approx(expected, rel=1e-12)


def test_limits_wait_for_enough_steps():
    assert _limits(_series(31)).now == (math.inf, math.inf)
    assert max(_limits(_series(32)).now) < math.inf


def test_a_step_that_was_left_out_moves_no_limit():
    rows, limits = _series(100), _limits(_series(100))
    limits.add({"train/loss": 50.0, "train/grad_norm": 90.0, "train/skipped": 1.0})
    limits.add({"train/loss": math.nan, "train/grad_norm": 1.0})
    assert limits.now == _limits(rows).now
    limits.add({"train/loss": 50.0, "train/grad_norm": 90.0})
    assert limits.now[0] > _limits(rows).now[0]


def test_limits_of_a_resumed_run_are_those_of_one_that_never_stopped(tmp_path: Path):
    rows = _series(120)
    rows[50] |= {"train/loss": 90.0, "train/skipped": 1.0}
    with Journal(tmp_path, family="tiny", run="d32") as journal:
        journal.start_attempt(0)
        for step, row in enumerate(_series(110), 1):  # a first attempt that died past the checkpoint of step 100
            journal.write(step, row | {"train/loss": row["train/loss"] + 7.0 * (step > 100)})
        journal.start_attempt(0)
        for step, row in enumerate(rows, 1):
            journal.write(step, row)
    recalled = SkipLimits(SKIPPING)
    recalled.recall(tmp_path, 100)
    assert recalled.now == _limits(rows[:100]).now


def test_only_nonfinite_steps_are_left_out_where_no_deviations_are_given():
    assert _limits(_series(100), ActionsConfig(skip_nonfinite=True)).now == (math.inf, math.inf)


def test_deviations_without_finiteness_are_refused():
    with pytest.raises(ValueError, match=r"actions\.skip_nonfinite"):
        ActionsConfig(skip_deviations=6.0)


def test_an_update_left_out_is_noted_with_the_identity_of_its_batch(tmp_path: Path):
    values = {"train/loss": 9.25, "train/grad_norm": 40.0, "train/skipped": 1.0}
    write_skipped(tmp_path, 7, values, windows=np.array([1280, 256]))
    (event,) = (record for record in read_records(tmp_path / "events.jsonl").records if record["kind"] == "note")
    assert (event["step"], event["skipped"], event["windows"]) == (7, [9.25, 40.0], [1280, 256])


@pytest.mark.parametrize("stops", [True, False])
def test_watch_stops_a_diverging_hero_where_the_family_asks_for_it(registered_home: Path, stops: bool):
    hero: RunConfig = load_family("tiny").hero_run.replace(actions={"stop_on_divergence": stops})
    folder = run_folder(registered_home, "tiny", "hero")
    folder.mkdir(parents=True)
    observe = live_watch(hero, home=registered_home)
    assert observe is not None
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(0)
        for step in range(1, 30):
            values = {"train/loss": 5.6 - step / 100, "progress/tokens": 4096.0 * step}
            journal.write(step, values)
            observe(step, values)
        journal.write(30, {"train/loss": math.nan})
        if not stops:
            observe(30, {"train/loss": math.nan})
            return
        with pytest.raises(StopRun, match="nonfinite since step 30"):
            observe(30, {"train/loss": math.nan})
