"""The analysis on public runs: figures in shared facts, read from the folder that RUNGWISE_REFERENCE_DATA names."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.divergence import replay


@pytest.fixture(scope="module")
def llmc(reference_data: Path) -> pd.DataFrame:
    table = pd.read_csv(reference_data / "modded_nanogpt" / "llmc_gpt2_124m_train.csv.gz")
    return table.rename(columns={"train_loss": "train/loss", "grad_norm": "train/grad_norm"})


@pytest.mark.slow
def test_healthy_llmc_run_is_quiet_for_19560_steps(llmc: pd.DataFrame):
    assert replay(llmc) == []


@pytest.mark.parametrize(("shift", "median_delay"), [(0.05, 50), (0.10, 20)])
def test_shift_planted_in_the_llmc_run_is_found(llmc: pd.DataFrame, shift: float, median_delay: int):
    delays = []
    for onset in range(5000, 19000, 2500):
        part = llmc.iloc[onset - 700 : onset + 300].copy()
        part.loc[part["step"] >= onset, "train/loss"] += shift
        alerts = [alert for alert in replay(part) if alert.rule == "loss_level"]
        assert all(alert.step >= onset for alert in alerts)
        delays.append(alerts[0].step - onset if alerts else np.inf)
    assert np.median(delays) <= median_delay


def test_repeats_of_a_short_run_are_quiet(reference_data: Path):
    table = pd.read_csv(reference_data / "modded_nanogpt" / "train_loss_per_step_38seeds_ve1204.csv.gz")
    runs = [rows.sort_values("step") for _, rows in table.groupby("run")]
    flagged = [replay(rows.rename(columns={"train_loss": "train/loss"})) for rows in runs[::4]]
    assert sum(map(len, flagged)) == 0


def test_diverged_xlstm_runs_are_found_by_step_400(reference_data: Path):
    folder = reference_data / "xlstm_runs"
    runs: Any = pd.read_csv(folder / "runs.csv").query("src == 'isoflop_mlstm_ctx16384'")
    runs = runs.sort_values("num_params").reset_index(drop=True)
    curves: Any = pd.read_csv(folder / "curves_isoflop_mlstm_ctx16384.csv.gz")
    names = {"_step": "step", "loss_mean": "train/loss", "gn_mean": "train/grad_norm"}
    curves = curves.rename(columns=names).sort_values("step")
    first = {}
    for index, run in runs[runs["diverged"].astype(bool)].iterrows():
        smaller = runs.iloc[: int(index)]
        smaller = smaller[~smaller["diverged"].astype(bool)].tail(15)
        peers = curves[curves["id"].isin(smaller["id"])].rename(columns={"id": "run"})
        first[run["name"]] = replay(curves[curves["id"] == run["id"]], peers=peers)
        healthy = smaller.iloc[-1]
        others = peers[peers["run"] != healthy["id"]]
        assert replay(curves[curves["id"] == healthy["id"]], peers=others) == []
    assert len(first) == 2
    for alerts in first.values():
        assert min(alert.step for alert in alerts) <= 400
        assert any(alert.rule == "not_learning" and alert.severity == "critical" for alert in alerts)
