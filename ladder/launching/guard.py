"""What is asked before a run starts: is it the run that was forecast, does it fit the disk, how long will it take.

Imports no jax.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rungwise.analysis.registry import load_registered
from rungwise.analysis.source import RunRecord, load_run
from rungwise.ladder.changing.course import course_of, load_events, plan_course
from rungwise.ladder.console import duration, log
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import CONFIG_FILE, family_folder, forecasts_folder, make_folder, run_folder
from rungwise.ladder.recording.journal import append_event
from rungwise.ladder.recording.kept import kept_fractions
from rungwise.ladder.tables import quantity

ENGINEERING: Final = "-engineering"
"""What is added to a run's name for a few steps of its real configuration."""
STATE_COPIES: Final = 3
"""Values a checkpoint holds for each parameter, at most: itself and Adam's two moments."""
RECORD_BYTES: Final = 20_000
"""Of the journal and of its mirror's database, per step: 5 and 15 kB of 110 metrics, measured on `tiny`."""
WARM: Final = 0.25
"""Share of a run's steps, the first ones, whose speed does not count."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a run will take from its start."""

    seconds: float
    tokens_per_second: float
    basis: str
    """Which run's measured speed this comes from."""
    price: float | None
    """In the currency of the hourly price, if one was given."""

    def __str__(self) -> str:
        price = "" if self.price is None else f", {self.price:,.2f} at the hourly price given"
        return f"about {duration(self.seconds)}{price} at {quantity(self.tokens_per_second)} tokens/s ({self.basis})"


def check_start(
    todo: Sequence[RunConfig], *, home: Path, anyway: bool = False, price_per_hour: float | None = None
) -> None:
    """Refuses what should not start, and says how long the hero will take.

    Raises:
        ValueError: the hero's plan is not the one its forecast was registered for, or the disk is too small.
    """
    check_disk(todo, home=home)
    for config in todo:
        if config.role != "hero":
            continue
        check_forecast_plan(config, home=home, anyway=anyway)
        estimate = estimate_run(config, home=home, price_per_hour=price_per_hour)
        if estimate is not None:
            log(f"{config.run}: {estimate}")


def check_forecast_plan(config: RunConfig, *, home: Path, anyway: bool = False) -> None:
    """Holds the hero's plan against the one its registered forecast was made for.

    Args:
        anyway: let it start; an event of the run says where they differ, and is consent for its later attempts.
    Raises:
        ValueError: they differ; names the fields.
    """
    forecast = load_registered(forecasts_folder(home, config.family))
    if forecast is None:
        return
    folder = run_folder(home, config.family, config.run)
    events = load_events(folder)
    differing = plan_differences(forecast.target, vars(plan_course(course_of(config, events))))
    if not differing:
        return
    said = ", ".join(f"{name} {old} there, {new} here" for name, (old, new) in differing.items())
    reason = f"started although its plan is not the forecast's: {said}"
    if any(event["kind"] == "note" and event.get("reason") == reason for event in events):
        return
    if not anyway:
        raise ValueError(
            f"the forecast {forecast.hash[:12]} of {config.run} was registered for another plan: {said}; restore that"
            " plan, forecast again in another home, or start it with --anyway"
        )
    append_event(make_folder(folder), "note", 0, reason=reason, forecast=forecast.hash)


def plan_differences(target: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of the plan that both have, with the forecast's value and the run's where they differ."""
    return {name: (target[name], plan[name]) for name in target if name in plan and target[name] != plan[name]}


def check_disk(todo: Sequence[RunConfig], *, home: Path) -> None:
    """
    Raises:
        ValueError: the runs need more disk than is free.
    """
    needed = sum(disk_bytes(config, run_folder(home, config.family, config.run)) for config in todo)
    free = shutil.disk_usage(home).free
    if needed > free:
        raise ValueError(
            f"{len(todo)} run(s) need up to {quantity(needed)}B of disk and {quantity(free)}B are free at {home};"
            " free some, lower checkpoint.keep, or choose another --home"
        )


def disk_bytes(config: RunConfig, folder: Path) -> int:
    """What a run writes at most beyond what it has: checkpoints, one more while it saves, and records."""
    plan = plan_course(course_of(config))
    width = {"float32": 4, "bfloat16": 2}[config.execution.param_dtype]
    checkpoints = config.checkpoint.keep + 1 + len(kept_fractions(folder))
    whole = checkpoints * STATE_COPIES * width * plan.num_params + RECORD_BYTES * plan.steps
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
    return max(0, whole - there)


def estimate_run(config: RunConfig, *, home: Path, price_per_hour: float | None = None) -> Estimate | None:
    """Time to finish by what was measured: the run itself, its qualification, else the largest finished rung's FLOPs.

    None where nothing was measured.
    """
    folder = run_folder(home, config.family, config.run)
    course = course_of(config, load_events(folder))
    plan = plan_course(course)
    own = _first_speed(folder, folder.with_name(config.run + ENGINEERING))
    if own is not None:
        record, speed = own
    else:
        rungs = _finished_rungs(home, config.family)
        if not rungs:
            return None
        record = max(rungs, key=lambda rung: rung.plan["flops"])
        ratio = (record.plan["flops_with_head"] / record.plan["tokens"]) / (plan.flops_with_head / plan.tokens)
        speed = _speed(record) * ratio
    seen = float(record.trajectory.frame["tokens"].to_numpy(float).max()) if record.run == config.run else 0.0
    seconds = (plan.tokens - seen) / speed
    price = None if price_per_hour is None else price_per_hour * seconds / 3600
    basis = f"measured on {record.run}" if own else f"from the FLOPs per second of {record.run}"
    return Estimate(seconds=seconds, tokens_per_second=speed, basis=basis, price=price)


def _first_speed(*folders: Path) -> tuple[RunRecord, float] | None:
    """The first of these runs that has logged speeds, and its speed."""
    for folder in folders:
        if (folder / CONFIG_FILE).exists():
            record = load_run(folder)
            if "perf/tokens_per_second" in record.trajectory.frame:
                return record, _speed(record)
    return None


def _finished_rungs(home: Path, family: str) -> list[RunRecord]:
    paths = (family_folder(home, family) / "runs").glob(f"*/{CONFIG_FILE}")
    records = (load_run(path.parent) for path in paths)
    return [record for record in records if record.role == "rung" and record.state == "finished"]


def _speed(record: RunRecord) -> float:
    """Median tokens per second after warming up."""
    speeds = record.trajectory.frame["perf/tokens_per_second"].dropna().to_numpy(float)
    return float(np.median(speeds[int(WARM * speeds.size) :]))
