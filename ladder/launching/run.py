"""Runs a family's ladder or hero: skips what is finished, resumes what is not, side by side where there is room.

One run trains in this process. Several run as children of their own, each with its threads, as many at once as the
machine has cores for; a child that fails does not end the others.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from rungwise.analysis.reading.store import public_address
from rungwise.analysis.reading.tail import FolderTail
from rungwise.analysis.vocabulary import decode_number
from rungwise.ladder.changing.branch import begun_branch
from rungwise.ladder.console import ProgressView, log, one_line
from rungwise.ladder.family import LadderConfig, RunConfig, explain, family_text, load_family
from rungwise.ladder.home import FAMILY_FILE, family_folder, make_folder, resolve_tracking, run_folder
from rungwise.ladder.launching.guard import check_start
from rungwise.ladder.launching.slurm import LOG_VARIABLE, JobOptions, submit_runs
from rungwise.ladder.launching.status import run_status
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.ladder.mesh.processes import find_processes, is_first
from rungwise.ladder.planning.memory import plan_memory
from rungwise.ladder.planning.memory_check import check_device_memory
from rungwise.ladder.recording.tracking import is_mirrored, mirror_folder
from rungwise.ladder.text.data import check_budgets
from rungwise.ladder.training.backend import prepare_backend
from rungwise.ladder.training.preemption import Preempted

POLL_SECONDS = 0.5
CHILD_LOG = "train.log"
PROCESS_BYTES = 1_400_000_000
"""A trainer and its mirror beside what is planned: Python, jax, compiler, allocator and MLflow (docs/log.md)."""
BAD_INPUT = 2
"""Exit code of a child that was given bad input."""


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RunFailed(RuntimeError):
    """A run that began and could not go on; one line that names it and why."""


@dataclass(frozen=True)
class Place:
    """Where a family's runs live and are mirrored to."""

    home: Path
    tracking: str

    def folder(self, config: RunConfig) -> Path:
        return run_folder(self.home, config.family, config.run)

    @property
    def cache(self) -> Path:
        """Tokenised text and compiled programs, shared by all runs; safe to delete."""
        return self.home / "cache"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What runs side by side may take of this machine."""

    cores: int = field(default_factory=usable_cores)
    memory: int | None = None
    """Bytes; None is no limit."""

    def check(self, config: RunConfig) -> None:
        """
        Raises:
            ValueError: the run alone needs more memory than there is.
        """
        if self.memory is not None and bytes_of(config) > self.memory:
            given, needed = (f"{count / 1e9:.3g}" for count in (self.memory, bytes_of(config)))
            raise ValueError(f"--memory {given}GB: run {config.run} alone needs about {needed} GB; raise it")

    def has_room(self, config: RunConfig, running: Sequence[RunConfig]) -> bool:
        """Whether one more run fits beside those that train; one alone always has its cores."""
        together = [config, *running]
        cores = not running or sum(run.threads for run in together) <= self.cores
        return cores and (self.memory is None or sum(map(bytes_of, together)) <= self.memory)


def bytes_of(config: RunConfig) -> int:
    """Memory of a run's processes on this machine: its state, activations and the programs around them."""
    return PROCESS_BYTES + plan_memory(config, device="cpu").total * config.mesh.num_devices


def run_ladder(
    family: str,
    *,
    home: Path,
    runs: tuple[str, ...] | None = None,
    hero: bool = False,
    tracking: str | None = None,
    progress: bool = True,
    jobs: JobOptions | None = None,
    mesh: str | None = None,
    budget: Budget | None = None,
    anyway: bool = False,
    price_per_hour: float | None = None,
) -> None:
    """Trains the named runs, by default every rung's, or the hero.

    Args:
        mesh: changes to the runs' mesh, such as `data=2,expert=4`.
        family: a shipped name or a path.
        runs: run names such as `d64` or `d32-seed1`.
        jobs: hand them to Slurm instead of training here.
        budget: what runs side by side may take of this machine, all of it when absent.
        anyway: start a hero whose plan is not the one its forecast was registered for.
        price_per_hour: of this machine, to say what the hero will cost.
    Raises:
        ValueError: bad input.
        RunFailed: a run failed; the message names it and its log.
    """
    config = load_family(family)
    if config.plan_only:
        raise ValueError(
            f"family {config.name} is plan_only: use `ladder plan {family}`; it is not meant to be trained here"
        )
    place = Place(make_folder(home), resolve_tracking(home, tracking))
    wanted = tuple(_on_mesh(run, mesh) for run in _chosen(config, runs, hero=hero, place=place))
    if len(wanted) > 1 and find_processes(os.environ):
        raise ValueError(f"{len(wanted)} runs in several processes; name one with --rung or --hero")
    todo = [run for run in wanted if run_status(place.folder(run))["state"] != "done"]
    _complete_copies([run for run in wanted if run not in todo], place)
    if not todo:
        return
    check_budgets(todo, place.cache)
    if is_first():
        check_start(todo, home=place.home, anyway=anyway, price_per_hour=price_per_hour)
    _keep_family(config.name, family_text(family), place)
    if jobs is not None:
        for job in submit_runs(todo, home=place.home, tracking=place.tracking, options=jobs):
            log(f"{job.run} is job {job.job} (log: {job.log})")
    elif len(todo) == 1:
        train_here(todo[0], place, progress=progress)
    else:
        _train_side_by_side(todo, place, budget=budget or Budget(), progress=progress)


def _on_mesh(config: RunConfig, changes: str | None) -> RunConfig:
    try:
        return config.replace(mesh=config.mesh.changed(changes)) if changes else config
    except ValidationError as error:
        raise ValueError(f"--mesh {changes}: {explain(error)}") from error


def _chosen(config: LadderConfig, names: tuple[str, ...] | None, *, hero: bool, place: Place) -> tuple[RunConfig, ...]:
    if hero:
        return (config.hero_run,)
    if names is None:
        return config.rung_runs
    known = {run.run: run for run in config.rung_runs}
    folders = (run_folder(place.home, config.name, name) for name in names if name not in known)
    known |= {folder.name: begun for folder in folders if (begun := begun_branch(folder)) is not None}
    for name in names:
        if name not in known:
            raise ValueError(f"rung {name!r} is not in family {config.name}; its runs are {', '.join(known)}")
    return tuple(known[name] for name in names)


def _keep_family(name: str, text: str, place: Place) -> None:
    """A copy of the family file beside its runs: what children and later readers use."""
    path = make_folder(family_folder(place.home, name)) / FAMILY_FILE
    if not is_first():
        return
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _complete_copies(done: Sequence[RunConfig], place: Place) -> None:
    """Copies to MLflow what it lacks of finished runs, after an outage or for another store."""
    for config in done if is_first() else ():
        folder = place.folder(config)
        if is_mirrored(folder, place.tracking):
            continue
        log(f"{config.run}: copying to MLflow what it lacks")
        try:
            mirror_folder(folder, place.tracking)
        except Exception as error:  # the runs are worth more than their copies
            log(f"tracking {public_address(place.tracking)!r} failed ({one_line(error)}); the next call tries again")
            return


def train_here(config: RunConfig, place: Place, *, progress: bool) -> None:
    """Trains one run in this process, mirrored and, if it is the hero, watched."""
    prepare_backend(threads=config.threads, cache=place.cache)
    from rungwise.ladder.training.train import train_run
    from rungwise.ladder.watching.watch import live_watch

    folder = place.folder(config)
    before = run_status(folder)
    with ProgressView(enabled=progress and is_first()) as view:
        view.start(config.run, config.steps, step=before["step"])

        def show(step: int, values: dict[str, float]) -> None:
            if "train/loss" in values:
                view.update(
                    config.run,
                    step,
                    loss=values["train/loss"],
                    tokens_per_second=values["perf/tokens_per_second"],
                )

        watcher = live_watch(config, home=place.home) if is_first() else None
        observers = (show,) if watcher is None else (show, watcher)
        try:
            check_device_memory(config)
            train_run(config, folder, cache=place.cache, tracking=place.tracking, observers=observers)
        except Preempted:
            raise
        except Exception as error:
            began = run_status(folder)["attempts"] > before["attempts"]
            if isinstance(error, ValueError | OSError) and not began:
                raise
            raise RunFailed(f"{config.run} failed: {type(error).__name__}: {one_line(error)}") from error


def _train_side_by_side(todo: Sequence[RunConfig], place: Place, *, budget: "Budget", progress: bool) -> None:
    """Children, as many at once as the budget has room for."""
    for config in todo:
        budget.check(config)
    waiting = _in_order(todo)
    running: dict[str, tuple[RunConfig, subprocess.Popen[bytes]]] = {}
    tails: dict[str, FolderTail] = {}
    failed: list[str] = []
    codes: set[int] = set()
    with ProgressView(enabled=progress) as view:
        try:
            while waiting or running:
                while waiting and budget.has_room(waiting[-1], [other for other, _ in running.values()]):
                    config = waiting.pop()
                    running[config.run] = config, _start_child(config, place)
                    tails[config.run] = FolderTail(place.folder(config))
                    view.start(config.run, config.steps, step=run_status(place.folder(config))["step"])
                time.sleep(POLL_SECONDS)
                for name, (config, child) in list(running.items()):
                    _show(view, name, tails[name])
                    if child.poll() is not None:
                        del running[name]
                        if child.returncode:
                            codes.add(child.returncode)
                            failed.append(_failure(config, place, child.returncode))
                            log(f"{failed[-1]}; the other runs go on")
        finally:
            for _, child in running.values():
                child.terminate()
            for _, child in running.values():
                child.wait()
    if failed:
        kind = ValueError if codes == {BAD_INPUT} else RunFailed
        raise kind(f"{len(failed)} of {len(todo)} runs failed: {'; '.join(failed)}")


def _in_order(todo: Sequence[RunConfig]) -> list[RunConfig]:
    """Last to start first. Longest runs start first, further seeds of a rung after all first ones: by then their
    program is compiled."""
    seen: set[str] = set()
    repeats = [run.run for run in todo if run.rung in seen or seen.add(run.rung)]
    return sorted(todo, key=lambda run: (run.run not in repeats, run.tokens * run.model.hidden_dim**2))


def _start_child(config: RunConfig, place: Place) -> subprocess.Popen[bytes]:
    folder = make_folder(place.folder(config))
    command = [
        *(sys.executable, "-P", "-m", "rungwise.ladder", "run"),
        *(str(family_folder(place.home, config.family) / FAMILY_FILE), "--rung", config.run),
        *("--home", str(place.home), "--quiet"),
        *(("--mesh", config.mesh.text) if config.mesh != MeshConfig() else ()),
    ]
    with (folder / CHILD_LOG).open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"MLFLOW_TRACKING_URI": place.tracking}  # not an argument: it may hold a password
            | {LOG_VARIABLE: str(folder / CHILD_LOG)}
            | {"RUNGWISE_TRACEBACK": "1"},  # into the log
        )


def _show(view: ProgressView, run: str, tail: FolderTail) -> None:
    """The newest step since the last look; what was read before is not read again."""
    newest = None
    for record in tail.new_records():
        if record["kind"] == "metrics" and "perf/tokens_per_second" in record["values"]:
            newest = record
    if newest is not None:
        loss, speed = (decode_number(newest["values"][name]) for name in ("train/loss", "perf/tokens_per_second"))
        view.update(run, newest["step"], loss=loss, tokens_per_second=speed)


def _failure(config: RunConfig, place: Place, code: int) -> str:
    path = place.folder(config) / CHILD_LOG
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    said = lines[-1].removeprefix("error: ").removeprefix(f"{config.run} failed: ") if lines else f"exit code {code}"
    if code < 0:
        said = f"killed by {signal.Signals(-code).name}"
    return f"{config.run}: {said} (log: {path})"
