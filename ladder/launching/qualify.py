"""Qualification: a few steps of a run's real configuration, to see its speed, memory and drops before it counts.

The steps are a run of their own, `<run>-engineering`, whose role keeps it out of ladder, forecast and watch. It is
taken afresh every time.
"""

import resource
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from rungwise.analysis.source import load_run
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import make_folder, resolve_tracking, run_folder
from rungwise.ladder.launching.guard import ENGINEERING
from rungwise.ladder.training.backend import prepare_backend

WARMUP_SHARE: Final = 0.25
"""Of the steps, the first, which do not count: caches fill and the first drops are the initialisation's."""
STAMP: Final = "engineering only: no quality or drop figure of the run"


def qualify(family: str, *, steps: int, home: Path, run: str = "hero", tracking: str | None = None) -> dict[str, Any]:
    """Runs `steps` steps and returns speed, memory and drops.

    Raises:
        ValueError: an unknown run, more steps than it has, or too few to measure.
    """
    config = _engineering_config(family, run, steps)
    folder = run_folder(home, config.family, config.run)
    shutil.rmtree(folder, ignore_errors=True)
    cache = make_folder(home) / "cache"
    prepare_backend(threads=config.threads, cache=cache)
    from rungwise.ladder.training.train import train_run

    train_run(config, folder, cache=cache, tracking=resolve_tracking(home, tracking), stop_after=steps)
    frame = load_run(folder).trajectory.frame
    counted = frame.iloc[int(np.ceil(WARMUP_SHARE * len(frame))) :]
    speed = float(counted["perf/tokens_per_second"].median())
    return {
        "run": config.run,
        "stamp": STAMP,
        "steps": steps,
        "measured_steps": len(counted),
        "tokens_per_second": speed,
        "seconds_per_step": config.tokens_per_step / speed,
        "mfu": float(counted["perf/mfu"].median()),
        "drop_fraction": float(counted["moe/drop_fraction"].mean()),
        "drop_fraction_worst_layer": float(counted["moe_worst_layer/drop_fraction"].max()),
        "memory_bytes": _memory_bytes(),
        "whole_run_seconds": config.tokens / speed,
    }


def _engineering_config(family: str, run: str, steps: int) -> RunConfig:
    runs = {config.run: config for config in load_family(family).runs}
    if run not in runs:
        raise ValueError(f"run {run!r} is not in family {family}; its runs are {', '.join(runs)}")
    config = runs[run]
    if not 2 <= steps <= config.steps:
        raise ValueError(f"--steps {steps}: a qualification of {run} takes 2 to {config.steps} steps")
    return config.replace(run=run + ENGINEERING, role="engineering")


def _memory_bytes() -> int:
    """Peak memory of the device where it tells, else of this process."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(stats.get("peak_bytes_in_use", peak * (1 if sys.platform == "darwin" else 1024)))
