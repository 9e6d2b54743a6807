"""The hero's nowcast from what is on disk or in the store: beside the registered forecast, which nobody touches."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.registry import load_registered, register_successor
from rungwise.ladder.family import load_family
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder
from rungwise.ladder.nowcast import HeroNowcast, nowcast_hero, nowcast_record
from rungwise.ladder.predict import FamilyRuns, load_family_runs, register_forecast
from rungwise.ladder.recording.journal import append_event
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.watching.watch import follow_run, judge_loaded, judge_run, load_watched, replay_run
from rungwise.ladder.watching.watch_nowcast import LiveNowcast

HERO = load_family("tiny").hero_run
EVERY = HERO.steps // 20
"""Steps between the planted hero's evaluations."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf") / "home"


@pytest.fixture
def planted_home(shelf: Path, home: Path, request: pytest.FixtureRequest) -> Path:
    """`registered_home`, made once in this file and copied for each test: only the store must not be asked for it."""
    if shelf.exists():
        shutil.copytree(shelf, home, dirs_exist_ok=True)
    else:
        shutil.copytree(request.getfixturevalue("registered_home"), shelf)
    return home


@pytest.fixture
def train(planted_home: Path, write_hero: Callable[..., None]) -> Callable[..., None]:
    """The hero afresh; keywords as `write_hero`."""

    def afresh(**keywords: Any) -> None:
        shutil.rmtree(run_folder(planted_home, "tiny", "hero"), ignore_errors=True)
        write_hero(**keywords)

    return afresh


def load(home: Path) -> FamilyRuns:
    return load_family_runs("tiny", home=home)


def current(home: Path) -> HeroNowcast:
    return nowcast_hero(load(home))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("shift", "worse"), [(0.05, True), (-0.05, False)])
def test_nowcast_follows_the_hero_and_prices_the_change(planted_home, train, planted_loss, shift, worse):
    train(steps=20 * EVERY // 2, shift=shift)
    before = content(planted_home)
    record = nowcast_record(load(planted_home))
    assert content(planted_home) == before
    forecast = load(planted_home).registered
    assert forecast is not None
    assert record["registered"] == {"point": forecast.point, "low": forecast.low, "high": forecast.high}
    assert (record["forecast"], record["metric"], record["outcome"]) == (forecast.hash, "eval/loss", None)
    assert (record["step"], record["progress"]) == (10 * EVERY, pytest.approx(10 * EVERY / HERO.steps))
    truth, updated = planted_loss(load(planted_home).plan["hero"]["flops"]) + shift, record["updated"]
    assert updated["low"] < truth < updated["high"]
    assert abs(updated["point"] - truth) < 0.5 * abs(forecast.point - truth)
    assert record["change"] == pytest.approx(updated["point"] - forecast.point)
    law = forecast.laws[0]
    ratio = (forecast.point - law["floor"]) / (updated["point"] - law["floor"])
    assert record["compute_factor"] == pytest.approx(ratio ** (1 / law["exponent"]))
    assert (record["compute_factor"] < 1) is worse
    assert record["compute_factor_low"] < record["compute_factor_high"]
    assert (record["compute_factor_high"] < 1) is worse
    assert 0 < record["width_ratio"] < 1


def test_nowcast_history_knows_nothing_of_what_came_later(planted_home, train):
    train(steps=8 * EVERY)
    then = current(planted_home)
    train()
    record = nowcast_record(load(planted_home))
    assert [round(row["progress"], 1) for row in record["history"]] == [0.1, 0.2, 0.4, 0.6, 0.8]
    assert {key: record["history"][2][key] for key in ("point", "low", "high")} == then.updated
    assert record["outcome"]["held"]


def test_nowcast_holds_each_loss_against_its_own_curve(planted_home, train):
    train(steps=8 * EVERY)
    runs = load(planted_home)
    assert runs.hero is not None
    frame: pd.DataFrame = runs.hero.trajectory.frame
    evaluated, trained = nowcast_hero(runs), nowcast_hero(runs, metric="train/loss")
    assert trained.worth == {}
    assert trained.to_dict()["compute_factor"] is None
    frame["train/loss"] += 0.2
    assert nowcast_hero(runs).updated == evaluated.updated
    assert nowcast_hero(runs, metric="train/loss").updated["point"] > trained.updated["point"] + 0.1
    frame["train/loss"] -= 0.2
    frame["eval/loss"] += 0.2
    assert nowcast_hero(runs, metric="train/loss").updated == trained.updated
    assert nowcast_hero(runs).updated["point"] > evaluated.updated["point"] + 0.1


def test_nowcast_without_a_forecast_or_a_hero_says_what_is_missing(planted_home, train):
    with pytest.raises(ValueError, match="the hero of tiny has not begun"):
        current(planted_home)
    train(steps=EVERY - 1)
    with pytest.raises(ValueError, match="hero has logged no eval/loss yet: too short for a nowcast"):
        current(planted_home)
    for file in forecasts_folder(planted_home, "tiny").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"no forecast of tiny is registered, .*`ladder forecast tiny --register`"):
        current(planted_home)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"steps": 900}, "horizon is 900 steps, the registered forecast's 1,234, and no successor"),
     ({"optimizer": "adamw"}, "is for optimizer muon, the run has adamw"),
     ({"num_layers": 9}, "is for num_layers 3, the run has 9"),
     ({"transport": "dropless"}, None)],
)  # fmt: skip
def test_nowcast_of_another_run_than_was_forecast_is_refused(planted_home, train, change, said):
    train(steps=500, change=change)
    if said is None:
        assert current(planted_home).step == 8 * EVERY
    else:
        with pytest.raises(ValueError, match=f"{said}.*the registered curve no longer applies"):
            current(planted_home)


@pytest.mark.parametrize(
    ("kind", "words", "broken"),
    [("context", {}, True), ("context", {"planned": True}, False), ("schedule", {}, True), ("mixture", {}, False)],
)
def test_nowcast_ends_with_a_declared_change_that_breaks_the_comparison(
    planted_home, train, kind: str, words: dict[str, Any], broken: bool
):
    train(steps=500)
    append_event(run_folder(planted_home, "tiny", "hero"), kind, 300, **words)
    if broken:
        with pytest.raises(ValueError, match=f"no longer comparable after the declared {kind} change at step 300"):
            current(planted_home)
    else:
        assert current(planted_home).metric == "eval/loss"


def test_nowcast_of_a_replanned_hero_updates_the_successor(planted_home, train):
    old = load(planted_home).registered
    assert old is not None
    shorter = {"steps": 1000, "tokens": 1000 * HERO.tokens_per_step}
    method = {**(old.method or {}), "supersedes": {"hash": old.hash, "reason": "two weeks less"}}
    new = replace(old, target={**old.target, **shorter}, method=method)
    train(steps=500, change=shorter)
    folder = run_folder(planted_home, "tiny", "hero")
    append_event(folder, "schedule", 300, change={"steps": 1000}, forecast=new.hash)
    with pytest.raises(ValueError, match="no successor is registered"):
        current(planted_home)
    register_successor(new, forecasts_folder(planted_home, "tiny"))
    made = current(planted_home)
    assert (made.forecast, made.step, made.steps) == (new.hash, 500, 1000)
    append_event(folder, "context", 400)
    with pytest.raises(ValueError, match="context change at step 400"):
        current(planted_home)


def test_nowcast_out_of_the_store_is_the_one_of_the_journal(registered_home, write_hero, tmp_path):
    runs, store = load(registered_home), resolve_tracking(registered_home)
    assert runs.registered is not None
    register_forecast(runs.registered, runs, home=registered_home)
    write_hero(steps=8 * EVERY)
    mirror_folder(run_folder(registered_home, "tiny", "hero"), store)
    theirs = nowcast_record(load_family_runs("tiny", home=tmp_path / "empty", tracking=store))
    assert theirs == nowcast_record(load(registered_home))


def judge(home: Path) -> Any:
    return judge_run(load_watched("tiny", "hero", home=home), "hero", home=home)


def test_watch_says_the_nowcast_and_judges_as_without_it(planted_home, train, capsys):
    train(steps=500, shift=0.3)
    verdict, runs = judge(planted_home), load(planted_home)
    assert runs.registered is not None
    assert runs.registered.high is not None
    assert verdict.nowcast == current(planted_home).to_dict()
    assert judge_loaded(runs, "hero").nowcast == replay_run(runs, "hero", home=planted_home).nowcast
    assert verdict.to_dict()["nowcast"]["updated"]["point"] > runs.registered.high
    assert [alert.rule for alert in verdict.alerts] == ["forecast_miss"]
    assert "final eval/loss" not in capsys.readouterr().err
    followed = follow_run(load_watched("tiny", "hero", home=planted_home), "hero", home=planted_home, give_up=0.0)
    assert followed.nowcast == verdict.nowcast
    assert capsys.readouterr().err.count("hero at 40%: final eval/loss") == 1
    for file in forecasts_folder(planted_home, "tiny").iterdir():
        file.unlink()
    assert judge(planted_home).to_dict()["nowcast"] is None


def test_live_nowcast_is_made_at_most_every_percent_and_forgets_what_a_restart_took_back(planted_home, train):
    train(steps=500)
    runs = load(planted_home)
    assert runs.hero is not None
    live, often = LiveNowcast(runs), LiveNowcast(runs)
    steps, losses = zip(*_evaluations(runs), strict=True)
    for step in range(EVERY, 501):
        often.take(_evaluation(step, float(np.interp(step, steps, losses))))
        often.current()
        live.take({"kind": "metrics", "step": step, "values": {"train/loss": 2.0}})
        if step in steps:
            live.take(_evaluation(step, losses[steps.index(step)]))
        live.current()
    assert often.num_made <= 100 * (500 - EVERY) / HERO.steps + 1
    assert live.num_made == len(steps) - 1  # the first comes before its registered curve begins
    before = live.current()
    assert before is not None
    assert before.updated == nowcast_hero(runs).updated
    line = live.news()
    assert line is not None
    assert line.startswith("hero at 40%: final eval/loss ")
    assert live.news() is None
    live.take(_evaluation(520, 9.0))
    spoilt = live.current()
    live.take({"kind": "attempt", "step": 500})
    back = live.current()
    assert spoilt is not None
    assert back is not None
    assert spoilt.updated != back.updated == before.updated
    live.declare({"kind": "context", "step": 490})
    assert live.current() is None


def _evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "values": {"eval/loss": loss}}


def _evaluations(runs: FamilyRuns) -> list[tuple[int, float]]:
    assert runs.hero is not None
    series = runs.hero.trajectory.frame[["step", "eval/loss"]].dropna()
    return [(int(step), float(loss)) for step, loss in series.itertuples(index=False)]


def test_cli_nowcast_prints_both_forecasts_and_refuses_what_does_not_go_with_it(
    ladder: Callable[..., Any], planted_home, train
):
    train(steps=500)
    printed = ladder("forecast", "tiny", "--nowcast", "--json", "--home", planted_home)
    promised = "run metric forecast step steps progress level registered updated change compute_factor width_ratio"
    assert {*promised.split(), "surprise", "history", "outcome"} <= set(json.loads(printed.stdout))
    assert printed.stderr == ""
    refused = ladder("forecast", "tiny", "--nowcast", "--register", "--home", planted_home)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert load_registered(forecasts_folder(planted_home, "tiny")) is not None
