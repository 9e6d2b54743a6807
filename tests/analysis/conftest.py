"""Planted ladders: runs whose law, shape and noise are known."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.laws import PowerLaw


@dataclass(frozen=True, kw_only=True)
class PlantedRun:
    """Enough of a run record for the analysis, with a byte-level loss that follows a power law in compute."""

    run: str
    rung: str
    seed: int
    plan: dict
    trajectory: pd.DataFrame
    role: str = "rung"
    family: str = "planted"
    state: str = "finished"

    @property
    def config(self) -> dict:
        return {"seed": self.seed, "vocab_size": 256}

    @property
    def config_hash(self) -> str:
        return f"{self.rung}-{self.seed}"


LAW = PowerLaw(floor=0.6, amplitude=1.5, exponent=0.14)
"""In units of the smallest rung's compute: 2.1, 1.84, 1.61, 1.43 nats at 1, 4, 16, 64 times."""
SIZES = {"d32": 1.0, "d64": 4.0, "d96": 16.0, "d128": 64.0}
HERO_FLOPS = 400.0


def planted_run(
    name: str,
    flops: float,
    *,
    seed: int,
    steps: int,
    noise: float = 0.04,
    run_noise: float = 0.002,
    role: str = "rung",
) -> PlantedRun:
    rng = np.random.default_rng([seed, int(1000 * flops)])
    step = np.arange(1, steps + 1)
    progress = step / steps
    final = float(LAW.value(flops)) * np.exp(run_noise * rng.standard_normal())
    shape = 1.0 + 0.2 * (1.0 + 0.03 * np.log(flops)) * ((progress + 0.003) ** -0.5 - 1.003**-0.5)
    loss = np.minimum(LAW.floor + (final - LAW.floor) * shape, np.log(256))
    active = 1e4 * np.sqrt(flops)
    tokens = 100 * active
    table = pd.DataFrame(
        {
            "step": step,
            "tokens": tokens * progress,
            "train/loss": loss + noise * rng.standard_normal(steps),
            "eval/loss": np.where(
                (steps - step) % max(steps // 20, 1) == 0, loss + 0.002 * rng.standard_normal(steps), np.nan
            ),
            "train/grad_norm": (0.3 + 0.5 * np.exp(-progress / 0.1)) * np.exp(0.2 * rng.standard_normal(steps)),
            "moe/drop_fraction": 0.1 * np.exp(-progress / 0.05) + 0.01 * rng.random(steps),
        }
    )
    plan = {
        "flops": flops * 1e12, "num_params": 2 * active, "num_active_params": active, "tokens": tokens,
        "steps": steps, "seq_len": 256, "tokens_per_step": tokens / steps,
    }  # fmt: skip
    return PlantedRun(run=name, rung=name.split("-")[0], seed=seed, plan=plan, trajectory=table, role=role)


def planted_ladder(
    seed: int = 0, *, steps: tuple[int, ...] = (300, 400, 550, 800), noise: float = 0.04
) -> list[PlantedRun]:
    runs = [
        planted_run(name, flops, seed=10 * seed, steps=count, noise=noise)
        for (name, flops), count in zip(SIZES.items(), steps, strict=True)
    ]
    repeats = [planted_run(f"d32-seed{k}", 1.0, seed=10 * seed + k, steps=steps[0], noise=noise) for k in (1, 2)]
    return runs + repeats


def curves_of(runs: list[PlantedRun], metric: str) -> pd.DataFrame:
    tables = []
    for run in runs:
        rows = run.trajectory[["tokens", metric]].dropna()
        progress = rows["tokens"] / run.plan["tokens"]
        tables.append(pd.DataFrame({"run": run.run, **run.plan, "progress": progress, "loss": rows[metric]}))
    return pd.concat(tables, ignore_index=True)


def peers_of(runs: list[PlantedRun]) -> pd.DataFrame:
    return pd.concat([run.trajectory.assign(run=run.run) for run in runs], ignore_index=True)


@pytest.fixture
def ladder() -> Callable[..., list[PlantedRun]]:
    return planted_ladder


@pytest.fixture
def hero() -> Callable[..., PlantedRun]:
    def build(seed: int = 0, *, steps: int = 1200, noise: float = 0.04) -> PlantedRun:
        return planted_run("hero", HERO_FLOPS, seed=7000 + seed, steps=steps, noise=noise, role="hero")

    return build


@pytest.fixture
def curves() -> Callable[[list[PlantedRun], str], pd.DataFrame]:
    return curves_of


@pytest.fixture
def peers() -> Callable[[list[PlantedRun]], pd.DataFrame]:
    return peers_of


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of public runs; its tests are skipped where it is not set."""
    folder = os.environ.get("RUNGWISE_REFERENCE_DATA")
    if not folder:
        pytest.skip("RUNGWISE_REFERENCE_DATA is not set: public reference runs are not here")
    return Path(folder)
