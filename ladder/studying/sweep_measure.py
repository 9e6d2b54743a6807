"""What is measured of one cell of a sweep, and when it counts as diverged. Imports no jax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rungwise.ladder.family import RunConfig

FINAL_SHARE: Final = 0.05
"""Share of the steps whose mean is the final training loss."""
LATE_SHARE: Final = 0.25
"""Share of the steps, the last ones, over which drops and loads are averaged."""
RISE: Final = 0.5
"""Nats above its own best at which a run counts as diverged."""
DIVERGENCE_RULE: Final = (
    "diverged: a gradient or loss that is not finite; or a final training loss (mean of the last 5% of steps) more than"
    " 0.5 nats above the lowest mean of any 5%; or a final loss, training or held-out, above ln(vocab_size)"
)

_METRICS: Final = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "nonfinite": "train/nonfinite",
    "drop_fraction": "moe/drop_fraction",
    "load": "moe/expert_load_max_over_mean",
    "worst_load": "moe_worst_layer/expert_load_max_over_mean",
}


@dataclass
class History:
    """Figures of every step so far."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    nonfinite: list[float] = field(default_factory=list)
    drop_fraction: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    worst_load: list[float] = field(default_factory=list)

    def add(self, values: Mapping[str, float]) -> None:
        """Appends one step's metrics, by their names in the vocabulary."""
        for name, metric in _METRICS.items():
            getattr(self, name).append(values[metric])

    @property
    def finite(self) -> bool:
        """Whether the newest loss is a number."""
        return bool(self.loss) and math.isfinite(self.loss[-1])


def measure_cell(history: History, config: RunConfig, *, eval_loss: float) -> dict[str, Any]:
    """The figures of a cell: losses in nats per token, gradient norms before clipping.

    Args:
        eval_loss: dropless, on the held-out windows after the last step; NaN where the run ended before that.
    """
    loss = np.array(history.loss)
    width = max(1, round(FINAL_SHARE * config.steps))
    means = np.convolve(loss, np.full(width, 1.0 / width), mode="valid") if loss.size >= width else loss
    train_loss, best = float(means[-1]), float(np.min(means[np.isfinite(means)], initial=math.inf))
    nonfinite = int(np.count_nonzero(~np.isfinite(loss) | (np.array(history.nonfinite) > 0)))
    warmup = max(1, round(config.optimizer.warmup_fraction * config.steps))
    late = loss.size - max(1, round(LATE_SHARE * loss.size))
    why = divergence(
        eval_loss=eval_loss, train_loss=train_loss, best=best, nonfinite=nonfinite, vocab_size=config.model.vocab_size
    )
    return {
        "rung": config.rung,
        "seed": config.seed,
        "learning_rate": config.learning_rate,
        "steps": config.steps,
        "steps_done": int(loss.size),
        "eval_loss": eval_loss,
        "train_loss": train_loss,
        "best_train_loss": best,
        "grad_norm_peak": _peak(history.grad_norm[warmup:]),
        "grad_norm_peak_late": _peak(history.grad_norm[config.steps // 2 :]),
        "nonfinite_steps": nonfinite,
        "drop_fraction": float(np.mean(history.drop_fraction[late:])),
        "expert_load": float(np.mean(history.load[late:])),
        "expert_load_worst_layer": float(np.mean(history.worst_load[late:])),
        "diverged": why is not None,
        "why": why,
    }


def divergence(*, eval_loss: float, train_loss: float, best: float, nonfinite: int, vocab_size: int) -> str | None:
    """Why a run counts as diverged by DIVERGENCE_RULE; None where it does not."""
    if nonfinite or not (math.isfinite(eval_loss) and math.isfinite(train_loss)):
        return "a gradient or loss is not finite"
    if max(eval_loss, train_loss) > math.log(vocab_size):
        return f"final loss {max(eval_loss, train_loss):.3f} is above ln(vocab_size) {math.log(vocab_size):.3f}"
    if train_loss > best + RISE:
        return f"final training loss {train_loss:.3f} is {train_loss - best:.3f} above its own best"
    return None


def _peak(norms: list[float]) -> float | None:
    """Largest finite norm; None without one."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return max(finite) if finite else None
