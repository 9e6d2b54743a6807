"""Declaring a change to a run, with the effect expected: checked, then in its `events.jsonl`, mirror and report.

What each kind of change moves and ends is `rungwise.analysis.events`; which values it may change, `course.py`. A run
that is not training takes new values where it left off; one that trains, after the next checkpoint it comes to.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rungwise.analysis.events import parse_effect
from rungwise.analysis.reading.records import EVENTS_FILE, JOURNAL_FILE, read_records
from rungwise.analysis.vocabulary import EVENT_KINDS, METRICS, is_metric_name
from rungwise.ladder.changing.branch import load_run_config
from rungwise.ladder.changing.course import Course, Event, course_lock, course_of, load_events, marks_of
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.launching.status import run_status
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.journal import append_event, writer_of
from rungwise.ladder.recording.kept import kept_steps

_SIGNED = re.compile(r"(?P<sign>[+-])(?P<size>\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?P<percent>%?)")


def declare_event(
    family: str,
    run: str,
    kind: str,
    *,
    home: Path,
    step: int | None = None,
    expect: Iterable[str] = (),
    note: str | None = None,
    grace: int | None = None,
    planned: bool = False,
    change: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes a change into the run's events and returns it as written.

    Args:
        step: the first step trained with the change; else the next one, or the next at which the trainer looks.
        expect: "<metric> <effect>" each, such as "train/loss +0.03", "train/grad_norm up 14%", "eval/loss none".
        grace: steps after which the effect is judged; else the detectors' own.
        planned: the rungs made the same change at the same progress, so comparisons hold.
        change: "<field>=<value>" each, such as "transport.name=ragged": what the trainer does from there on. Without,
            the event tells of a change that somebody makes elsewhere.
    Raises:
        ValueError: unknown family, run, kind, metric, effect or field, a value that does not work, a step outside the
            run or already done, new values without a note, or the change is there already.
    """
    if kind not in EVENT_KINDS:
        raise ValueError(f"event kind {kind!r} is unknown; use one of {', '.join(EVENT_KINDS)}")
    plan = plan_ladder(load_family(family)).to_dict()
    folder = run_folder(home, plan["family"], run)
    if not folder.is_dir():
        raise ValueError(f"run {run!r} of {plan['family']} has no folder in {home}; declare the change where it trains")
    steps = {record["name"]: record["steps"] for record in (*plan["rungs"], plan["hero"])}.get(run)
    at = run_status(folder)["step"] + 1 if step is None else step
    if at < 1 or (steps is not None and at > steps):
        raise ValueError(f"step {at} is outside the run; give one from 1 to {steps if steps else 'its last'}")
    expected = dict(_effect(word) for word in expect)
    details = {"expected": expected or None, "note": note, "grace": grace, "planned": planned or None}
    details = {name: value for name, value in details.items() if value is not None}
    if values := dict(_value(word) for word in change):
        reason = details.pop("note", "")
        return {"run": run, **declare_change(folder, kind, values, reason=reason, step=step, **details)}
    event = {"kind": kind, "step": at, **details}
    for known in read_records(folder / EVENTS_FILE).records:
        if {name: value for name, value in known.items() if name != "time"} == event:
            raise ValueError(f"this {kind} change at step {at} of {run} is declared already; nothing was written")
    append_event(folder, kind, at, **details)
    return {"run": run, **event}


def declare_change(
    folder: Path, kind: str, change: Mapping[str, Any], *, reason: str, step: int | None = None, **details: Any
) -> Event:
    """Declares new values for a run, such as another transport, and returns the event as written.

    Args:
        change: new values by field, of those in `course.CHANGEABLE[kind]`.
        step: the first step under them; else the first there can be.
        details: what else the event says, such as the effects expected.
    Raises:
        ValueError: a change that this kind may not make, a value that does not work, a step too early, or no reason.
    """
    if not reason:
        raise ValueError(f"event {kind!r} needs a reason: why it changes, in a few words")
    with declaring(folder) as (config, course, done):
        at = done + 1 if step is None else step
        if not done < at <= course[-1].last_step:
            raise ValueError(f"step {at} of {config.run} cannot change; give one from {done + 1} to its last")
        event: Event = {"kind": kind, "step": at, "change": dict(change), "reason": reason, **details}
        course_of(config, (*load_events(folder), event))
        append_event(folder, kind, at, **{name: value for name, value in event.items() if name not in ("kind", "step")})
    return event


@contextmanager
def declaring(folder: Path) -> Iterator[tuple[RunConfig, Course, int]]:
    """The run's config, course and the steps after which a change acts, none of which moves until the block ends."""
    config = load_run_config(folder)
    with course_lock(folder):
        course = course_of(config, load_events(folder))
        yield config, course, acts_after(folder, config, course)[0]


def acts_after(folder: Path, config: RunConfig, course: Course) -> tuple[int, bool]:
    """The steps after which a change declared now acts, and whether the run trains.

    Of a run that does not train: its latest checkpoint. Of one that does: the next it comes to, where it looks.

    Raises:
        ValueError: the run has finished, or comes to no checkpoint before its end.
    """
    records = read_records(folder / JOURNAL_FILE).records
    last = max((record["attempt"] for record in records if record["kind"] == "attempt"), default=0)
    mine = [record for record in records if record.get("attempt") == last]
    if mine and mine[-1]["kind"] == "end" and mine[-1]["state"] == "finished":
        raise ValueError(f"run {config.run} has finished; its horizon is behind it: branch from it instead")
    saved = Checkpoints(folder / "checkpoints").latest_step() or 0
    if writer_of(folder) is None:
        return saved, False
    reached = max([saved, *(record["step"] for record in mine)])
    marks = marks_of(course, config.checkpoint.every_fraction) | kept_steps(folder, course)
    coming = [mark for mark in marks if reached < mark < course[-1].last_step]
    if not coming:
        raise ValueError(
            f"run {config.run} comes to no checkpoint before its end, step {course[-1].last_step}; stop it"
        )
    return min(coming), True


def _value(word: str) -> tuple[str, Any]:
    """Field and value of "transport.name=ragged"; a value is read as in a family file, else as a bare word.

    >>> _value("transport.name=ragged"), _value("transport.receiver_capacity_factor=1.5")
    (('transport.name', 'ragged'), ('transport.receiver_capacity_factor', 1.5))
    """
    field, equals, value = word.partition("=")
    if not equals or not value.strip():
        raise ValueError(f"change {word!r} names no value; write field=value, such as transport.name=ragged")
    try:
        return field.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return field.strip(), value.strip()


def _effect(word: str) -> tuple[str, Any]:
    """Metric and effect of "train/loss +0.03": a signed number is a move of so much, or of so many percent.

    >>> _effect("train/loss +0.03"), _effect("train/grad_norm -14%")
    (('train/loss', 0.03), ('train/grad_norm', 'down 14%'))
    """
    metric, _, effect = word.strip().partition(" ")
    effect = effect.strip()
    if not effect:
        raise ValueError(f"expect {word!r} names no effect; write a metric and +0.03, -5%, up, down, either or none")
    if not is_metric_name(metric) and "*" not in metric:
        near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.3)
        raise ValueError(
            f"expect {word!r}: metric {metric!r} is unknown" + (f"; did you mean {near[0]}?" if near else "")
        )
    value: Any = effect
    if (signed := _SIGNED.fullmatch(effect)) is not None:
        size = float(signed["sign"] + signed["size"])
        value = f"{'up' if size > 0 else 'down'} {abs(size):g}%" if signed["percent"] else size
    try:
        parse_effect(value)
    except ValueError as error:
        raise ValueError(f"expect {word!r}: {error}") from error
    return metric, value
