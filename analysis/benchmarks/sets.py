"""Public sets of final losses, each split by its natural hold-out: fit the small runs, forecast the large ones.

A table has columns params, tokens, loss, flops. Sources and licences stand beside the data in the reference folder.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

OLMO_13B: Final = (13202396160, 5.0e12, 2.4379)
"""Parameters, tokens and C4 loss of OLMo 2 13B, the mean of its last five evaluations."""
OLMO_SIZES: Final = {"190M": 190354176, "370M": 371262464, "760M": 758220288, "1B": 1279395840}


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Runs to fit and runs to forecast."""

    name: str
    train: Any
    test: Any

    @property
    def rows(self) -> dict[str, np.ndarray]:
        return {key: self.train[key].to_numpy(dtype=float) for key in ("params", "tokens", "loss", "flops")}

    @property
    def frontier(self) -> "Split":
        """The runs that have a lower loss than every run of no more compute."""
        return Split(name=self.name, train=_frontier(self.train), test=_frontier(self.test))


def reference_folder() -> Path:
    """The folder of public runs.

    Raises:
        ValueError: RUNGWISE_REFERENCE_DATA does not name it.
    """
    folder = os.environ.get("RUNGWISE_REFERENCE_DATA")
    if not folder or not Path(folder).is_dir():
        raise ValueError(f"RUNGWISE_REFERENCE_DATA is {folder!r}; set it to the folder of public reference runs")
    return Path(folder)


def splits(folder: Path) -> Iterator[Split]:
    """Every split of the extrapolation table."""
    epoch = epoch_rows(folder)
    for limit in (1e20, 3e20, 1e21):
        yield at_flops(f"Epoch, C ≤ {limit:.0e}".replace("e+", "e"), epoch, limit)
    yield from _isoflop_splits(folder)
    yield from _gadre_splits(folder)
    yield _xlstm_split(folder)
    yield _olmo_split(folder)


def epoch_rows(folder: Path) -> Any:
    """240 of the 245 rows read off the Chinchilla figure: without the five highest losses."""
    raw: Any = pd.read_csv(folder / "epoch_chinchilla" / "svg_extracted_data.csv")
    raw = raw[raw["loss"] < np.sort(raw["loss"])[-5]]
    return _table(raw["Model Size"], raw["Training FLOP"] / (6 * raw["Model Size"]), raw["loss"], raw["Training FLOP"])


def at_flops(name: str, table: Any, limit: float) -> Split:
    low = table["flops"] <= limit * (1 + 1e-9)
    return Split(name=name, train=table[low], test=table[~low])


def _isoflop_splits(folder: Path) -> Iterator[Split]:
    raw: Any = pd.read_csv(folder / "open_athena_isoflop" / "isoflops_annotated.csv")
    raw = raw[~raw["outlier"].astype(bool)]
    for name, rows in raw.groupby("experiment"):
        if "raw_loss" in str(name):  # the same runs as exp_loss, in other units
            continue
        budgets = np.sort(rows["budget"].unique())
        table = _table(rows["params"], rows["tokens"], rows["loss"], rows["budget"])
        yield at_flops(str(name).replace("__", " "), table, float(budgets[len(budgets) // 2 - 1]))


def _gadre_splits(folder: Path) -> Iterator[Split]:
    raw: Any = pd.read_csv(folder / "gadre_overtraining" / "runs.csv").dropna(subset=["loss_c4_val"])
    for name, rows in raw.groupby("train_dataset"):
        table = _table(rows["params"], rows["tokens"], rows["loss_c4_val"])
        small = table["params"] <= 4.2e8
        yield Split(name=f"Gadre {name}", train=table[small], test=table[~small])


def _xlstm_split(folder: Path) -> Split:
    raw: Any = pd.read_csv(folder / "xlstm_runs" / "runs.csv").query("src == 'isoflop_llama_ctx8192'")
    raw = raw.dropna(subset=["val_loss"])
    table = _table(raw["num_params"], raw["tokens"], raw["val_loss"]).sort_values("flops")
    return Split(name="xLSTM llama ctx8192", train=table.iloc[:54], test=table.iloc[54:])


def _olmo_split(folder: Path) -> Split:
    raw: Any = pd.read_csv(folder / "olmo_ladder" / "ladder_eval_curves.csv.gz")
    (column,) = [name for name in raw.columns if "c4" in name.lower() and "CrossEntropy" in name]
    found = []
    for size, params in OLMO_SIZES.items():
        for multiple in ("1xC", "2xC", "5xC", "10xC"):
            rows = raw[raw["run"] == f"{size}-{multiple}"].dropna(subset=[column, "throughput/total_tokens"])
            last = rows.sort_values("_step").iloc[-1]
            found.append((params, float(last["throughput/total_tokens"]), float(last[column])))
    train, test = np.array(found), np.array([OLMO_13B])
    return Split(name="OLMo ladder → 13B", train=_table(*train.T), test=_table(*test.T))


def _table(params: Any, tokens: Any, loss: Any, flops: Any = None) -> Any:
    columns = {"params": params, "tokens": tokens, "loss": loss}
    table = pd.DataFrame({key: np.asarray(column, dtype=float) for key, column in columns.items()})
    table["flops"] = 6.0 * table["params"] * table["tokens"] if flops is None else np.asarray(flops, dtype=float)
    return table


def _frontier(table: Any) -> Any:
    ordered = table.sort_values(["flops", "loss"])
    best = ordered["loss"].cummin()
    return ordered[(ordered["loss"] <= best) & ~best.duplicated()]
