"""Public runs as a watch would meet them, healthy and not: tables with columns step, metrics by name.

RUNGWISE_REFERENCE_DATA names the folder; sources and licences stand beside the data.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.benchmarks.trajectory import marin
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.forecast import Forecast, forecast_final

MAX_PEERS: Final = 4
"""Smaller runs a run is judged with, as on a ladder of four rungs."""
TUNED_REPEATS: Final = 19
"""Of the 38 repeats, those that the level rule's constants were tuned on; likewise every fourth chess curve."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched:
    """One run and what it is judged with."""

    name: str
    table: pd.DataFrame
    peers: pd.DataFrame | None = None
    diverged: bool = False
    tuned: bool = False
    """Whether constants were chosen while looking at this run."""


def xlstm(folder: Path) -> Iterator[Watched]:
    """Every run of the three families, each with up to four next smaller healthy ones, a row per 50 steps."""
    runs: Any = pd.read_csv(folder / "xlstm_runs" / "runs.csv")
    for source, group in runs.groupby("src"):
        path = folder / "xlstm_runs" / f"curves_{source}.csv.gz"
        if not path.exists():
            continue
        curves: dict[str, Any] = {
            str(name): rows.rename(columns={"_step": "step", "loss_mean": "train/loss", "gn_mean": "train/grad_norm"})[
                ["step", "train/loss", "train/grad_norm"]
            ].reset_index(drop=True)
            for name, rows in pd.read_csv(path).sort_values(["id", "_step"]).groupby("id")
        }
        group = group[group["id"].isin(curves)].sort_values("num_params")
        for position, run in enumerate(group.to_dict("records")):
            if run["incomplete"] and not run["diverged"]:
                continue
            smaller = group[(group["num_params"] < run["num_params"]) & ~group["diverged"] & ~group["incomplete"]]
            peers = [curves[name].assign(run=name) for name in smaller["id"].tail(MAX_PEERS)]
            yield Watched(
                name=run["id"], table=curves[run["id"]], diverged=bool(run["diverged"]),
                peers=pd.concat(peers, ignore_index=True) if peers else None,
                tuned="llama_ctx2048" in str(source) and position % 6 == 0,
            )  # fmt: skip


@lru_cache(maxsize=1)
def llmc(folder: Path) -> pd.DataFrame:
    """The whole log of GPT-2 124M: step from 1, training loss, gradient norm."""
    table: Any = pd.read_csv(folder / "modded_nanogpt" / "llmc_gpt2_124m_train.csv.gz")
    return pd.DataFrame(
        {"step": table["step"] + 1, "train/loss": table["train_loss"], "train/grad_norm": table["grad_norm"]}
    )


def repeats(folder: Path) -> Iterator[Watched]:
    """38 repeats of one configuration, one rank's loss."""
    table: Any = pd.read_csv(folder / "modded_nanogpt" / "train_loss_per_step_38seeds_ve1204.csv.gz")
    for index, (name, rows) in enumerate(table.groupby("run")):
        run = pd.DataFrame({"step": rows["step"].to_numpy(), "train/loss": rows["train_loss"].to_numpy()})
        yield Watched(name=str(name), table=run, tuned=index < TUNED_REPEATS)


def collapsing(folder: Path, task: str, *, metric: str = "train/loss") -> Iterator[Watched]:
    """The 40 curves of one supercollapse task, test loss on a fixed set taken for `metric`."""
    table: Any = pd.read_csv(folder / "supercollapse" / f"{task}.csv.gz")
    for index, (name, rows) in enumerate(table[table["step"] > 0].sort_values(["run", "step"]).groupby("run")):
        run = pd.DataFrame({"step": rows["step"].to_numpy(), metric: rows["test_loss"].to_numpy()})
        yield Watched(name=f"{task} {name}", table=run, tuned=task == "chess" and index % 4 == 0)


def olmo(folder: Path, *, offset: dict[str, float] | None = None) -> Iterator[Watched]:
    """Ladder and heroes of OLMo 2: eleven subsets, their mean as `eval/loss`. `offset` is added from half way on."""
    table: Any = pd.read_csv(folder / "olmo_ladder" / "ladder_eval_curves.csv.gz")
    names = {
        column: column.removeprefix("eval/").split("-validation")[0]
        for column in table.columns
        if column.endswith("-validation/CrossEntropyLoss")
    }
    for name, rows in table.sort_values("_step").groupby("run"):
        rows = rows.drop_duplicates("_step").dropna(subset=list(names))
        if len(rows) < 20:
            continue
        run = pd.DataFrame({"step": rows["_step"].astype(int).to_numpy()})
        for column, subset in names.items():
            late = run["step"] > run["step"].iloc[-1] / 2
            run[f"eval/{subset}/loss"] = rows[column].to_numpy() + late * (offset or {}).get(subset, 0.0)
        run["eval/loss"] = run.filter(like="eval/").mean(axis=1)
        yield Watched(name=str(name), table=run)


def reference_hero(folder: Path) -> tuple[pd.DataFrame, Forecast]:
    """The hero's evaluations up to 40 % of its tokens, and the forecast from its four rungs, floor 1.5 as its team's.

    Columns step, tokens, eval/loss.
    """
    case = marin(folder)
    ends: Any = case.rungs.sort_values("progress").groupby("run").tail(1)
    forecast = forecast_final(ends, case.target, floor=1.5, floor_reason="the reference team's")
    forecast = forecast.with_curve(forecast_curve(case.rungs, case.target, final=forecast), metric="eval/loss")
    rows: Any = case.truth[case.truth["progress"] >= 0.05]
    steps = (rows["progress"].to_numpy() * case.target["steps"]).round().astype(int)
    tokens = rows["progress"].to_numpy() * case.target["tokens"]
    return pd.DataFrame({"step": steps, "tokens": tokens, "eval/loss": rows["loss"].to_numpy()}), forecast


def own_forecast(table: pd.DataFrame, until: int, *, horizon: int) -> Forecast:
    """What a run's own steps before `until` say of the rest: L = E + A t^-alpha, least squares over log-spaced means.

    The band is three deviations of the single steps; no slope error is given, so the default for curves without one
    is taken.
    """
    rows: Any = table[(table["step"] > 0.05 * until) & (table["step"] < until)]
    step, loss = (rows[name].to_numpy(dtype=float) for name in ("step", "train/loss"))
    group = np.floor(40.0 * np.log(step / step[0]) / math.log(step[-1] / step[0])).astype(int)
    x = np.array([step[group == each].mean() for each in np.unique(group)])
    y = np.array([loss[group == each].mean() for each in np.unique(group)])
    best: tuple[float, Any, float] | None = None
    for exponent in np.geomspace(0.05, 1.0, 40):
        columns = np.stack([np.ones_like(x), x**-exponent], axis=1)
        found = np.linalg.lstsq(columns, y, rcond=None)[0]
        miss = float(np.sum((y - columns @ found) ** 2))
        if best is None or miss < best[0]:
            best = (miss, found, float(exponent))
    assert best is not None
    _, (floor, amplitude), exponent = best
    progress = np.geomspace(step[0] / horizon, 1.0, 400)
    middle = floor + amplitude * (progress * horizon) ** -exponent
    half = 3.0 * float(np.std(loss - floor - amplitude * step**-exponent))
    curve = pd.DataFrame({"progress": progress, "loss": middle, "low": middle - half, "high": middle + half})
    points = [{"run": f"to {part:.0%}", "flops": part, "loss": float(floor + amplitude * (part * until) ** -exponent)}
              for part in (0.25, 0.5, 0.75, 1.0)]  # fmt: skip
    target = {"flops": horizon / until * 1.001, "steps": horizon}
    return forecast_final(points, target).with_curve(curve, metric="train/loss")
