"""From runs to the points a law is fitted to: one final loss per run by one stated rule, and why a run was
left out.

Rule: the last `eval/loss` at the run's final step, when every usable run has one; else, for all runs alike,
the median of the last ten `train/loss`. Never the last noisy step, never the minimum. Grouping runs into
rungs is `forecast.py`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.vocabulary import decode_number

EVAL_RULE: Final = "last eval/loss, at the final step"
TRAIN_RULE: Final = "median of the last 10 train/loss"
TRAIN_WINDOW: Final = 10
MAX_LOSS: Final = 100.0
"""Nats per token; a uniform guess over a vocabulary of 10^9 costs 21."""
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


def loss_refusal(loss: float | None) -> str | None:
    """Why this final loss cannot be fitted, or None."""
    if loss is None or math.isnan(loss):
        return "final loss is missing or NaN"
    if not 0.0 < loss <= MAX_LOSS:
        return f"final loss {loss:g} is not between 0 and {MAX_LOSS:g} nats per token"
    return None


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


def usable_points(points: Any) -> tuple[pd.DataFrame, list[dict[str, str]], list[dict[str, str]]]:
    """Checked rows of a plain table: (usable, refused with reasons, merged copies).

    Copies are rows of one config hash and seed, or without hashes rows whose compute, loss and seed are
    equal. Without a flops column, flops = 6 * (active) parameters * tokens.
    """
    table = points.copy() if isinstance(points, pd.DataFrame) else pd.DataFrame(list(points))
    refused = [dict(item) for item in table.attrs.get("refused", ())]
    merged = [dict(item) for item in table.attrs.get("merged", ())]
    if "loss" not in table.columns:
        raise ValueError(f"points have columns {list(table.columns)} and no 'loss'; add the final loss of each run")
    if "run" not in table.columns:
        table["run"] = [f"row {index}" for index in range(len(table))]
    table["loss"] = _numbers(table["loss"])
    table["flops"] = _numbers(table["flops"]) if "flops" in table.columns else _flops_of(table)
    kept, seen = [], {}
    for index, row in enumerate(table.to_dict("records")):
        name, reason = str(row["run"]), loss_refusal(row["loss"])
        if reason is None and not (math.isfinite(row["flops"]) and row["flops"] > 0):
            reason = "compute (flops) is missing or not positive"
        key = _identity(row)
        if reason is not None:
            refused.append({"run": name, "reason": reason})
        elif key in seen:
            merged.append({"run": name, "into": seen[key]})
        else:
            seen[key] = name
            kept.append(index)
    return table.iloc[kept].reset_index(drop=True), refused, merged


def target_flops(target: Mapping[str, Any]) -> float:
    """Training compute of the target, from its own record or 6 * (active) parameters * tokens.

    Raises:
        ValueError: neither is known, or the value is not positive.
    """
    flops = target.get("flops")
    if flops is None:
        flops = _flops_of(pd.DataFrame([dict(target)])).iloc[0]
    if not math.isfinite(float(flops)) or float(flops) <= 0:
        raise ValueError(f"target flops {flops} must be positive; give 'flops', or 'num_params' and 'tokens'")
    return float(flops)


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    config = row.get("config_hash")
    if isinstance(config, str) and config:
        return (config, row.get("seed"))
    return (row["flops"], row["loss"], row.get("seed"))


def _numbers(column: Any) -> pd.Series:
    return pd.Series([_number(value) for value in column], index=column.index, dtype=float)


def _number(value: Any) -> float:
    try:
        return decode_number(value)
    except (TypeError, ValueError):
        return math.nan


def _flops_of(table: pd.DataFrame) -> pd.Series:
    size = "num_active_params" if "num_active_params" in table.columns else "num_params"
    if size not in table.columns or "tokens" not in table.columns:
        raise ValueError("points have no 'flops', nor 'num_params' and 'tokens' to derive it from; add a column")
    return 6.0 * _numbers(table[size]) * _numbers(table["tokens"])
