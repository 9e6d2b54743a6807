"""Trains the cells of a sweep that share one compiled program: learning rate and length are data of the step.

Runs in a child of its own. What is measured of a cell is `measure_cell`; it goes into one file, whole or absent.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from rungwise.analysis.vocabulary import dump_json
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import write_json
from rungwise.ladder.recording.metrics import step_metrics
from rungwise.ladder.recording.provenance import code_version
from rungwise.ladder.studying.sweep_measure import History, measure_cell
from rungwise.ladder.text.batches import Batches, HeldOut, held_out_windows
from rungwise.ladder.text.data import load_tokens, make_batches
from rungwise.ladder.training.evaluation import dropless_losses
from rungwise.ladder.training.schedule import horizon_of
from rungwise.ladder.training.step import TrainState, init_state, make_eval_step, make_train_step

REPORT_SECONDS: Final = 0.5


def train_cells(configs: Sequence[RunConfig], files: Sequence[Path], *, cache: Path) -> None:
    """Trains each config to its end and writes its figures to its file; progress goes to standard output.

    Args:
        configs: equal but for seed, steps and learning rate (`Cell.program`).
        cache: where tokenised text is kept.
    """
    tokens = load_tokens(configs[0], cache)
    held_out = held_out_windows(tokens, seq_len=configs[0].model.seq_len, count=configs[0].evaluation.num_sequences)
    trainer = _Trainer(configs[0])
    done, total = 0, sum(config.steps for config in configs)
    for config, file in zip(configs, files, strict=True):
        history, state = trainer.train(config, make_batches(config, tokens), _Reporter(config, done, total))
        done += config.steps
        eval_loss = trainer.evaluate(state, held_out) if history.finite else math.nan
        figures = measure_cell(history, config, eval_loss=eval_loss)
        origin = {"corpus_hash": tokens.corpus_hash, "code_version": code_version(), "jax": jax.__version__}
        write_json(file, {**figures, **origin, "config": config.model_dump(mode="json")})


class _Trainer:
    """One compiled training step and one evaluation step for all cells."""

    def __init__(self, config: RunConfig):
        self._step = jax.jit(make_train_step(config), donate_argnums=0)
        self._compiled: Callable[..., tuple[TrainState, Any]] | None = None
        self._eval_step = jax.jit(make_eval_step(config))
        self._fresh_states: dict[int, Callable[[], TrainState]] = {}

    def _fresh(self, config: RunConfig) -> TrainState:
        """State before the first step; nothing of it depends on rate or steps."""
        if config.seed not in self._fresh_states:
            self._fresh_states[config.seed] = jax.jit(lambda: init_state(config))
        return self._fresh_states[config.seed]()

    def train(
        self, config: RunConfig, batches: Batches, report: Callable[[int, float], None]
    ) -> tuple[History, TrainState]:
        """To the last step, or to the first loss that is not finite: from there on nothing can be."""
        state, horizon, history = self._fresh(config), horizon_of(config), History()
        pending = None
        for step, tokens in _steps(config, batches):
            if self._compiled is None:  # an executable, which takes no other shape: one program by construction
                self._compiled = self._step.lower(state, tokens, horizon).compile()
            state, figures = self._compiled(state, tokens, horizon)
            if pending is not None:  # the figures of the step before: reading them does not hold up the device
                history.add(step_metrics(jax.device_get(pending))[0])
                report(step - 1, history.loss[-1])
                if not history.finite:
                    return history, state
            pending = figures
        history.add(step_metrics(jax.device_get(pending))[0])
        report(config.steps, history.loss[-1])
        return history, state

    def evaluate(self, state: TrainState, held_out: HeldOut) -> float:
        """Dropless loss on the held-out windows, nats per token."""
        return float(np.mean(dropless_losses(self._eval_step, state, held_out)))


def _steps(config: RunConfig, batches: Batches) -> Iterator[tuple[int, np.ndarray]]:
    for index in range(config.steps):
        yield index + 1, batches.batch(index)


class _Reporter:
    """Writes progress as JSON lines for the parent, not more often than REPORT_SECONDS."""

    def __init__(self, config: RunConfig, done: int, total: int):
        self._config, self._done, self._total = config, done, total
        self._last, self._last_step = 0.0, 0

    def __call__(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if not self._last_step:  # the first step compiles; speed counts from its end
            self._last, self._last_step = now, step
        if now - self._last < REPORT_SECONDS and step != self._config.steps:
            return
        speed = (step - self._last_step) * self._config.tokens_per_step / max(now - self._last, 1e-9)
        self._last, self._last_step = now, step
        print(dump_json({"step": self._done + step, "loss": loss, "speed": speed}), file=sys.stdout, flush=True)
