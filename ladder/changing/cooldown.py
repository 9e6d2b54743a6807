"""Cooldowns of the rungs: short branches that decay to the end, so that the ladder can price other horizons.

A ladder has one number of tokens a parameter; a branch that ends at a share of a rung's horizon has that share of it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from rungwise.analysis.source import RunRecord
from rungwise.ladder.changing.branch import COOLDOWN_SHARE, begin_branch, branch_config, load_course, load_run_config
from rungwise.ladder.console import log
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.home import family_folder, resolve_tracking, run_folder
from rungwise.ladder.launching.slurm import JobOptions, Task, submit_tasks, submitted_jobs
from rungwise.ladder.launching.status import run_status
from rungwise.ladder.mesh.processes import find_processes, first_alone
from rungwise.ladder.predict import FamilyRuns
from rungwise.ladder.recording.kept import keep_at, step_at
from rungwise.ladder.training.backend import prepare_backend

NEAR: Final = 0.025
"""Shares of the horizon this close count as the same: steps round, and rungs are short."""
_PART = re.compile(r"\s*(\d*\.?\d+)\s*(?:-\s*(\d*\.?\d+)\s*)?")


class Cooldown(NamedTuple):
    """From where to where a branch decays, as shares of its parent's horizon."""

    start: float
    end: float

    @property
    def text(self) -> str:
        """As `parse_cooldowns` takes it."""
        return f"{self.start:.9g}-{self.end:.9g}"

    def name(self, run: str) -> str:
        """Of the branch of a run: `d64-cooldown40`, or `d64-cooldown20to60` where the end was given."""
        first, last = (f"{100 * share:.4g}".replace(".", "_") for share in self)
        given = abs(self.end - self.start - COOLDOWN_SHARE) > 1e-9
        return f"{run}-cooldown{first}to{last}" if given else f"{run}-cooldown{first}"


def parse_cooldowns(text: str) -> tuple[Cooldown, ...]:
    """`0.4,0.6` starts there and takes a tenth of the horizon; `0.2-0.6` starts at 0.2 and ends at 0.6.

    Raises:
        ValueError: not shares, or a branch that ends before it starts.

    >>> parse_cooldowns("0.4,0.2-0.6")
    (Cooldown(start=0.4, end=0.5), Cooldown(start=0.2, end=0.6))
    """
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"--cooldowns {part!r} is no share of the run; give such as 0.4,0.6 or 0.2-0.6")
        start = float(match[1])
        end = float(match[2]) if match[2] else round(start + COOLDOWN_SHARE, 9)
        if not 0 < start < 1 or not start < end:
            raise ValueError(f"--cooldowns {part!r}: a branch starts between 0 and 1 and ends after that")
        found.append(Cooldown(start, end))
    return tuple(dict.fromkeys(found))


def begin_cooldown(folder: Path, cooldown: Cooldown) -> RunConfig:
    """The cooldown of a run that has passed its start, ready to train; its config.

    Raises:
        ValueError: the run kept no checkpoint there.
    """
    parent, course = load_run_config(folder), load_course(folder)
    step = step_at(course, cooldown.start)
    tokens = (step_at(course, cooldown.end) - step) * course[0].config.tokens_per_step
    config = branch_config(parent, course, step=step, name=cooldown.name(parent.run), tokens=tokens)
    begin_branch(folder, config)
    return config


def parse_shares(option: str, text: str) -> tuple[float, ...]:
    """`0.3,0.6` as shares of a run.

    Raises:
        ValueError: not numbers between 0 and 1.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < 1 for share in shares):
        raise ValueError(f"{option} {text!r}: give shares of the run between 0 and 1, as 0.3,0.6")
    return shares


def keep_runs(
    family: str, shares: Iterable[float], *, home: Path, runs: tuple[str, ...] | None = None, hero: bool = False
) -> tuple[str, ...]:
    """Asks the named runs, by default all rungs, or the hero for checkpoints to be kept; their names."""
    config = load_family(family)
    wanted = (config.hero_run,) if hero else config.rung_runs
    names = tuple(run.run for run in wanted if runs is None or run.run in runs)
    for name in names:
        keep_at(run_folder(home, config.name, name), shares)
    return names


def run_cooldowns(
    cooldowns: tuple[Cooldown, ...],
    family: str,
    *,
    home: Path,
    runs: tuple[str, ...] | None = None,
    hero: bool = False,
    jobs: JobOptions | None = None,
    **options: Any,
) -> None:
    """Trains the rungs, each keeping what its cooldowns need, and then the cooldowns.

    Args:
        runs: rungs by name; absent: all.
        hero: False; a hero's branch is `early.run_branch`.
        jobs: hand both to Slurm.
        options: of `run_ladder`.
    Raises:
        ValueError, RunFailed: as `run_ladder`; a rung that kept no checkpoint where a cooldown starts.
    """
    from rungwise.ladder.launching.run import run_ladder

    assert not hero
    names = keep_runs(family, [cooldown.start for cooldown in cooldowns], home=home, runs=runs)
    run_ladder(family, home=home, runs=runs, jobs=jobs, **options)
    config = load_family(family)
    if jobs is not None:
        for parent in (run for run in config.rung_runs if run.run in names):
            _submit_cooldowns(cooldowns, parent, home=home, jobs=jobs, tracking=options.get("tracking"))
        return
    folders = [run_folder(home, config.name, name) for name in names]
    branches = _begin([(folder, cooldown) for folder in folders for cooldown in cooldowns], cache=home / "cache")
    run_ladder(family, home=home, runs=tuple(branches), **options)


def _begin(wanted: Sequence[tuple[Path, Cooldown]], *, cache: Path) -> list[str]:
    """Makes the cooldowns' folders, where several processes train one, in the first; their names."""
    if find_processes(os.environ) is None:
        return [begin_cooldown(folder, cooldown).run for folder, cooldown in wanted]
    prepare_backend(threads=load_run_config(wanted[0][0]).threads, cache=cache)
    with first_alone():
        return [begin_cooldown(folder, cooldown).run for folder, cooldown in wanted]


def _submit_cooldowns(
    cooldowns: Iterable[Cooldown], parent: RunConfig, *, home: Path, jobs: JobOptions, tracking: str | None
) -> None:
    """Hands the cooldowns of a run that are not done to Slurm, to begin once the run's own job has done well.

    Jobs of their own rather than more work for the run's: each waits, is seen, requeued and cancelled as any run, and
    they train side by side.

    Raises:
        ValueError: as `submit_tasks`; the run is done and kept no checkpoint where a cooldown starts.
    """
    folder, after = run_folder(home, parent.family, parent.run), None
    named = {cooldown.name(parent.run): cooldown for cooldown in cooldowns}
    todo = {name: cooldown for name, cooldown in named.items() if run_status(folder.with_name(name))["state"] != "done"}
    if run_status(folder)["state"] == "done":
        for cooldown in todo.values():
            begin_cooldown(folder, cooldown)
    else:
        after = {job.run: job.job for job in submitted_jobs(family_folder(home, parent.family))}[parent.run]
    words = ("--rung", parent.run, "--cooldowns")
    tasks = [Task(run=name, words=(*words, cooldown.text)) for name, cooldown in todo.items()]
    name, store = f"{parent.run}-cooldowns", resolve_tracking(home, tracking)
    for job in submit_tasks(tasks, parent, name=name, home=home, tracking=store, options=jobs, after=after):
        log(f"{job.run} is job {job.job}{f', after {after}' if after else ''} (log: {job.log})")


def branch_records(runs: FamilyRuns) -> Iterator[tuple[Cooldown, RunRecord]]:
    """The rungs' finished branches, each with its shares of the rung's planned horizon."""
    planned = {record["name"]: record["tokens"] for record in runs.plan["rungs"]}
    for record in runs.records:
        start = record.config.get("start")
        if record.role == "branch" and record.state == "finished" and start and start["parent"] in planned:
            whole = planned[start["parent"]]
            yield Cooldown(start["tokens"] / whole, record.plan["tokens"] / whole), record


def matching_branches(runs: FamilyRuns, wanted: Cooldown, *, any_start: bool = False) -> list[RunRecord]:
    """The rungs' branches that go from and to the same shares of the horizon, as records of rungs.

    Args:
        any_start: match the end alone; of several of one rung, the one that starts nearest.
    """
    chosen: dict[str, tuple[float, RunRecord]] = {}
    for cooldown, record in branch_records(runs):
        off_start, off_end = abs(cooldown.start - wanted.start), abs(cooldown.end - wanted.end)
        if off_end > NEAR or (off_start > NEAR and not any_start):
            continue
        parent = record.config["start"]["parent"]
        if parent not in chosen or off_start < chosen[parent][0]:
            chosen[parent] = off_start, record
    return [replace(record, role="rung") for _, record in chosen.values()]
