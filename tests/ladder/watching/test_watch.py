"""The watch around the detectors: what is written, once, and what a training loop must never suffer from it."""

import threading
import time

from rungwise.analysis.source import load_run
from rungwise.ladder.family import load_family
from rungwise.ladder.home import resolve_tracking, run_folder
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.watching.alert_file import recorded_alerts
from rungwise.ladder.watching.watch import (
    Verdict,
    follow_run,
    judge_loaded,
    judge_run,
    live_watch,
    load_watched,
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
    assert [entry["state"] for entry in load_run(folder).alerts if entry["kind"] == "verdict"] == ["alert"]
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


def test_watch_gives_up_a_hero_that_was_killed_and_says_where_it_stopped(registered_home, write_hero, capsys):
    write_hero(steps=100)
    verdict = follow(registered_home, give_up=0.1)
    assert (verdict.state, verdict.step) == ("cannot_judge", 100)
    assert "hero stopped at step 100, unfinished (silent for" in verdict.remarks[-1]
    assert capsys.readouterr().err.count("hero stopped at step 100") == 1


def test_watch_gives_up_a_failed_hero_and_keeps_its_open_alert(registered_home, write_hero):
    write_hero(steps=HERO.steps - 1, shift=0.3)
    folder = run_folder(registered_home, "tiny", "hero")
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(HERO.steps - 1)
        journal.end(HERO.steps - 1, "failed", "RuntimeError: no memory")
    verdict = follow(registered_home, give_up=0.0)
    assert verdict.state == "alert"
    assert "unfinished (RuntimeError: no memory)" in verdict.remarks[-1]


def test_watch_goes_on_with_a_hero_that_resumes(registered_home, write_hero, capsys):
    write_hero(steps=100)
    verdicts: list[Verdict] = []
    follower = threading.Thread(target=lambda: verdicts.append(follow(registered_home)), daemon=True)
    follower.start()
    while not (run_folder(registered_home, "tiny", "hero") / "alerts.jsonl").exists():
        time.sleep(0.01)  # until the follower has seen the hundred steps, and that nobody writes more
    write_hero()
    follower.join(timeout=60)
    assert (verdicts[0].state, verdicts[0].step) == ("healthy", HERO.steps)
    assert capsys.readouterr().err.count("hero stopped at step 100") == 1


def test_watch_gives_up_a_store_that_is_gone(registered_home, write_hero, tmp_path):
    write_hero(steps=100)
    uri = resolve_tracking(registered_home)
    mirror_folder(run_folder(registered_home, "tiny", "hero"), uri)
    runs = load_watched("tiny", "hero", home=tmp_path / "empty", tracking=uri)
    (registered_home / "mlflow.db").unlink()
    verdict = follow_run(runs, "hero", home=tmp_path / "empty", tracking=uri, give_up=0.0)
    assert verdict.state == "cannot_judge"
    assert "no such database" in verdict.remarks[-1]


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


def test_watch_of_a_resumed_hero_repeats_no_verdict(registered_home, write_hero):
    write_hero(steps=100)
    folder = run_folder(registered_home, "tiny", "hero")
    for loss in (1.0, float("nan"), 1.0):
        observe = live_watch(HERO, home=registered_home)
        assert observe is not None
        observe(101, {"train/loss": loss})
    verdicts = [entry["state"] for entry in load_run(folder).alerts if entry["kind"] == "verdict"]
    assert verdicts == ["healthy", "alert", "healthy"]
