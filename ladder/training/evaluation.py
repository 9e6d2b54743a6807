"""Loss on the fixed held-out windows, without any effect on a run's state."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from rungwise.ladder.family import RunConfig
from rungwise.ladder.text.batches import HeldOut
from rungwise.ladder.text.tokenizer import bits_per_byte
from rungwise.ladder.training.engine import Engine

DROPLESS_SEQUENCES = 64
"""Sequences evaluated together without drops; how many changes no loss."""

EvalStep = Callable[[Any, np.ndarray], np.ndarray | jax.Array]


def held_out_losses(step: EvalStep, state: Any, held_out: HeldOut, *, batch: int) -> Float[np.ndarray, " windows"]:
    """Loss of every window, nats per token.

    Args:
        batch: windows evaluated together; a divisor of their number.
    """
    windows = held_out.windows
    parts = [step(state, windows[at : at + batch]) for at in range(0, len(windows), batch)]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def dropless_losses(step: EvalStep, state: Any, held_out: HeldOut) -> Float[np.ndarray, " windows"]:
    """`held_out_losses` of a step without drops, in as large parts as divide the windows."""
    return held_out_losses(step, state, held_out, batch=math.gcd(len(held_out.windows), DROPLESS_SEQUENCES))


class Evaluator:
    """Loss on the fixed held-out windows, without any effect on the run's state."""

    def __init__(self, config: RunConfig, held_out: HeldOut, engine: Engine):
        count = len(held_out.windows)
        if count % config.batch_size:
            raise ValueError(
                f"evaluation.num_sequences {count} is not a multiple of the batch of {config.batch_size} sequences"
                f" of run {config.run}; choose one that is"
            )
        self._held_out, self._batch = held_out, config.batch_size
        self._dropless = engine.eval_step(config)
        self._dropping = engine.eval_step(config, dropping=True)

    def evaluate(self, state: Any) -> dict[str, float]:
        """Dropless loss, overall, by subset and in bits per byte."""
        losses = dropless_losses(self._dropless, state, self._held_out)
        loss = float(np.mean(losses))
        subsets = {
            f"eval/{name}/loss": float(np.mean(losses[self._held_out.subset_ids == index]))
            for index, name in enumerate(self._held_out.subsets)
            if np.any(self._held_out.subset_ids == index)
        }
        bits = bits_per_byte(loss, bytes_per_token=self._held_out.bytes_per_token)
        return {"eval/loss": loss, "eval/bits_per_byte": bits, **subsets}

    def evaluate_dropping(self, state: Any) -> dict[str, float]:
        """Loss through the training transport at the training batch, whose size decides what is dropped."""
        return {
            "eval_dropping/loss": float(
                np.mean(held_out_losses(self._dropping, state, self._held_out, batch=self._batch))
            )
        }
