"""What a trainer may do by itself when a step goes wrong: leave its update out, or save and stop. All off by default.

A step is left out where its loss or gradient norm is not finite, or lies further above its recent mean than so many
deviations. The limit is a number made here, before the step is sent, from steps already recorded; the step itself
compares and keeps parameters, optimizer and balancing bias as they were. Left-out steps enter no mean.
Imports no jax.

Source: the skip-step optimizer of Olmo-core 3 (six deviations over 128 steps, of loss and gradient norm).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Final, Self

from pydantic import Field, model_validator

from rungwise.analysis.reading.records import JOURNAL_FILE, read_records
from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.console import log
from rungwise.model.config import Record

MIN_STEPS: Final = 32
"""Recorded steps before which only what is not finite is left out."""


class ActionsConfig(Record):
    """What the trainer does by itself."""

    skip_nonfinite: bool = Field(default=False, description="leave out updates whose loss or gradient is not finite")
    skip_deviations: float | None = Field(
        default=None, gt=0, description="leave out updates whose loss or gradient norm is this far over its mean"
    )
    skip_window: int = Field(default=128, ge=MIN_STEPS, description="steps of the mean and its deviation")
    stop_on_divergence: bool = Field(
        default=False, description="save and stop once the watch of the run has a critical alert open"
    )

    @model_validator(mode="after")
    def _check_skipping(self) -> Self:
        if self.skip_deviations is not None and not self.skip_nonfinite:
            raise ValueError("actions.skip_deviations needs actions.skip_nonfinite: a mean over NaN limits nothing")
        return self

    @property
    def skips(self) -> bool:
        """Whether any update may be left out."""
        return self.skip_nonfinite


class SkipLimits:
    """Above which loss and gradient norm the next update is left out: mean + deviations · standard deviation.

    A function of the steps recorded so far, so that a resumed run has the limits of one that never stopped.
    """

    def __init__(self, config: ActionsConfig) -> None:
        self._deviations = config.skip_deviations
        self._losses: deque[float] = deque(maxlen=config.skip_window)
        self._norms: deque[float] = deque(maxlen=config.skip_window)

    def recall(self, folder: Path, done: int) -> None:
        """Takes the steps up to `done` that a run's journal holds, the newest attempt's of each."""
        records = read_records(folder / JOURNAL_FILE).records
        steps = {
            record["step"]: record["values"]
            for record in records
            if record["kind"] == "metrics" and "train/grad_norm" in record["values"] and record["step"] <= done
        }
        for step in sorted(steps):
            self.add({name: decode_number(value) for name, value in steps[step].items()})

    def add(self, values: Mapping[str, float]) -> None:
        """Takes a recorded step's metrics; one that was left out counts nowhere."""
        loss, norm = values["train/loss"], values["train/grad_norm"]
        if not values.get("train/skipped") and math.isfinite(loss) and math.isfinite(norm):
            self._losses.append(loss)
            self._norms.append(norm)

    @property
    def now(self) -> tuple[float, float]:
        """(loss, gradient norm), infinite while too few steps are recorded or only finiteness is asked for."""
        if self._deviations is None or len(self._losses) < MIN_STEPS:
            return math.inf, math.inf
        loss, norm = (fmean(seen) + self._deviations * pstdev(seen) for seen in (self._losses, self._norms))
        return loss, norm


def write_skipped(folder: Path, step: int, values: Mapping[str, float], *, windows: Iterable[int]) -> None:
    """Notes an update that was left out, with the identity of its batch, so that it can be looked at and replayed.

    Args:
        windows: position of each of the batch's windows in the training stream, in tokens.
    """
    from rungwise.ladder.recording.journal import append_event

    loss, norm = values["train/loss"], values["train/grad_norm"]
    note = f"update left out: loss {loss:.4f}, gradient norm {norm:.4g}"
    append_event(folder, "note", step, note=note, skipped=[loss, norm], windows=[int(start) for start in windows])
    log(f"step {step}: {note}")
