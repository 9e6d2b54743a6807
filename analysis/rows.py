"""A plain table of runs, checked row by row: what is used, what is refused and why, what is a copy.

Columns known here: run, loss, flops, flops_with_head, tokens, the counts of parameters of `SIZE_COUNTS`, and, each
optional, state, progress (share of the horizon reached), decay_complete, loss_correction and loss_error (nats), steps,
tokens_per_step, config_hash, seed. Any other column is a condition (`conditions.py`).
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.fitting.fit import fit_law
from rungwise.analysis.vocabulary import decode_number

MAX_LOSS: Final = 100.0
"""Nats per token; a uniform guess over a vocabulary of 10^9 costs 21."""
COUNT_FACTOR: Final = 50.0
"""Compute and 6 * parameters * tokens agree within this factor (head, attention, experts), or a unit is wrong."""
MIN_TOKENS_PER_PARAM: Final = 0.01
FINISHED: Final = 0.999
"""Share of the horizon from which a run counts as finished."""
ODD_SPREADS: Final = 8.0
ODD_SHARE: Final = (0.02, 0.05)
"""A run is odd when it lies this share of the loss off the law of the others (within their range; at its ends) and
`ODD_SPREADS` of their spreads."""
MIN_FOR_ODD: Final = 6
SIZE_COUNTS: Final = (
    ("num_active_params", "num_active_params_everything"),
    ("num_params", "num_params_without_embedding"),
)
"""Counts of parameters, each pair once with and once without embedding and head: of what one token uses (without,
everything) and of the whole model (everything, without). A fit is in one count; the first pair shared is used."""
_SIZES: Final = ("num_active_params", "num_params", "num_params_without_embedding", "num_active_params_everything")
_READERS: Final = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".pq": pd.read_parquet}


def load_points(source: str | Path | pd.DataFrame) -> pd.DataFrame:
    """A table of runs from a CSV, Parquet or JSON-lines file, or the frame itself.

    Raises:
        ValueError: the file is missing, of another kind, empty, or has no loss column.

    >>> load_points(pd.DataFrame({"flops": [1e18], "loss": [3.5]})).shape
    (1, 2)
    """
    if isinstance(source, pd.DataFrame):
        return source
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"points {path} is no file; give a CSV, Parquet or JSON-lines file with a column loss")
    reader = _READERS.get(path.suffix)
    if reader is None and path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"points {path.name} ends in {path.suffix!r}; give .csv, .parquet or .jsonl")
    table: Any
    try:
        table = reader(path) if reader else pd.read_json(path, lines=path.suffix == ".jsonl")
    except (ValueError, OSError) as error:
        raise ValueError(f"points {path.name} cannot be read: {str(error).splitlines()[0]}") from error
    if table.empty or "loss" not in table.columns:
        raise ValueError(f"points {path.name} has {len(table)} rows and columns {list(table.columns)}; it needs loss")
    return table


def usable_points(
    points: Any, *, size: str | None = None
) -> tuple[pd.DataFrame, list[dict[str, str]], list[dict[str, str]]]:
    """Checked rows of a plain table: (usable, refused with reasons, merged copies).

    Copies are rows of one config hash and seed, or without hashes rows whose compute, loss and seed are
    equal. Without a flops column, flops = 6 * parameters * tokens, parameters counted as `size` says, else active where
    known. A correction in the table is added to the loss and is zero from then on; its error stays beside it.

    Raises:
        ValueError: no loss column, no compute, or columns whose units cannot be right.
    """
    table: Any = points.copy() if isinstance(points, pd.DataFrame) else pd.DataFrame(list(points))
    refused = [dict(item) for item in table.attrs.get("refused", ())]
    merged = [dict(item) for item in table.attrs.get("merged", ())]
    if "loss" not in table.columns:
        raise ValueError(f"points have columns {list(table.columns)} and no 'loss'; add the final loss of each run")
    if "run" not in table.columns:
        table["run"] = [f"row {index}" for index in range(len(table))]
    table["loss"] = _numbers(table["loss"])
    table["flops"] = _numbers(table["flops"]) if "flops" in table.columns else _flops_of(table, size)
    kept, seen = [], {}
    for index, row in enumerate(table.to_dict("records")):
        name, reason = str(row["run"]), _row_refusal(row)
        key = _identity(row)
        if reason is not None:
            refused.append({"run": name, "reason": reason})
        elif key in seen:
            merged.append({"run": name, "into": seen[key]})
        else:
            seen[key] = name
            kept.append(index)
    usable = _corrected(table.iloc[kept].reset_index(drop=True))
    _refuse_units(usable)
    return usable, refused, merged


def loss_refusal(loss: float | None) -> str | None:
    """Why this final loss cannot be fitted, or None."""
    if loss is None or math.isnan(loss):
        return "final loss is missing or NaN"
    if not 0.0 < loss <= MAX_LOSS:
        return f"final loss {loss:g} is not between 0 and {MAX_LOSS:g} nats per token"
    return None


def odd_runs(table: Any) -> list[dict[str, str]]:
    """Runs far off the law of all the others in compute, one at a time, the worst first: {"run", "reason"}.

    Only with `MIN_FOR_ODD` runs or more: with fewer, any run may be the odd one.
    """
    found: list[dict[str, str]] = []
    rest = table.sort_values("flops", ignore_index=True)
    while rest["flops"].nunique() >= MIN_FOR_ODD:
        flops, loss = (rest[key].to_numpy(dtype=float) for key in ("flops", "loss"))
        misses = np.array([_miss_of(index, flops, loss) for index in range(len(rest))])
        worst = int(np.argmax(np.abs(misses)))
        if misses[worst] == 0.0:
            return found
        row = rest.iloc[worst]
        reason = f"final loss {row['loss']:.4g} is {100 * misses[worst]:+.1f}% off the law of the other runs"
        found.append({"run": str(row["run"]), "reason": reason})
        rest = rest.drop(index=worst).reset_index(drop=True)
    return found


def _miss_of(index: int, flops: np.ndarray, loss: np.ndarray) -> float:
    """Log miss of one run by the robust law of the others where it counts as odd, else zero."""
    others = np.arange(loss.size) != index
    if np.unique(flops[others]).size < MIN_FOR_ODD - 1:
        return 0.0
    fit = fit_law(flops[others], loss[others], delta=0.003)
    spread = 1.4826 * float(np.median(np.abs(fit.residuals)))
    inside = flops[others].min() < flops[index] < flops[others].max()
    miss = math.log(loss[index] / float(fit.law.value(flops[index])))
    limit = max(ODD_SHARE[0] if inside else ODD_SHARE[1], ODD_SPREADS * spread)
    return miss if abs(miss) > limit else 0.0


def target_flops(target: Mapping[str, Any], *, size: str | None = None) -> float:
    """Training compute of the target, from its own record or 6 * parameters * tokens, as in `usable_points`.

    Raises:
        ValueError: neither is known, or the value is not positive.
    """
    flops = target.get("flops")
    if flops is None:
        flops = _flops_of(pd.DataFrame([dict(target)]), size).iloc[0]
    if not math.isfinite(float(flops)) or float(flops) <= 0:
        raise ValueError(f"target flops {flops} must be positive; give 'flops', or 'num_params' and 'tokens'")
    return float(flops)


def shared_counts(columns: Iterable[str], target: Mapping[str, Any]) -> tuple[str, ...]:
    """The counts of parameters, one or two of one pair, that the points' columns and the target both state.

    >>> shared_counts(["num_params", "num_params_without_embedding"], {"num_params": 7e9})
    ('num_params',)
    """
    known = set(columns) & stated_counts(target)
    return next((found for pair in SIZE_COUNTS if (found := tuple(name for name in pair if name in known))), ())


def stated_of_all(table: Any) -> tuple[str, ...]:
    """The counts of parameters, one or two of one pair, that every run of the table states.

    >>> stated_of_all(pd.DataFrame({"num_params": [1e9, 2e9], "num_params_without_embedding": [9e8, np.nan]}))
    ('num_params',)
    """
    known = {name for name in _SIZES if name in table.columns and np.isfinite(_numbers(table[name])).all()}
    return next((found for pair in SIZE_COUNTS if (found := tuple(name for name in pair if name in known))), ())


def stated_counts(target: Mapping[str, Any]) -> set[str]:
    """The counts of parameters a target states."""
    return {name for name in _SIZES if not math.isnan(number := _number(target.get(name))) and number != 0}


def refuse_other_size(columns: Iterable[str], target: Mapping[str, Any]) -> None:
    """Parameters in different counts are never compared.

    Raises:
        ValueError: points and target both state parameters, and no count in common.
    """
    points, wanted = [name for name in _SIZES if name in set(columns)], stated_counts(target)
    if points and wanted and not wanted & set(points):
        raise ValueError(
            f"the target's parameters are counted as {' and '.join(sorted(wanted))}, the points' as "
            f"{' and '.join(points)}; give both in the same count, or both counts"
        )


def _row_refusal(row: Mapping[str, Any]) -> str | None:
    if (reason := loss_refusal(row["loss"])) is not None:
        return reason
    if not (math.isfinite(row["flops"]) and row["flops"] > 0):
        return "compute (flops) is missing or not positive"
    if isinstance(state := row.get("state"), str) and state not in ("", "finished"):
        return f"run is {state}, not finished"
    if math.isfinite(_number(row.get("loss_correction"))) and math.isfinite(_number(row.get("loss_error"))):
        return None  # unfinished, with what is missing and its error stated
    progress = _number(row.get("progress"))
    if progress < FINISHED:
        return f"only {progress:.0%} of the horizon was reached; state loss_correction and loss_error to use it"
    if row.get("decay_complete") is not None and row["decay_complete"] in (False, 0, "False", "false"):
        return "the learning rate's decay was not completed; state loss_correction and loss_error to use it"
    tokens, steps, batch = (_number(row.get(key)) for key in ("tokens", "steps", "tokens_per_step"))
    if tokens > 1.01 * steps * batch:
        return f"tokens {tokens:.4g} exceed {steps:.4g} steps of {batch:.4g}: take them from the trainer's counter"
    return None


def _corrected(table: Any) -> pd.DataFrame:
    if "loss_correction" not in table.columns:
        return table
    correction = _numbers(table["loss_correction"])
    return table.assign(loss=table["loss"] + correction.fillna(0.0), loss_correction=correction * 0.0)


def _refuse_units(table: Any) -> None:
    """Stops on columns that cannot be what they are called.

    Raises:
        ValueError: an empty or constant column of sizes, or tokens that look like steps.
    """
    sizes = [key for key in _SIZES if key in table.columns]
    for key in [*sizes, "tokens"] if len(table) else []:
        if key in table.columns and not np.isfinite(_numbers(table[key])).any():
            raise ValueError(
                f"column {key} of the points is empty; fill it from the runs' own records, or leave it out"
            )
    if not sizes or "tokens" not in table.columns:
        return
    size, tokens = _numbers(table[sizes[0]]), _numbers(table["tokens"])
    if len(table) > 2 and size.nunique() == 1 and tokens.nunique() == 1 and table["flops"].nunique() > 1:
        raise ValueError(f"{sizes[0]} and tokens are the same on every run while flops vary; one column is a default")
    ratio = tokens / size
    if (low := ratio.min()) < MIN_TOKENS_PER_PARAM:
        run = table["run"].iloc[int(np.nanargmin(ratio))]
        raise ValueError(f"run {run} has {low:.2g} tokens per parameter: are its tokens steps, or in millions?")
    factor = np.abs(np.log(table["flops"] / (6.0 * size * tokens)))
    if factor.max() > math.log(COUNT_FACTOR):
        run = table["run"].iloc[int(np.nanargmax(factor))]
        times = math.exp(float(factor.max()))
        raise ValueError(f"flops and 6 * {sizes[0]} * tokens of run {run} differ {times:.2g} times: a unit is wrong")


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    config = row.get("config_hash")
    if isinstance(config, str) and config:
        return (config, row.get("seed"))
    return (row["flops"], row["loss"], row.get("seed"))


def _numbers(column: Any) -> Any:
    return pd.Series([_number(value) for value in column], index=column.index, dtype=float)


def _number(value: Any) -> float:
    try:
        return decode_number(value)
    except (TypeError, ValueError):
        return math.nan


def _flops_of(table: Any, size: str | None) -> Any:
    size = size or next((name for name in _SIZES if name in table.columns), "num_params")
    if size not in table.columns or "tokens" not in table.columns:
        raise ValueError("points have no 'flops', nor 'num_params' and 'tokens' to derive it from; add a column")
    return 6.0 * _numbers(table[size]) * _numbers(table["tokens"])
