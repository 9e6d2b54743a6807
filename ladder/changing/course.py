"""The course of a run: its config, the phases its family states and the changes declared on the way, as segments.

Everything that asks what a run does at a step asks here: training, plan, replan, branch, status. Imports no jax.

A declared change is an event with `change`, a table of new values by dotted field of `RunConfig`, and `step`, the
first optimizer step (from 1) under them; it is in `events.jsonl` before it acts. The course is a function of config and
events alone: a run that is killed takes the same one again.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rungwise.analysis.reading.records import EVENTS_FILE, read_records
from rungwise.ladder.changing.phases import Phase, plan_phases, stretches_of
from rungwise.ladder.family import RunConfig, explain
from rungwise.ladder.planning.plan import RunPlan, plan_run
from rungwise.ladder.text.mixture import Stretch
from rungwise.ladder.training.decay import Decay
from rungwise.model.accounting import count_flops

Event = Mapping[str, Any]

CHANGEABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": ("steps",),
    "context": ("model.seq_len", "model.window", "model.query_key_multiplier", "sequences_per_rank", "context"),
    "mixture": ("data.mixture",),
    "transport": (
        "transport.name",
        "transport.sender_capacity_factor",
        "transport.receiver_capacity_factor",
        "transport.num_waves",
        "transport.spill",
        "transport.payload",
        "transport.payload_scale",
        "transport.ragged_exchange",
        "model.balance",
        "model.balance_scope",
        "model.balance_step",
        "model.balance_loss_weight",
        "model.quantile_estimator",
    ),
    "precision": (
        "execution.compute_dtype",
        "execution.rematerialize",
        "execution.rematerialize_experts",
        "execution.expert_matmul",
        "execution.microbatches",
    ),
}
"""What an event of a kind may change. The rest is a run's identity: the shape of its parameters, optimizer, seed."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a run under one config. `first_step` steps are done before it, `last_step` at its end."""

    first_step: int
    last_step: int
    config: RunConfig
    """In effect, without phases of its own: what step, plan and FLOPs are made of."""
    base: RunConfig
    """With the phases still planned, refused ones left out, and what was declared by then: what a plan states."""
    decay: Decay
    tokens_before: int
    flops_before: float
    """Without head, as `progress/flops`."""
    kinds: tuple[str, ...] = ()
    """Event kinds of what changes at its beginning; none for the first segment."""
    context: int | None = None
    """Index of the context phase in effect."""

    def tokens_at(self, step: int) -> int:
        """Trained on when `step` steps are done."""
        return self.tokens_before + (step - self.first_step) * self.config.tokens_per_step

    def flops_at(self, step: int) -> float:
        """Spent by then, without head."""
        flops = count_flops(self.config.model).total(head=False)
        return self.flops_before + (step - self.first_step) * self.config.tokens_per_step * flops


Course = tuple[Segment, ...]


def load_events(folder: str | Path) -> tuple[Event, ...]:
    """A run's declared events, as written."""
    return tuple(read_records(Path(folder) / EVENTS_FILE).records)


@contextmanager
def course_lock(folder: str | Path) -> Iterator[None]:
    """Held by whoever declares a change, from asking how far the run is until the change is written, and by the trainer
    while it looks for changes: none can fall between a step that is done and the look after it."""
    lock = os.open(Path(folder) / "course.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def changes_until(events: Iterable[Event], step: int) -> list[list[Any]]:
    """What was declared to change up to an optimizer step: step, kind and new values, as plain values."""
    changes = (event for event in events if event.get("change") and event["step"] <= step)
    return [[event["step"], event["kind"], dict(event["change"])] for event in sorted(changes, key=lambda e: e["step"])]


def course_of(config: RunConfig, events: Iterable[Event] = ()) -> Course:
    """The segments of a run, first to last.

    Args:
        events: records of its `events.jsonl`; those without `change` are left out.
    Raises:
        ValueError: an event changes what it may not, or to a value that does not work.
    """
    events = tuple(events)
    refused = {event["refused"] for event in events if "refused" in event}
    changes = sorted((event for event in events if event.get("change")), key=lambda event: event["step"])
    start = config.start
    done = 0 if start is None else start.step
    decay = _first_decay(config)
    segments: list[Segment] = []
    for index, (first, base, kinds) in enumerate(_bases(config, changes, done)):
        if index and base.steps != decay.steps:
            decay = decay.redirected(first, base.steps)
        end = _next_change(changes, after=first, steps=base.steps)
        planned = base.replace(context=tuple(p for i, p in enumerate(base.context) if i not in refused))
        for phase in plan_phases(base, refused=refused):
            if phase.last_step > first and phase.first_step < end:
                _append(segments, phase, first=first, end=end, decay=decay, kinds=kinds, base=planned)
    return tuple(segments)


def segment_at(course: Course, step: int) -> Segment:
    """The segment whose config the optimizer step `step` (from 1) has."""
    return next((segment for segment in course if step <= segment.last_step), course[-1])


def last_step(course: Course) -> int:
    return course[-1].last_step


def total_tokens(course: Course) -> int:
    return course[-1].tokens_at(course[-1].last_step)


def stretches_of_course(course: Course) -> tuple[Stretch, ...]:
    """How batches are made over the whole run, a parent's part included."""
    start = course[0].config.start
    inherited = () if start is None else tuple(Stretch(*stretch) for stretch in start.stretches)
    return (*inherited, *stretches_of((segment.first_step, segment.config) for segment in course))


def learning_rate_at(course: Course, step: int) -> float:
    """Rate of optimizer step `step` (from 1), as the trainer applies it, within float32."""
    segment = segment_at(course, step)
    return segment.config.learning_rate * segment.decay.at(step - 1)


def marks_of(course: Course, every_fraction: float) -> frozenset[int]:
    """Steps at equal parts of the run as it was planned then, the last step of each segment and of the run included."""
    parts = max(1, round(1 / every_fraction))
    marks = {segment.last_step for segment in course}
    for segment in course:
        even = (max(1, round(segment.decay.steps * part / parts)) for part in range(1, parts + 1))
        marks |= {mark for mark in even if segment.first_step < mark <= segment.last_step}
    return frozenset(marks)


def plan_course(course: Course) -> RunPlan:
    """A run's plan with what its course makes of it: steps, tokens, FLOPs over all segments."""
    config = course[-1].base
    plan = plan_run(config)
    tokens = total_tokens(course)
    if config == course[0].base and config.start is None:
        return plan
    counted = dict.fromkeys((name for name in vars(plan) if name.startswith("flops")), 0.0)
    for segment in course:
        part = plan_run(segment.config)
        share = (segment.last_step - segment.first_step) * segment.config.tokens_per_step / part.tokens
        counted = {name: total + share * getattr(part, name) for name, total in counted.items()}
    if config.start is not None:  # what the parent spent, at its own price of a token
        before = config.start.flops
        counted = {name: total + before * _ratio(plan, name) for name, total in counted.items()}
    params = plan.num_active_params
    return replace(plan, tokens=tokens, steps=last_step(course), tokens_per_active_param=tokens / params, **counted)


def changed_config(config: RunConfig, kind: str, change: Mapping[str, Any]) -> RunConfig:
    """A config with the values of one declared change.

    Raises:
        ValueError: a field that an event of this kind may not change, or a value that does not work.
    """
    content = config.model_dump(mode="json")
    for name, value in change.items():
        if name not in CHANGEABLE.get(kind, ()):
            allowed = ", ".join(CHANGEABLE.get(kind, ())) or f"nothing; kinds that may: {', '.join(CHANGEABLE)}"
            raise ValueError(f"event {kind!r} cannot change {name!r}; it may change {allowed}")
        *path, leaf = name.split(".")
        table = content
        for key in path:
            table = table[key]
        table[leaf] = value
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"event {kind!r} of run {config.run}: {explain(error)}") from error


def _first_decay(config: RunConfig) -> Decay:
    if config.start is None:
        return Decay.of(config.optimizer, config.steps)
    return config.start.decay(steps=config.steps, final=config.optimizer.final_fraction)


def _bases(config: RunConfig, changes: Sequence[Event], done: int) -> Iterator[tuple[int, RunConfig, tuple[str, ...]]]:
    """(steps done before, config with its phases, kinds of what changed) from each declared change on."""
    base, first, kinds = config, done, ()
    for event in changes:
        at = max(done, int(event["step"]) - 1)
        if at >= base.steps:
            break  # the run had ended
        if at > first:
            yield first, base, kinds
            kinds = ()
        changed = changed_config(base, event["kind"], event["change"])
        if changed.steps != base.steps:
            changed = _with_phases_moved(base, done=at, steps=changed.steps)
        base, first, kinds = changed, at, (*kinds, event["kind"])
    yield first, base, kinds


def _next_change(changes: Sequence[Event], *, after: int, steps: int) -> int:
    """Steps done when the next declared change acts, else the last step."""
    return min((int(event["step"]) - 1 for event in changes if int(event["step"]) - 1 > after), default=steps)


def _with_phases_moved(base: RunConfig, *, done: int, steps: int) -> RunConfig:
    """Another length: phases that have begun stay where they began, the others keep their share of the run."""

    def moved(starts: Sequence[float]) -> list[float]:
        begun = [round(start * base.steps) for start in starts if round(start * base.steps) <= done]
        later = [max(round(start * steps), done) for start in starts[len(begun) :]]
        return [at / steps for at in (*begun, *later)]

    def kept(phases: Sequence[Any]) -> list[dict[str, Any]]:
        starts = moved([phase.start for phase in phases])
        last = dict(zip(starts, phases, strict=True))  # of two at one step, the later
        return [{**phase.model_dump(mode="json"), "start": start} for start, phase in last.items()]

    content = base.model_dump(mode="json")
    content |= {"steps": steps, "context": kept(base.context)}
    content["data"] |= {"mixture": kept(base.data.mixture)}
    return RunConfig.model_validate(content)


def _append(
    segments: list[Segment],
    phase: Phase,
    *,
    first: int,
    end: int,
    decay: Decay,
    kinds: Sequence[str],
    base: RunConfig,
) -> None:
    """Adds a phase's part of what lies between two declared changes."""
    begin = max(first, phase.first_step)
    if segments:
        before = segments[-1]
        tokens, flops = before.tokens_at(before.last_step), before.flops_at(before.last_step)
        if begin > first:
            kinds = _phase_kinds(before.config, phase.config)
        if not kinds and phase.config == before.config:
            segments[-1] = replace(before, last_step=min(phase.last_step, end))
            return
    else:
        start = base.start
        tokens, flops = (0, 0.0) if start is None else (start.tokens, start.flops)
    segments.append(
        Segment(
            first_step=begin,
            last_step=min(phase.last_step, end),
            config=phase.config,
            base=base,
            decay=decay,
            tokens_before=tokens,
            flops_before=flops,
            kinds=tuple(kinds),
            context=phase.context,
        )
    )


def _phase_kinds(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """Which kinds of change a phase brings."""
    context, mixture = before.model.seq_len != after.model.seq_len, before.data.mixture != after.data.mixture
    return tuple(kind for kind, changed in (("context", context), ("mixture", mixture)) if changed)


def _ratio(plan: RunPlan, name: str) -> float:
    """FLOPs under a convention over those without head."""
    return getattr(plan, name) / plan.flops
