"""Declaring a change to a run, with the effect expected: checked, then in its `events.jsonl`, mirror and report.

What each kind of change moves and ends is `rungwise.analysis.events`.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rungwise.analysis.events import parse_effect
from rungwise.analysis.reading.records import EVENTS_FILE, read_records
from rungwise.analysis.vocabulary import EVENT_KINDS, METRICS, is_metric_name
from rungwise.ladder.family import load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.launching.status import run_status
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.recording.journal import append_event

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
) -> dict[str, Any]:
    """Writes a change into the run's events and returns it as written.

    Args:
        step: the first step trained with the change; else the next one.
        expect: "<metric> <effect>" each, such as "train/loss +0.03", "train/grad_norm up 14%", "eval/loss none".
        grace: steps after which the effect is judged; else the detectors' own.
        planned: the rungs made the same change at the same progress, so comparisons hold.
    Raises:
        ValueError: unknown family, run, kind, metric or effect, a step outside the run, or the change is there already.
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
    event = {"kind": kind, "step": at, **details}
    for known in read_records(folder / EVENTS_FILE).records:
        if {name: value for name, value in known.items() if name != "time"} == event:
            raise ValueError(f"this {kind} change at step {at} of {run} is declared already; nothing was written")
    append_event(folder, kind, at, **details)
    return {"run": run, **event}


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
