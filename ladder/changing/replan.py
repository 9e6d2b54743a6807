"""Another token horizon for a run under way: schedule, phases, marks, FLOPs and forecast together, or nothing.

The change is one event of kind `schedule`, written before it acts; `course.py` derives the rest from it. A run that is
not training takes it where it left off; one that trains, after the next checkpoint it comes to. Imports no jax.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.forecast import Forecast
from rungwise.analysis.reading.store import public_address
from rungwise.analysis.registry import load_registered, register_successor
from rungwise.ladder.changing.branch import load_run_config
from rungwise.ladder.changing.cooldown import Cooldown
from rungwise.ladder.changing.course import (
    Course,
    course_of,
    learning_rate_at,
    load_events,
    marks_of,
    plan_course,
)
from rungwise.ladder.changing.declare import acts_after, declaring
from rungwise.ladder.changing.horizon import forecast_horizon
from rungwise.ladder.console import log, one_line
from rungwise.ladder.home import CONFIG_FILE, forecasts_folder, read_json, resolve_tracking, run_folder
from rungwise.ladder.predict import FamilyRuns, load_family_runs
from rungwise.ladder.recording.journal import append_event
from rungwise.ladder.recording.provenance import write_run_config
from rungwise.ladder.recording.tracking import mirror_forecast

EARLY: Final = 0.25
"""Share of a run up to which another horizon is allowed without further ado. Source: the reference run's own rule for
delays, marin-community/marin #8435."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run under one horizon."""

    steps: int
    tokens: int
    flops: float
    flops_with_head: float
    tokens_per_active_param: float
    rate: float
    """Learning rate of the next step."""
    final_rate: float
    phases: tuple[str, ...]
    """What begins when, after the steps done."""
    evaluations: int
    """Still to come."""
    checkpoints: int
    forecast: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Replan:
    """A run before and after another horizon, and what has to be written for it."""

    family: str
    run: str
    done: int
    """Optimizer steps done under the old horizon."""
    progress: float
    running: bool
    before: Side
    after: Side
    course: Course
    old_course: Course
    forecast: Forecast | None
    old_forecast: Forecast | None
    reason: str
    remarks: tuple[str, ...]
    applied: bool = False

    @property
    def price(self) -> float | None:
        """What the change costs in forecast loss, nats."""
        if self.after.forecast is None or self.before.forecast is None:
            return None
        return self.after.forecast - self.before.forecast

    @property
    def event(self) -> dict[str, Any]:
        """What `events.jsonl` gets."""
        before, after = self.before, self.after
        return {
            "change": {"steps": after.steps},
            "before": {"steps": before.steps, "tokens": before.tokens, "rate": before.rate},
            "after": {"steps": after.steps, "tokens": after.tokens, "rate": after.rate, "final": after.final_rate},
            "forecast": None if self.forecast is None else self.forecast.hash,
            "reason": self.reason,
        }

    def to_dict(self) -> dict[str, Any]:
        """The object `ladder replan --json` prints."""
        return {
            "family": self.family,
            "run": self.run,
            "step": self.done,
            "progress": self.progress,
            "running": self.running,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "price": self.price,
            "forecast": None if self.forecast is None else self.forecast.hash,
            "supersedes": None if self.old_forecast is None else self.old_forecast.hash,
            "source": None if self.forecast is None else (self.forecast.method or {})["horizon"]["source"],
            "reason": self.reason,
            "remarks": list(self.remarks),
            "applied": self.applied,
        }


def plan_replan(
    family: str,
    tokens: int,
    *,
    home: Path,
    run: str = "hero",
    reason: str = "",
    anyway: bool = False,
    tracking: str | None = None,
    level: float = 0.9,
) -> Replan:
    """What another horizon makes of a run; nothing is written.

    Args:
        tokens: of the whole run, those trained on included.
        reason: why; needed past `EARLY`, and to apply.
        anyway: allow it past `EARLY`.
    Raises:
        ValueError: the run has not started or has finished, the horizon is behind it or the same, or it is late.
    """
    runs = load_family_runs(family, home=home, tracking=tracking)
    folder = run_folder(home, runs.family, run)
    config, events = load_run_config(folder), load_events(folder)
    course = course_of(config, events)
    done, running = acts_after(folder, config, course)
    steps = _steps_of(tokens, course, done)
    if steps == course[-1].last_step:
        raise ValueError(f"tokens {tokens} are the horizon of {run} already ({steps} steps); give another")
    progress = done / course[-1].last_step
    if progress > EARLY and not (anyway and reason):
        raise ValueError(
            f"{run} is at {progress:.0%} of its horizon, past the first {EARLY:.0%}, where a change costs least; give"
            " --anyway and --reason to change it all the same"
        )
    later = course_of(config, (*events, {"kind": "schedule", "step": done + 1, "change": {"steps": steps}}))
    old, new, remarks = runs.registered, None, []
    if run != runs.plan["hero"]["name"] or old is None:
        remarks.append("no forecast is registered for this run: its loss at the new horizon is not forecast")
        old = None
    else:
        new = _successor(runs, later, old, Cooldown(done / config.steps, steps / config.steps), level, reason)
        remarks += new.warnings
    return Replan(
        family=runs.family,
        run=run,
        done=done,
        progress=progress,
        running=running,
        before=_side(course, done, old),
        after=_side(later, done, new),
        course=later,
        old_course=course,
        forecast=new,
        old_forecast=old,
        reason=reason,
        remarks=tuple(remarks),
    )


def apply_replan(plan: Replan, *, home: Path, tracking: str | None = None) -> Replan:
    """Registers the new forecast beside the old one and declares the change; the run follows it.

    Raises:
        ValueError: no reason was given, or the run has moved on since: plan it again.
    """
    if not plan.reason:
        raise ValueError("--apply needs --reason: why the horizon changes, in a few words")
    folder = run_folder(home, plan.family, plan.run)
    with declaring(folder) as (config, course, done):
        if (done, course) != (plan.done, plan.old_course):
            raise ValueError(f"{plan.run} has moved on from step {plan.done} to {done} meanwhile; run it again")
        if plan.forecast is not None:
            _register(plan.forecast, forecasts_folder(home, plan.family), resolve_tracking(home, tracking))
        append_event(folder, "schedule", done + 1, **plan.event)
    corpus = read_json(folder / CONFIG_FILE)["corpus_hash"]
    write_run_config(folder, config, corpus_hash=corpus, course=plan.course)
    return replace(plan, applied=True)


def _steps_of(tokens: int, course: Course, done: int) -> int:
    """Steps that come nearest to a horizon.

    Raises:
        ValueError: not more than what is done.
    """
    per_step = course[-1].config.tokens_per_step  # the same in every phase
    steps = round(tokens / per_step)
    if steps <= done:
        raise ValueError(f"tokens {tokens}: {done * per_step} are trained on already, at step {done}; give more")
    return steps


def _side(course: Course, done: int, forecast: Forecast | None) -> Side:
    plan, config, last = plan_course(course), course[-1].config, course[-1].last_step
    coming = [segment for segment in course if segment.first_step > done and segment.kinds]
    evaluation, checkpoint = config.evaluation.every_fraction, config.checkpoint.every_fraction
    return Side(
        steps=last,
        tokens=plan.tokens,
        flops=plan.flops,
        flops_with_head=plan.flops_with_head,
        tokens_per_active_param=plan.tokens_per_active_param,
        rate=learning_rate_at(course, done + 1),
        final_rate=learning_rate_at(course, last),
        phases=tuple(f"{' and '.join(segment.kinds)} at step {segment.first_step + 1}" for segment in coming),
        evaluations=sum(mark > done for mark in marks_of(course, evaluation)),
        checkpoints=sum(mark > done for mark in marks_of(course, checkpoint)),
        forecast=None if forecast is None else forecast.point,
        low=None if forecast is None else forecast.low,
        high=None if forecast is None else forecast.high,
    )


def _successor(
    runs: FamilyRuns, course: Course, old: Forecast, wanted: Cooldown, level: float, reason: str
) -> Forecast:
    target = {key: value for key, value in vars(plan_course(course)).items() if isinstance(value, int | float | str)}
    forecast = forecast_horizon(runs, wanted, target, level=level)
    supersedes = {"hash": old.hash, "reason": reason}
    return replace(forecast, method={**(forecast.method or {}), "supersedes": supersedes})


def _register(forecast: Forecast, folder: Path, store: str) -> None:
    """Here for certain; in the store as well, if it answers."""
    present = load_registered(folder)
    if present is not None and math.isclose(present.target.get("tokens", 0), forecast.target["tokens"]):
        return  # a call that was killed after this had come so far
    digest = register_successor(forecast, folder)
    try:
        mirror_forecast(folder / f"{digest}.json", store)
    except Exception as error:  # what counts is registered; what the store raises depends on the store
        log(f"tracking {public_address(store)!r} failed ({one_line(error)}); the forecast is registered here alone")
