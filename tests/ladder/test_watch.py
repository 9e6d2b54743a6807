"""The watch around the detectors: what is written, once, and what a training loop must never suffer from it."""

import threading

from rungwise.analysis.source import load_run
from rungwise.ladder.family import load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.watch import (
    Verdict,
    follow_run,
    judge_loaded,
    judge_run,
    live_watch,
    load_watched,
    recorded_alerts,
)

HERO = load_family("tiny").hero_run


def judge(home, run="hero") -> Verdict:
    return judge_run(load_watched("tiny", run, home=home), run, home=home)


def follow(home, run="hero", **keywords) -> Verdict:
    tracking = keywords.get("tracking")
    return follow_run(load_watched("tiny", run, home=home, tracking=tracking), run, home=home, every=0.02, **keywords)


def test_watch_writes_each_state_of_an_alert_once(registered_home, write_hero):
    write_hero(shift=0.3)
    folder = run_folder(registered_home, "tiny", "hero")
    judge(registered_home)
    written = (folder / "alerts.jsonl").read_text()
    judge(registered_home)
    assert (folder / "alerts.jsonl").read_text() == written
    assert [alert["rule"] for alert in recorded_alerts(load_run(folder))] == ["forecast_miss"]


def test_watch_replay_writes_nothing(registered_home, write_hero):
    write_hero(shift=0.3)
    assert judge_loaded(load_watched("tiny", "hero", home=registered_home), "hero").state == "alert"
    assert not (run_folder(registered_home, "tiny", "hero") / "alerts.jsonl").exists()


def test_watch_followed_and_judged_afterwards_agree(registered_home, write_hero):
    verdicts = []
    follower = threading.Thread(target=lambda: verdicts.append(follow(registered_home)))
    follower.start()
    write_hero(shift=0.3)
    follower.join(timeout=60)
    later = judge(registered_home)
    assert [alert.rule for alert in verdicts[0].alerts] == [alert.rule for alert in later.alerts]
    assert (verdicts[0].state, verdicts[0].step) == (later.state, later.step) == ("alert", HERO.steps)


def test_watch_says_which_condition_no_longer_holds(registered_home, write_hero):
    write_hero(change={"optimizer": "adamw"})
    remarks = judge(registered_home).remarks
    assert remarks == ("condition broken: the forecast is for optimizer muon, the run has adamw",)


def test_watch_of_a_rung_needs_no_forecast(rungs_home):
    verdict = judge(rungs_home, "d80")
    assert verdict.state == "healthy"


def test_watch_lives_in_the_training_loop_of_the_hero_alone(registered_home):
    (rung, *_), hero = load_family("tiny").rung_runs, HERO
    assert live_watch(rung, home=registered_home) is None
    assert live_watch(hero, home=registered_home) is not None


def test_watch_that_fails_is_said_once_and_never_raises(registered_home, capsys):
    observe = live_watch(HERO, home=registered_home)
    assert observe is not None
    for step in (1, 2):
        observe(step, {"train/loss": float("nan")})  # an alert, and no folder of the run to write it to
    said = capsys.readouterr().err
    assert said.count("watch of hero ends at step 1") == 1
