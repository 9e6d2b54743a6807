"""One run, from its config to its last step: data, steps, evaluations, checkpoints, journal.

The loop sends step n before it reads the figures of step n − 1, so that recording and judging never stall the device.
A run killed at any moment resumes from its last whole checkpoint and ends with the same parameters, bit for bit.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rungwise.ladder.checkpoint import Checkpoints
from rungwise.ladder.data import RunData, load_data
from rungwise.ladder.evaluation import Evaluator
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import make_folder
from rungwise.ladder.journal import Journal
from rungwise.ladder.metrics import progress_metrics, source_metrics, step_metrics
from rungwise.ladder.provenance import write_run_config
from rungwise.ladder.schedule import horizon_of
from rungwise.ladder.step import (
    TrainState,
    init_state,
    make_train_step,
    state_to_tree,
    tree_to_state,
)
from rungwise.ladder.tracking import Mirror
from rungwise.model.accounting import count_flops

Observer = Callable[[int, dict[str, float]], None]
"""Called with (step, every metric of the step) after the journal has it: progress bars and the watch."""

CEILING_SIZE = 1024
"""Edge of the square float32 product whose speed is the denominator of `perf/mfu`."""


@dataclass
class Schedule:
    """At which steps a run evaluates and saves: equal parts of the run, and always the last step."""

    steps: int
    every_fraction: float
    marks: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        parts = max(1, round(1 / self.every_fraction))
        self.marks = frozenset(max(1, round(self.steps * part / parts)) for part in range(1, parts + 1))

    def __contains__(self, step: int) -> bool:
        return step in self.marks


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
    """A run in progress. `train` goes from wherever the last whole checkpoint left it to the end."""

    config: RunConfig
    folder: Path
    data: RunData
    journal: Journal
    observers: tuple[Observer, ...] = ()

    def __post_init__(self) -> None:
        config = self.config
        self._checkpoints = Checkpoints(self.folder / "checkpoints", keep=config.checkpoint.keep)
        self._evaluator = Evaluator(config, self.data.held_out)
        self._eval_marks = Schedule(config.steps, config.evaluation.every_fraction)
        self._save_marks = Schedule(config.steps, config.checkpoint.every_fraction)
        flops = count_flops(config.model)
        self._flops_per_token = flops.total(head=False)
        self._work_per_step = config.tokens_per_step * flops.total(head=True, causal=True)
        self._ceiling = matmul_ceiling()

    @property
    def _meta(self) -> dict[str, Any]:
        return {
            "run": self.config.run,
            "config_hash": self.config.content_hash,
            "corpus_hash": self.data.corpus_hash,
            "jax": jax.__version__,
        }

    def restore(self) -> tuple[int, TrainState]:
        """The last whole checkpoint's step and state, or step 0 and a fresh state.

        Raises:
            ValueError: the checkpoint is of another config or corpus; the message names which.
        """
        if self._checkpoints.latest_step() is None:
            return 0, jax.jit(lambda: init_state(self.config))()  # one program to compile instead of one an array
        like = jax.eval_shape(lambda: init_state(self.config))
        step, tree, meta = self._checkpoints.restore(state_to_tree(like))
        for key in ("config_hash", "corpus_hash"):
            if meta[key] != self._meta[key]:
                raise ValueError(
                    f"{key} of the checkpoint at step {step} is {meta[key][:12]}, the run's is {self._meta[key][:12]};"
                    f" restore the old definition or move {self.folder} away"
                )
        return step, tree_to_state(tree, like)

    def train(self) -> TrainState:
        """Runs to the last step and ends the journal's attempt as finished."""
        done, state = self.restore()
        self.journal.start_attempt(
            done, device=jax.devices()[0].platform, threads=self.config.threads, jax=jax.__version__
        )
        jitted = jax.jit(make_train_step(self.config), donate_argnums=0)
        train_step: Callable[..., tuple[TrainState, Any]] = jitted
        horizon = horizon_of(self.config)  # an argument, so that runs that differ in it share a compiled program
        pending: tuple[int, Any, float] | None = None
        for step, tokens in self._batches_from(done):
            if step == done + 1:
                train_step = jitted.lower(state, tokens, horizon).compile()  # apart, so that no step's time holds it
            started = time.perf_counter()
            state, figures = train_step(state, tokens, horizon)
            if pending is not None:
                self._record(*pending)
            pending = (step, figures, started)
            if step in self._eval_marks or step in self._save_marks:
                self._record(*pending)
                pending = None
                self._at_mark(step, state)
        if pending is not None:
            self._record(*pending)
        self.journal.end(self.config.steps, "finished")
        return state

    def _batches_from(self, done: int) -> Iterator[tuple[int, np.ndarray]]:
        """(step number after this batch, tokens); the data position is the step itself."""
        for index in range(done, self.config.steps):
            yield index + 1, self.data.batches.batch(index)

    def _record(self, step: int, figures: Any, started: float) -> None:
        """Waits for a step's figures and writes them: journal first, observers after."""
        values, layers = step_metrics(jax.device_get(figures))
        now = time.perf_counter()
        seconds = now - max(started, self._last_record)
        self._last_record = now
        config = self.config
        values |= progress_metrics(
            step=step,
            steps=config.steps,
            tokens_per_step=config.tokens_per_step,
            flops_per_token=self._flops_per_token,
        )
        values |= source_metrics(self.data.batches.source_fractions(step - 1))
        values["perf/tokens_per_second"] = config.tokens_per_step / seconds
        values["perf/mfu"] = self._work_per_step / seconds / self._ceiling
        self.journal.write(step, values, layers=layers)
        self._observe(step, values)
        refuse_total_loss(values, step=step, transport=config.transport.name)

    _last_record: float = 0.0

    def _at_mark(self, step: int, state: TrainState) -> None:
        if step in self._eval_marks:
            values = self._evaluator.evaluate(state)
            if step == self.config.steps:
                values |= self._evaluator.evaluate_dropping(state)
            self.journal.write(step, values)
            self._observe(step, values)
        if step in self._save_marks:
            self.journal.sync()
            self._checkpoints.save(step, state_to_tree(state), meta=self._meta)
        self._last_record = time.perf_counter()

    def _observe(self, step: int, values: dict[str, float]) -> None:
        row = {"progress/tokens": float(step * self.config.tokens_per_step), **values}
        for observer in self.observers:
            observer(step, row)


def train_run(
    config: RunConfig, folder: Path, *, cache: Path, tracking: str, observers: tuple[Observer, ...] = ()
) -> None:
    """Trains one run to its end in this process, mirrored to MLflow as it goes.

    Args:
        folder: the run's own folder.
        cache: where tokenised text is kept between runs.
        tracking: MLflow address.
    Raises:
        ValueError: bad input, or a folder that holds another definition of this run; nothing is half-written.
    """
    data = load_data(config, cache)
    write_run_config(make_folder(folder), config, corpus_hash=data.corpus_hash)
    with (
        Mirror(folder, tracking_uri=tracking),
        Journal(folder, family=config.family, run=config.run) as journal,
    ):
        Trainer(config, folder, data, journal, observers).train()
