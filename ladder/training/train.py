"""One run, from its config to its last step: data, steps, evaluations, checkpoints, journal.

The loop sends step n before it reads the figures of step n − 1, so that recording and judging never stall the device.
A run killed at any moment resumes from its last whole checkpoint and ends with the same parameters, bit for bit.
It follows its course (`course.py`), segment by segment; changes declared while it trains are looked for after each
checkpoint.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rungwise.ladder.changing.course import (
    Course,
    Segment,
    changes_until,
    course_lock,
    course_of,
    load_events,
    marks_of,
    segment_at,
    stretches_of_course,
)
from rungwise.ladder.changing.transition import (
    is_known,
    limit_of,
    probe_drops,
    settle_step,
    write_change,
    write_outcome,
    write_refusal,
)
from rungwise.ladder.console import log
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import make_folder
from rungwise.ladder.launching.slurm import current_job
from rungwise.ladder.mesh.processes import agreed, first_alone, is_first, on_first, records_folder
from rungwise.ladder.recording.checkpoint import CheckpointFailed, Checkpoints
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.kept import kept_steps
from rungwise.ladder.recording.metrics import progress_metrics, source_metrics, step_metrics
from rungwise.ladder.recording.provenance import write_run_config
from rungwise.ladder.recording.tracking import Mirror
from rungwise.ladder.text.data import RunData, load_data, make_batches
from rungwise.ladder.training.actions import SkipLimits, write_skipped
from rungwise.ladder.training.engine import Engine, Step, build_engine
from rungwise.ladder.training.preemption import Diverged, Preempted, StopRequest, StopRun
from rungwise.ladder.training.schedule import Horizon, Limits, horizon_of
from rungwise.ladder.training.segment_evaluation import Evaluators
from rungwise.model.accounting import count_flops

Observer = Callable[[int, dict[str, float]], None]
"""Called with (step, every metric of the step) after the journal has it: progress bars and the watch."""

CEILING_SIZE = 1024
"""Edge of the square float32 product whose speed is the denominator of `perf/mfu`."""


def refuse_total_loss(values: dict[str, float], *, step: int, transport: str) -> None:
    """Stops a run whose experts compute nothing: its loss would stay finite and look like a poor model's.

    Raises:
        RuntimeError: every assignment of every layer was dropped.
    """
    if values["moe/drop_fraction"] >= 1.0:
        raise RuntimeError(
            f"moe/drop_fraction 1.0 at step {step}: transport {transport!r} dropped every assignment;"
            " raise its capacity factors"
        )


def matmul_ceiling(size: int = CEILING_SIZE, tries: int = 5) -> float:
    """FLOPs per second of a square float32 product in this process, the best of a few tries."""
    matrix = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda left: left @ left)
    jax.block_until_ready(product(matrix))
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix))
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


@dataclass
class Trainer:
    """A run in progress. `train` goes from wherever the last whole checkpoint left it to the end.

    Args:
        stop_after: steps of a qualification: no evaluation, no checkpoint, then the end.
        checkpoints: where checkpoints lie; `checkpoints` in the run's folder when absent.
    """

    config: RunConfig
    folder: Path
    data: RunData
    journal: Journal
    observers: tuple[Observer, ...] = ()
    stop_after: int | None = None
    checkpoints: Path | None = None
    engine: Engine = field(init=False)
    course: Course = field(init=False, default=())

    def __post_init__(self) -> None:
        config = self.config
        self.engine = build_engine(config)
        self._programs: dict[Any, Step] = {}
        self._follow_course()
        place, kept = self.checkpoints or self.folder / "checkpoints", self._kept_steps()
        self._checkpoints = Checkpoints(place, keep=config.checkpoint.keep, kept=kept)
        self._evaluators = Evaluators(config, self.data, self.engine)
        self._ceiling = matmul_ceiling()
        self._limits = SkipLimits(config.actions) if config.actions.skips else None

    def _follow_course(self) -> bool:
        """Takes what has been declared so far; whether it was anything new."""
        with course_lock(self.folder):
            self._events = tuple(agreed(list(load_events(self.folder))))
        course = course_of(self.config, self._events)
        if course == self.course:
            return False
        batches = make_batches(self.config, self.data.tokens, stretches_of_course(course))
        batches.check_budget(course[-1].last_step)
        self.course, self._batches = course, batches
        config, nothing = self.config, frozenset()
        settled = {settle_step(segment) for segment in course if segment.kinds}
        self._eval_marks = nothing if self.stop_after else marks_of(course, config.evaluation.every_fraction) | settled
        saves = marks_of(course, config.checkpoint.every_fraction) | self._kept_steps()
        self._save_marks = nothing if self.stop_after else saves
        write_run_config(self.folder, config, corpus_hash=self.data.corpus_hash, course=course)
        return True

    def _kept_steps(self) -> frozenset[int]:
        return frozenset(agreed(sorted(kept_steps(self.folder, self.course))))

    @property
    def last_step(self) -> int:
        """The step it ends with, as far as declared."""
        return min(self.stop_after or self.course[-1].last_step, self.course[-1].last_step)

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "run": self.config.run,
            "config_hash": self.config.content_hash,
            "corpus_hash": self.data.corpus_hash,
            "changes": changes_until(self._events, step),
            "jax": jax.__version__,
        }

    def restore(self) -> tuple[int, Any]:
        """The last whole checkpoint's step and state, or step 0 and a fresh state.

        Raises:
            ValueError: the checkpoint is of another config or corpus; the message names which.
        """
        start = self.config.start
        if self._checkpoints.latest_step() is None and start is None:
            return 0, self.engine.init_state()
        step, tree, meta = self._checkpoints.restore(self.engine.abstract_tree())
        inherited = start is not None and step == start.step and meta["config_hash"] == start.parent_hash
        own = self._meta(step)
        for key in ("corpus_hash",) if inherited else ("config_hash", "corpus_hash"):
            if meta[key] != own[key]:
                raise ValueError(
                    f"{key} of the checkpoint at step {step} is {meta[key][:12]}, the run's is {own[key][:12]};"
                    f" restore the old definition or move {self.folder} away"
                )
        if not inherited and meta.get("changes", []) != own["changes"]:
            raise ValueError(
                f"events.jsonl of {self.config.run} changes steps up to {step}, which are done under other settings:"
                f" {own['changes']}, not {meta.get('changes', [])}; declare changes from step {step + 1} on"
            )
        return step, self.engine.from_tree(tree)

    def train(self) -> Any:
        """Runs to the last step and ends the journal's attempt as finished."""
        done, state = self.restore()
        self.journal.start_attempt(
            done,
            device=self.engine.devices,
            threads=self.config.threads,
            jax=jax.__version__,
            **current_job(),
            **({"engineering": self.stop_after} if self.stop_after else {}),
        )
        if self._limits is not None:
            self._limits.recall(self.folder, done)
        with StopRequest() as stop:
            while done < self.last_step:
                state, done = self._train_segment(segment_at(self.course, done + 1), state, done, stop)
        self.journal.end(done, "finished")
        return state

    def _train_segment(self, segment: Segment, state: Any, done: int, stop: StopRequest) -> tuple[Any, int]:
        """From `done` steps to the segment's end, or to where a new change was declared: state and steps done."""
        if not self._begin(segment, state, done):
            return state, done
        horizon = horizon_of(segment.config, segment.decay)  # an argument: what differs in it shares a program
        train_step: Step | None = None
        pending: tuple[Segment, int, Any, float] | None = None
        for step in range(done + 1, min(segment.last_step, self.last_step) + 1):
            tokens = self._batches.batch(step - 1)  # the data position is the step itself
            if train_step is None:  # compiled apart, so that no step's time holds it
                train_step = self._program(segment.config, state, tokens, self._limited(horizon))
            started = time.perf_counter()
            state, figures = train_step(state, tokens, self._limited(horizon))
            if pending is not None:
                self._record(*pending)
            pending, done = (segment, step, figures, started), step
            leaving = (stop.reached(step) or self._is_asked(step)) and step < self.last_step
            if leaving or step in self._eval_marks or step in self._save_marks:
                self._record(*pending)
                pending = None
                self._at_mark(segment, step, state)
            if leaving:
                self._save(step, state)
                if self._asked is not None:
                    raise Diverged(f"{self._asked}; saved at step {step}")
                raise Preempted(f"asked to stop by {stop.name}, saved at step {step}; run it again to go on")
            if step in self._save_marks and self._follow_course():
                break
        if pending is not None:
            self._record(*pending)
        return state, done

    def _is_asked(self, step: int) -> bool:
        """Whether an observer wants the run stopped. Only the first process has observers: the others hear at marks."""
        if jax.process_count() == 1:
            return self._asked is not None
        return step in self._save_marks and agreed(self._asked is not None)

    def _limited(self, horizon: Horizon) -> Horizon:
        """With the limits above which this step's update is left out, where the run wants any."""
        if self._limits is None:
            return horizon
        return horizon._replace(limits=Limits(*map(np.float32, self._limits.now)))

    def _program(self, config: RunConfig, state: Any, tokens: np.ndarray, horizon: Horizon) -> Step:
        """The compiled step of a config; segments that differ in length of the run or data alone share it."""
        key = (config.model, config.transport, config.execution, config.batch_size)
        if key not in self._programs:
            self._programs[key] = self.engine.compile_step(config, state, tokens, horizon)
        return self._programs[key]

    def _begin(self, segment: Segment, state: Any, done: int) -> bool:
        """Writes what a planned phase changes before it acts; False where it is refused, which makes another course."""
        if done != segment.first_step or not segment.kinds:
            return True
        before, limit = segment_at(self.course, done), limit_of(segment)
        if limit is not None and not agreed(is_known(self.folder, "context", done + 1)):
            tokens, horizon = self._batches.batch(done), self._limited(horizon_of(segment.config, segment.decay))
            probe = probe_drops(self._program(segment.config, state, tokens, horizon), state, tokens, horizon)
            if probe["drop_fraction"] > limit:
                log(f"{self.config.run}: {write_refusal(self.folder, before, segment, probe=probe, limit=limit)}")
                self._follow_course()
                return False
        write_change(self.folder, before, segment)
        return True

    def _record(self, segment: Segment, step: int, figures: Any, started: float) -> None:
        """Waits for a step's figures and writes them: journal first, observers after."""
        values, layers = step_metrics(jax.device_get(figures))
        now = time.perf_counter()
        seconds = now - max(started, self._last_record)
        self._last_record = now
        config, last = segment.config, self.course[-1]
        values |= progress_metrics(
            tokens=segment.tokens_at(step), horizon=last.tokens_at(last.last_step), flops=segment.flops_at(step)
        )
        values |= source_metrics(self._batches.source_fractions(step - 1))
        values["perf/tokens_per_second"] = config.tokens_per_step / seconds
        work = config.tokens_per_step * count_flops(config.model).total(head=True, causal=True)
        values["perf/mfu"] = work / seconds / self._ceiling
        self.journal.write(step, values, layers=layers)
        self._observe(segment, step, values)
        refuse_total_loss(values, step=step, transport=config.transport.name)
        if self._limits is not None:
            self._limits.add(values)
            if values["train/skipped"]:
                write_skipped(self.folder, step, values, windows=self._batches.window_starts(step - 1))

    _last_record: float = 0.0
    _asked: str | None = None
    """Why an observer wants the run stopped."""

    def _at_mark(self, segment: Segment, step: int, state: Any) -> None:
        if step in self._eval_marks:
            values = self._evaluators.evaluate(segment.config, state)
            if step == self.last_step:
                values |= self._evaluators.evaluate_dropping(segment.config, state)
            self.journal.write(step, values)
            if segment.kinds and step == settle_step(segment):
                write_outcome(self.folder, segment, step)
            self._observe(segment, step, values)
        if step in self._save_marks:
            self._save(step, state)
        self._last_record = time.perf_counter()

    def _save(self, step: int, state: Any) -> None:
        if step not in self._checkpoints.steps():
            self.journal.sync()
            try:
                self._checkpoints.save(step, self.engine.to_tree(state), meta=self._meta(step))
            except CheckpointFailed as error:
                if step == self.last_step:
                    raise  # nothing would hold what was trained
                self.journal.trouble.failed("checkpoint", step, error)
            else:
                self.journal.trouble.worked("checkpoint", step)

    def _observe(self, segment: Segment, step: int, values: dict[str, float]) -> None:
        row = {"progress/tokens": float(segment.tokens_at(step)), **values}
        for observer in self.observers:
            try:
                observer(step, row)
            except StopRun as asked:
                self._asked = str(asked)


def train_run(
    config: RunConfig,
    folder: Path,
    *,
    cache: Path,
    tracking: str,
    observers: tuple[Observer, ...] = (),
    stop_after: int | None = None,
) -> None:
    """Trains one run to its end in this process, mirrored to MLflow as it goes.

    Args:
        folder: the run's own folder.
        cache: where tokenised text is kept between runs.
        tracking: MLflow address.
        stop_after: as `Trainer`.
    Raises:
        ValueError: bad input, or a folder that holds another definition of this run; nothing is half-written.
    """
    with first_alone():
        data = load_data(config, cache)
    on_first(lambda: write_run_config(make_folder(folder), config, corpus_hash=data.corpus_hash))
    if stop_after is None:
        Checkpoints(folder / "checkpoints").check_writable()
    with (
        records_folder(folder) as records,
        Mirror(records, tracking_uri=tracking) if is_first() else nullcontext(),
        Journal(records, family=config.family, run=config.run) as journal,
    ):
        Trainer(config, records, data, journal, observers, stop_after, folder / "checkpoints").train()
