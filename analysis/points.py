"""From runs to the points a law is fitted to: one final loss per run by one stated rule, and why a run was
left out.

Rule: the last `eval/loss` at the run's final step, when every usable run has one; else, for all runs alike,
the median of the last ten `train/loss`. Never the last noisy step, never the minimum. What is checked row by row in a
table is `rows.py`; grouping runs into rungs is `forecast.py`.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.rows import load_points, loss_refusal, target_flops, usable_points

__all__ = [
    "final_eval_loss", "final_train_loss", "ladder_points", "load_points", "logged_values", "loss_refusal",
    "target_flops", "usable_points",
]  # fmt: skip

EVAL_RULE: Final = "last eval/loss, at the final step"
TRAIN_RULE: Final = "median of the last 10 train/loss"
TRAIN_WINDOW: Final = 10
HORIZON_SLACK: Final = 0.002
"""Share of the horizon that may be missing: a last partial batch, never a part of the decay."""
CONDITION_FIELDS: Final = (
    "optimizer", "transport", "capacity_factor", "precision", "mixture", "tokenizer", "vocab_size", "corpus_hash",
)  # fmt: skip
"""Top-level settings copied beside the plan, so that a forecast can state what it rests on."""


def ladder_points(runs: Iterable[Any]) -> pd.DataFrame:
    """One row per usable rung run: run, rung, seed, loss, metric, loss_rule, config_hash and every scalar of
    its plan.

    `runs` are records with family, run, role, rung, seed, plan, config, config_hash, state and trajectory;
    the hero is skipped. The frame's `attrs` hold "refused" ({"run", "reason"} each) and "merged" ({"run",
    "into"}, copies of one config).
    """
    refused: list[dict[str, str]] = []
    merged: list[dict[str, str]] = []
    candidates: list[tuple[Any, float | None, float | None]] = []
    by_config: dict[tuple[Any, ...], str] = {}
    for run in runs:
        if run.role != "rung":
            continue
        key = (run.config_hash, run.rung, run.seed)
        if (reason := _refusal(run)) is not None:
            refused.append({"run": run.run, "reason": reason})
        elif run.config_hash and key in by_config:
            merged.append({"run": run.run, "into": by_config[key]})
        else:
            by_config[key] = run.run
            candidates.append((run, final_eval_loss(run.trajectory), final_train_loss(run.trajectory)))
    use_eval = bool(candidates) and all(evaluation is not None for _, evaluation, _ in candidates)
    rows = []
    for run, evaluation, training in candidates:
        loss = evaluation if use_eval else training
        if (reason := loss_refusal(loss)) is not None:
            refused.append({"run": run.run, "reason": reason})
        else:
            rows.append(_row(run, loss, use_eval=use_eval))
    table = pd.DataFrame(rows, columns=None if rows else ["run", "rung", "seed", "flops", "loss"])
    table.attrs.update(refused=refused, merged=merged)
    return table


def logged_values(trajectory: Any, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values at which `metric` was logged, logged NaN included where the trajectory can tell."""
    frame = getattr(trajectory, "frame", trajectory)
    if metric not in frame.columns:
        return np.empty(0, dtype=int), np.empty(0)
    values = frame[metric].to_numpy(dtype=float)
    logged = getattr(trajectory, "logged", None)
    mask = np.asarray(logged(metric), dtype=bool) if callable(logged) else ~np.isnan(values)
    return frame["step"].to_numpy()[mask], values[mask]


def final_eval_loss(trajectory: Any) -> float | None:
    """The evaluation at the last training step, nats; None when the last evaluation is earlier."""
    steps, values = logged_values(trajectory, "eval/loss")
    train_steps, _ = logged_values(trajectory, "train/loss")
    last = max([*steps[-1:], *train_steps[-1:]], default=None)
    return float(values[-1]) if steps.size and steps[-1] == last else None


def final_train_loss(trajectory: Any) -> float | None:
    """Median of the last ten training losses, nats; None with fewer."""
    values = logged_values(trajectory, "train/loss")[1][-TRAIN_WINDOW:]
    return float(np.median(values)) if values.size == TRAIN_WINDOW else None


def _refusal(run: Any) -> str | None:
    if run.state != "finished":
        return f"run is {run.state}, not finished"
    flops = run.plan.get("flops")
    if not isinstance(flops, int | float) or not math.isfinite(flops) or flops <= 0:
        return f"plan states no usable flops ({flops!r})"
    return _short_of_horizon(run)


def _short_of_horizon(run: Any) -> str | None:
    """A run whose own counter of tokens stopped before the plan's horizon, whatever its state says."""
    frame = getattr(run.trajectory, "frame", run.trajectory)
    planned = run.plan.get("tokens")
    if "tokens" not in frame.columns or not isinstance(planned, int | float):
        return None
    counted = frame["tokens"].to_numpy(dtype=float)
    last = float(np.nanmax(counted)) if np.isfinite(counted).any() else math.nan
    if math.isfinite(last) and last < (1.0 - HORIZON_SLACK) * planned:
        return f"counted {last:.4g} of {planned:.4g} tokens: the horizon was not reached, nor the decay completed"
    return None


def _row(run: Any, loss: float | None, *, use_eval: bool) -> dict[str, Any]:
    scalars = {key: value for key, value in run.plan.items() if isinstance(value, int | float | str)}
    settings = {key: run.config[key] for key in CONDITION_FIELDS if isinstance(run.config.get(key), int | float | str)}
    return {
        "run": run.run,
        "rung": run.rung,
        "seed": run.seed,
        "loss": loss,
        "metric": "eval/loss" if use_eval else "train/loss",
        "loss_rule": EVAL_RULE if use_eval else TRAIN_RULE,
        "config_hash": run.config_hash,
        **settings,
        **{key: value for key, value in scalars.items() if key not in ("run", "rung", "seed", "name")},
    }
