"""Another horizon for a hero under way, on a planted ladder whose rungs have branches; what is refused at a start."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungwise.analysis.registry import load_registered
from rungwise.ladder.changing.branch import load_course, load_run_config
from rungwise.ladder.changing.cooldown import Cooldown
from rungwise.ladder.changing.course import course_of, load_events, plan_course
from rungwise.ladder.changing.course_table import replan_table, save_replan_figure
from rungwise.ladder.changing.declare import declare_change, declare_event
from rungwise.ladder.changing.replan import apply_replan, plan_replan
from rungwise.ladder.family import LadderConfig, family_text, load_family
from rungwise.ladder.home import forecasts_folder, make_folder, read_json, run_folder, write_json
from rungwise.ladder.launching.guard import check_forecast_plan, check_start, disk_bytes, plan_differences
from rungwise.ladder.launching.status import family_status
from rungwise.ladder.planning.plan import RunPlan, plan_ladder
from rungwise.ladder.predict import forecast_runs, load_family_runs
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.provenance import write_run_config

FAMILY: LadderConfig = load_family("tiny")
HERO = FAMILY.hero_run
SHORT = 740 * HERO.tokens_per_step


def _plant_branch(home: Path, plan: RunPlan, cooldown: Cooldown, loss: Callable[[float], float]) -> None:
    """A finished branch of a planted rung that ends on the planted law at its own compute."""
    start, end = (round(share * plan.steps) for share in cooldown)
    sizes = {name: getattr(plan, name) * end / plan.steps for name in ("flops", "flops_with_head")}
    tokens = {
        "tokens": end * plan.tokens_per_step,
        "tokens_per_active_param": plan.tokens_per_active_param * cooldown.end,
    }
    own = replace(plan, name=cooldown.name(plan.name), steps=end, **sizes, **tokens)
    folder = make_folder(run_folder(home, "tiny", own.name))
    document = {"family": "tiny", "run": own.name, "role": "branch", "rung": plan.rung, "seed": plan.seed}
    document |= {"config_hash": f"{own.name:0>64}", "corpus_hash": "c" * 64, "plan": asdict(own)}
    inherited = {"parent": plan.name, "step": start, "tokens": start * plan.tokens_per_step}
    write_json(folder / "config.json", {**document, "config": {"start": inherited}})
    final = loss(own.flops) * (1 + 0.002 * np.random.default_rng(plan.seed + plan.hidden_dim).standard_normal())
    with Journal(folder, family="tiny", run=own.name) as journal:
        journal.start_attempt(start)
        for step in range(start + 1, end + 1):
            now = final + 0.5 * ((step / end) ** -0.5 - 1.0)
            values = {"train/loss": now, "eval/loss": now, "progress/tokens": float(step * plan.tokens_per_step)}
            journal.write(step, values)
        journal.end(end, "finished")


def _start_hero(home: Path, step: int) -> Path:
    """The hero of `tiny` as a killed process leaves it: one checkpoint, a journal without an end."""
    folder = make_folder(run_folder(home, "tiny", "hero"))
    write_run_config(folder, HERO, corpus_hash="c" * 64)
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(0)
        for done in range(1, step + 3):
            values = {"train/loss": 3.0, "progress/tokens": float(done * HERO.tokens_per_step)}
            journal.write(done, {**values, "perf/tokens_per_second": 20_000.0})
    Checkpoints(folder / "checkpoints").save(step, {"x": np.zeros(3)}, meta={})
    return folder


def _content(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file() and path.stat().st_size}


@pytest.fixture
def planned_home(registered_home: Path, planted_loss: Callable[[float], float]) -> Path:
    """Rungs with branches from 20% to 60%, a registered forecast, and the hero at 20%."""
    for plan in plan_ladder(FAMILY).rungs:
        _plant_branch(registered_home, plan, Cooldown(0.2, 0.6), planted_loss)
    _start_hero(registered_home, 247)
    return registered_home


def test_a_replan_is_priced_by_branches_at_the_same_shares(planned_home: Path, planted_loss: Callable[[float], float]):
    plan = plan_replan("tiny", SHORT, home=planned_home)
    assert plan.forecast is not None
    assert (plan.forecast.method or {})["horizon"]["source"] == "branches"
    truth = planted_loss(plan_ladder(FAMILY).hero.flops * 740 / HERO.steps)
    assert plan.after.forecast == pytest.approx(truth, rel=0.01)
    assert plan.forecast.low is not None
    assert plan.forecast.high is not None
    assert plan.forecast.low < truth < plan.forecast.high
    assert plan.old_forecast is not None
    assert plan.price == pytest.approx(plan.forecast.point - plan.old_forecast.point)
    assert plan.forecast.point > plan.old_forecast.point
    assert plan.after.tokens_per_active_param == pytest.approx(6.0, rel=0.01)


def test_apply_declares_the_change_and_registers_a_successor(planned_home: Path, tmp_path: Path):
    folder = run_folder(planned_home, "tiny", "hero")
    old = load_registered(forecasts_folder(planned_home, "tiny"))
    before = _content(planned_home)
    plan = plan_replan("tiny", SHORT, home=planned_home, reason="two weeks less")
    assert _content(planned_home) == before
    save_replan_figure(plan, tmp_path / "replan.png")
    assert (tmp_path / "replan.png").stat().st_size > 10_000
    applied = apply_replan(plan, home=planned_home)
    replan_table(applied.to_dict())
    (event,) = load_events(folder)
    assert (event["kind"], event["step"], event["change"]) == ("schedule", 248, {"steps": 740})
    assert event["reason"] == "two weeks less"
    assert event["before"]["rate"] > event["after"]["rate"] > event["after"]["final"]
    new = load_registered(forecasts_folder(planned_home, "tiny"))
    assert new is not None
    assert old is not None
    assert new.target["steps"] == event["change"]["steps"], "so that the watch knows what the successor was made for"
    assert (new.method or {})["supersedes"] == {"hash": old.hash, "reason": "two weeks less"}
    assert event["forecast"] == new.hash != old.hash
    assert len(list(forecasts_folder(planned_home, "tiny").glob("*.json"))) == 2
    assert read_json(folder / "config.json")["plan"]["steps"] == 740
    assert vars(plan_course(load_course(folder)))["tokens"] == SHORT
    check_forecast_plan(HERO, home=planned_home)  # what is declared is what was forecast
    hero = next(run for run in family_status("tiny", home=planned_home)["runs"] if run["run"] == "hero")
    assert hero["steps"] == 740
    with pytest.raises(ValueError, match="are the horizon of hero already"):
        plan_replan("tiny", SHORT, home=planned_home)
    (folder / "events.jsonl").unlink()  # as a call that was killed between the two leaves it
    apply_replan(plan_replan("tiny", SHORT, home=planned_home, reason="two weeks less"), home=planned_home)
    assert len(list(forecasts_folder(planned_home, "tiny").glob("*.json"))) == 2
    assert [event["step"] for event in load_events(folder)] == [248]
    assert forecast_runs(load_family_runs("tiny", home=planned_home)).hash == old.hash  # branches are no rungs


def test_what_makes_no_sense_is_refused(planned_home: Path):
    with pytest.raises(ValueError, match="tokens 900000: 1011712 are trained on already, at step 247"):
        plan_replan("tiny", 900_000, home=planned_home)
    with pytest.raises(ValueError, match="run d31 has not started"):
        plan_replan("tiny", SHORT, home=planned_home, run="d31")
    (run_folder(planned_home, "tiny", "d32") / "config.json").unlink()
    write_run_config(run_folder(planned_home, "tiny", "d32"), FAMILY.rung_runs[0], corpus_hash="c" * 64)
    with pytest.raises(ValueError, match="run d32 has finished"):
        plan_replan("tiny", 100_000, home=planned_home, run="d32")
    with pytest.raises(ValueError, match="--apply needs --reason"):
        apply_replan(plan_replan("tiny", SHORT, home=planned_home), home=planned_home)


def test_past_the_first_quarter_it_takes_anyway_and_a_reason(registered_home: Path):
    _start_hero(registered_home, 400)
    (forecasts_folder(registered_home, "tiny")).rename(registered_home / "aside")
    with pytest.raises(ValueError, match=r"at 32% of its horizon, past the first 25%.*--anyway and --reason"):
        plan_replan("tiny", SHORT, home=registered_home, anyway=True)
    plan = plan_replan("tiny", SHORT, home=registered_home, anyway=True, reason="the money ran out")
    assert plan.after.steps == 740
    assert "not forecast" in plan.remarks[0]


def test_a_run_that_trains_takes_a_change_after_its_next_checkpoint(registered_home: Path):
    folder = _start_hero(registered_home, 123)
    assert declare_change(folder, "transport", {"transport.name": "ragged"}, reason="drops")["step"] == 124
    (folder / "events.jsonl").unlink()
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(123)
        journal.write(300, {"train/loss": 3.0})
        assert declare_change(folder, "transport", {"transport.name": "ragged"}, reason="drops")["step"] == 371
        with pytest.raises(ValueError, match="cannot change 'seed'"):
            declare_change(folder, "transport", {"seed": 3}, reason="luck")
        journal.write(1200, {"train/loss": 3.0})
        with pytest.raises(ValueError, match="comes to no checkpoint before its end"):
            declare_change(folder, "transport", {"transport.name": "ragged"}, reason="drops")


def test_new_values_from_the_command_line_are_read_checked_and_written(registered_home: Path):
    folder = _start_hero(registered_home, 123)

    def declared(*change: str, **given: Any) -> dict[str, Any]:
        words: dict[str, Any] = {"kind": "transport", "note": "drops"} | given
        return declare_event("tiny", "hero", words.pop("kind"), home=registered_home, change=change, **words)

    for change, words, said in (
        (("transport.name",), {}, "names no value; write field=value"),
        (("transport.name=raged",), {}, "did you mean 'ragged'"),
        (("transport.num_ranks=8",), {}, "cannot change 'transport.num_ranks'"),
        (("transport.name=ragged",), {"note": ""}, "needs a reason"),
        (("transport.name=ragged",), {"step": 123}, "give one from 124"),
        (("transport.name=ragged",), {"step": 1235}, "outside the run"),
        (("transport.name=ragged",), {"kind": "note"}, "it may change nothing"),
    ):
        with pytest.raises(ValueError, match=said):
            declared(*change, **words)
    assert not (folder / "events.jsonl").exists()
    event = declared("transport.name=ragged", "transport.receiver_capacity_factor=2", expect=["moe/drop_fraction down"])
    assert event["step"] == 124
    (written,) = load_events(folder)
    assert written["change"] == {"transport.name": "ragged", "transport.receiver_capacity_factor": 2}
    assert (written["reason"], written["expected"]) == ("drops", {"moe/drop_fraction": "down"})
    course = course_of(load_run_config(folder), load_events(folder))
    assert [segment.config.transport.name for segment in course] == ["pooled_wave", "ragged"]


def test_a_hero_of_another_plan_than_the_forecasts_is_refused_with_the_fields(registered_home: Path, tmp_path: Path):
    check_start([HERO], home=registered_home)
    path = tmp_path / "other.toml"
    path.write_text(family_text("tiny").replace("tokens_per_active_param = 10", "tokens_per_active_param = 12"))
    other = load_family(str(path)).hero_run
    with pytest.raises(ValueError, match=r"registered for another plan: .*steps 1234 there, 1480 here.*--anyway"):
        check_start([other], home=registered_home)
    check_start([other], home=registered_home, anyway=True)
    check_start([other], home=registered_home)  # consent stands in its events
    (event,) = load_events(run_folder(registered_home, "tiny", "hero"))
    assert event["kind"] == "note"
    assert "steps 1234 there" in event["reason"]
    assert plan_differences({"steps": 3, "name": "x"}, {"steps": 3, "more": 1}) == {}


def test_disk_is_counted_before_the_start(home: Path):
    folder = run_folder(home, "tiny", "hero")
    needed = disk_bytes(HERO, folder)
    plan = plan_ladder(FAMILY).hero
    assert needed == 3 * 3 * 4 * plan.num_params + 20_000 * HERO.steps
    huge = HERO.replace(checkpoint={"every_fraction": 0.1, "keep": 10**9})
    with pytest.raises(ValueError, match=r"of disk and .* are free at"):
        check_start([huge], home=home)


def test_time_to_finish_is_estimated_from_measured_speed(registered_home: Path, capsys: pytest.CaptureFixture[str]):
    check_start([HERO], home=registered_home, price_per_hour=36.0)
    said = capsys.readouterr().err
    assert "from the FLOPs per second of d80" in said
    _start_hero(registered_home, 247)
    check_start([HERO], home=registered_home, price_per_hour=36.0)
    left = (HERO.tokens - 249 * HERO.tokens_per_step) / 20_000
    assert (
        f"{left / 100:.2f} at the hourly price given at 20.0 k tokens/s (measured on hero)" in capsys.readouterr().err
    )
