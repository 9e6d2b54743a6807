"""Where a run's context, mixture or transport changes: what is measured before and after, and whether it goes ahead.

A planned change is written as an event before it acts; what became of any change follows as a note some steps later. A
context phase with a limit is tried on a copy of the state first and refused, with the figure, where it would drop more.
"""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from rungwise.analysis.reading.records import JOURNAL_FILE, decode_record
from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.changing.course import Segment, load_events
from rungwise.ladder.changing.phases import describe_parts
from rungwise.ladder.planning.drops_context import is_quick, predict_drops
from rungwise.ladder.recording.journal import append_event
from rungwise.ladder.training.engine import Step
from rungwise.ladder.training.schedule import Horizon

SETTLE_FRACTION: Final = 0.02
"""Of a run, after which a change is measured again."""
SETTLE_LEAST: Final = 5
SETTLE_MOST: Final = 1000
TAIL_BYTES: Final = 1 << 25
"""Of a journal, that are searched for a step: some thousands of steps."""
RECENT_STEPS: Final = 20
"""Last steps at the old length that a prediction rests on."""
DROPS: Final = "moe/drop_fraction"
SENDER_DROPS: Final = "moe/sender_drop_fraction"
FORETOLD: Final = "predicted_drop_fraction"


def settle_step(segment: Segment) -> int:
    """Steps done when what a change did is measured: a fiftieth of the run later, or at the segment's end."""
    wait = min(SETTLE_MOST, max(SETTLE_LEAST, round(SETTLE_FRACTION * segment.decay.steps)))
    return min(segment.first_step + wait, segment.last_step)


def probe_drops(step: Step, state: Any, tokens: np.ndarray, horizon: Horizon) -> dict[str, float]:
    """Drop fraction and loss of a batch under a segment's program, on a copy of the state that is thrown away.

    Needs room for a second state while it lasts.
    """
    copy = jax.jit(partial(jax.tree.map, jnp.copy))  # one program instead of one an array
    _, figures = step(copy(state), tokens, horizon)
    layers, loss = jax.device_get((figures.layers, figures.loss))
    return {"drop_fraction": float(np.mean(layers.drop_fraction)), "loss": float(loss.loss)}


def limit_of(segment: Segment) -> float | None:
    """Largest drop fraction at which a context phase begins; None where it has none, or nothing of it begins here."""
    if segment.context is None or "context" not in segment.kinds:
        return None
    return next((p.max_drop_fraction for p in segment.base.context if p.seq_len == segment.config.model.seq_len), None)


def describe_change(before: Segment, after: Segment) -> dict[str, Any]:
    """What a segment changes, in words and figures."""
    old, new = before.config, after.config
    changed: dict[str, Any] = {"what": "; ".join(describe_parts(old, new))}
    if old.model.seq_len != new.model.seq_len:
        changed |= {
            "seq_len": [old.model.seq_len, new.model.seq_len],
            "sequences_per_rank": [old.sequences_per_rank, new.sequences_per_rank],
            "query_key_multiplier": [old.model.query_key_multiplier, new.model.query_key_multiplier],
        }
    if old.data.mixture != new.data.mixture:
        changed["weights"] = [dict(config.data.mixture[0].weights) for config in (old, new)]
    return changed


def predicted_drops(folder: Path, before: Segment, after: Segment) -> dict[str, float]:
    """What the drop study predicts for the new length from the last steps at the old one, where it takes moments."""
    if before.config.sequences_per_rank == after.config.sequences_per_rank or not is_quick(after.config):
        return {}
    first = max(before.first_step + 1, after.first_step + 1 - RECENT_STEPS)
    steps = recorded(folder, range(first, after.first_step + 1)).values()
    layers = [step["layers"]["moe/frequency_deviation"] for step in steps if step["layers"]]
    drops = [step["values"][SENDER_DROPS] for step in steps if SENDER_DROPS in step["values"]]
    if not layers or not drops:
        return {}
    deviations = [fmean(of_layer) for of_layer in zip(*layers, strict=True)]
    found = predict_drops(before.config, after.config, deviations=deviations, sender_drop_fraction=fmean(drops))
    return {FORETOLD: found}


def recorded(folder: Path, steps: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Values and layers that the end of a run's journal has of some steps; later records win."""
    found: dict[int, dict[str, Any]] = {step: {"values": {}, "layers": {}} for step in steps}
    with (folder / JOURNAL_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in file:
            record = decode_record(line) or {}
            if record.get("kind") == "metrics" and record["step"] in found:
                place = found[record["step"]]
                place["values"] |= {name: decode_number(value) for name, value in record["values"].items()}
                place["layers"] |= record.get("layers", {})
    return found


def is_known(folder: Path, kind: str, step: int) -> bool:
    """Whether an event of that kind is written for that step: a resumed run meets its own."""
    return any(event["kind"] == kind and event["step"] == step for event in load_events(folder))


def write_change(folder: Path, before: Segment, after: Segment) -> None:
    """The phases of the family that begin with a segment, as planned changes, before they act; once."""
    step = after.first_step + 1
    new = [kind for kind in after.kinds if kind in ("context", "mixture") and not is_known(folder, kind, step)]
    if not new:
        return
    details = describe_change(before, after) | predicted_drops(folder, before, after)
    for kind in new:
        append_event(folder, kind, step, planned=True, **details)


def write_refusal(folder: Path, before: Segment, after: Segment, *, probe: Mapping[str, float], limit: float) -> str:
    """A context phase that does not begin, because it would drop too much; returns what was said."""
    said = (
        f"context {after.config.model.seq_len} refused: a forward pass at this length drops"
        f" {probe['drop_fraction']:.2%}, more than max_drop_fraction {limit:.2%};"
        f" {before.config.model.seq_len} tokens stay"
    )
    step, details = after.first_step + 1, {"probe": dict(probe), "max_drop_fraction": limit}
    append_event(folder, "note", step, refused=after.context, what=said, **details)
    return said


def write_outcome(folder: Path, segment: Segment, step: int) -> None:
    """What became of what a segment began with, as a note: each evaluation, loss and drops before it and now; once."""
    events = load_events(folder)
    if any(event["kind"] == "note" and event["step"] == step and "outcome" in event for event in events):
        return
    before, now = (at["values"] for at in recorded(folder, (segment.first_step, step)).values())
    names = [name for name in before if name in now and (name.startswith("eval/") or name in ("train/loss", DROPS))]
    foretold = [e[FORETOLD] for e in events if e["step"] == segment.first_step + 1 and FORETOLD in e]
    append_event(
        folder,
        "note",
        step,
        what=f"{', '.join(segment.kinds)} changed at step {segment.first_step + 1}: before and now",
        outcome={name: [before[name], now[name]] for name in names},
        **({FORETOLD: foretold[0]} if foretold else {}),
    )
