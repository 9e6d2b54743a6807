"""Runs as Slurm jobs: one job a rung, its seeds an array, requeued when preempted or out of time.

We write no scheduler. A job script calls the same `ladder run` that a person would; what was submitted stands in
`<home>/<family>/jobs.jsonl`, so that `ladder status` can ask Slurm about it and `ladder cancel` can end it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.reading.records import read_records
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import family_folder, make_folder
from rungwise.ladder.recording.journal import append_shared

JOBS_FILE: Final = "jobs.jsonl"
JOBS_FOLDER: Final = "jobs"
WARNING_SECONDS: Final = 120
"""How long before its time limit a job is told to save and leave."""
WAITING: Final = frozenset({"PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "SUSPENDED"})
ALIVE: Final = WAITING | {"RUNNING", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"}
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_OURS: Final = frozenset({"array", "job-name", "output", "error", "open-mode", "parsable", "requeue", "wrap", "ntasks"})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as a job: `job` is Slurm's own name of it, `12` or, for a task of an array, `12_3`."""

    run: str
    job: str
    log: str


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a cluster needs to know that a family does not say."""

    sbatch: tuple[str, ...] = ()
    """Long options of `sbatch` without their dashes: `partition=gpu`, `time=2-00:00:00`."""
    processes: int = 1
    """Processes of one run, over all its nodes: `jax.distributed`, set up from Slurm's variables."""
    run_options: tuple[str, ...] = ()
    """Further words for `ladder run`."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"--processes {self.processes}: a run needs at least 1")
        for option in self.sbatch:
            name = option.partition("=")[0]
            if not _OPTION.fullmatch(option):
                raise ValueError(f"--sbatch {option!r}: give a long option of sbatch without dashes, as time=12:00:00")
            if name in _OURS:
                raise ValueError(f"--sbatch {option!r}: {name} is set by the launcher; leave it out")


def job_script(runs: Sequence[RunConfig], *, home: Path, options: JobOptions) -> str:
    """The batch script of one rung's runs; the task of the array, 0 without one, says which of them it trains.

    Slurm warns the script before the time limit; it has the run save, then queues itself again. A preempted job is
    queued again by Slurm, and the run goes on from its last checkpoint.
    """
    first = runs[0]
    file = family_folder(home, first.family) / "family.toml"
    which = "--hero" if first.role == "hero" else '--rung "$run"'
    command = shlex.join([sys.executable, "-P", "-m", "rungwise.ladder", "run", str(file)])
    rest = shlex.join(["--home", str(home), "--quiet", *options.run_options])
    lines = [
        "#!/bin/bash",
        f"# One task is one run of {first.family}; submitted by `ladder run --launcher slurm`.",
        f"runs=({shlex.join(run.run for run in runs)})",
        "run=${runs[${SLURM_ARRAY_TASK_ID:-0}]}",
        "",
        "requeue() {  # the time limit is near: save, and go on in another allocation",
        '    kill -TERM "$step" 2>/dev/null',
        '    wait "$step"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    exit 0",
        "}",
        "trap requeue USR1",
        "",
    ]
    if options.processes > 1:
        lines += [
            'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export RUNGWISE_COORDINATOR=$first_node:$((20000 + SLURM_JOB_ID % 20000))",
        ]
    lines += [f"srun --kill-on-bad-exit=1 {command} {which} {rest} &", "step=$!", 'wait "$step"', ""]
    return "\n".join(lines)


def submit_runs(todo: Iterable[RunConfig], *, home: Path, tracking: str, options: JobOptions) -> list[Job]:
    """Submits runs that no living job trains yet; returns the new jobs.

    Raises:
        ValueError: Slurm is not here, or refused a job; its own words are in the message.
    """
    _require("sbatch")
    wanted = list(todo)
    if not wanted:
        return []
    folder = make_folder(family_folder(home, wanted[0].family))
    queued = {job.run for job, state, _ in living_jobs(folder)}
    submitted: list[Job] = []
    for rung, group in groupby((run for run in wanted if run.run not in queued), key=lambda run: run.rung):
        runs = list(group)
        script = make_folder(folder / JOBS_FOLDER) / f"{rung}.sh"
        script.write_text(job_script(runs, home=home, options=options))
        number = _sbatch(script, runs, folder=folder, tracking=tracking, options=options)
        submitted += _jobs_of(number, runs, folder)
    return submitted


def _sbatch(script: Path, runs: Sequence[RunConfig], *, folder: Path, tracking: str, options: JobOptions) -> str:
    logs = folder / JOBS_FOLDER / (f"{runs[0].rung}-%A_%a.log" if len(runs) > 1 else f"{runs[0].rung}-%j.log")
    words = [
        f"--job-name={runs[0].family}-{runs[0].rung}",
        f"--output={logs}",
        *("--open-mode=append", "--requeue", f"--signal=B:USR1@{WARNING_SECONDS}"),
        *(f"--ntasks={options.processes}", f"--cpus-per-task={runs[0].threads}"),
        *([f"--array=0-{len(runs) - 1}"] if len(runs) > 1 else []),
        *(f"--{option}" for option in options.sbatch),  # later ones win
    ]
    environment = {"MLFLOW_TRACKING_URI": tracking}  # not in the script: it may hold a password
    answer = _call("sbatch", "--parsable", *words, str(script), environment=environment)
    return answer.strip().partition(";")[0]


def _jobs_of(number: str, runs: Sequence[RunConfig], folder: Path) -> list[Job]:
    jobs = []
    for task, run in enumerate(runs):
        name = f"{number}_{task}" if len(runs) > 1 else number
        jobs.append(Job(run=run.run, job=name, log=str(folder / JOBS_FOLDER / f"{run.rung}-{name}.log")))
        append_shared(folder / JOBS_FILE, {"kind": "job", **asdict(jobs[-1])})
    return jobs


def submitted_jobs(folder: Path) -> list[Job]:
    """The last job of each run of a family, as submitted.

    Args:
        folder: of the family.
    """
    records = read_records(folder / JOBS_FILE).records if (folder / JOBS_FILE).exists() else ()
    last = {record["run"]: record for record in records if record["kind"] == "job"}
    return [Job(run=record["run"], job=record["job"], log=record["log"]) for record in last.values()]


def living_jobs(folder: Path) -> list[tuple[Job, str, str]]:
    """Jobs that wait or run: (job, Slurm's state, Slurm's reason). Empty where there is no Slurm or no job."""
    jobs = submitted_jobs(folder)
    if not jobs or shutil.which("squeue") is None:
        return []
    answer = _call("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--user={_user()}")
    states = {name: (state, reason) for name, state, reason in (line.split("|", 2) for line in answer.splitlines())}
    found = [(job, *states[job.job]) for job in jobs if job.job in states]
    return [(job, state, reason) for job, state, reason in found if state in ALIVE]


def cancel_jobs(folder: Path, runs: Iterable[str] | None = None) -> list[Job]:
    """Ends the living jobs of the named runs, of all when absent; what they have saved stays.

    Raises:
        ValueError: Slurm is not here.
    """
    _require("scancel")
    wanted = None if runs is None else set(runs)
    ended = [job for job, _, _ in living_jobs(folder) if wanted is None or job.run in wanted]
    if ended:
        _call("scancel", *(job.job for job in ended))
    return ended


def current_job() -> str | None:
    """The job that this process belongs to, in Slurm's own words; None outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _user() -> str:
    import getpass

    return getpass.getuser()


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise ValueError(f"--launcher slurm: {program} is not on PATH; run on a login node of a Slurm cluster")


def _call(*words: str, environment: dict[str, Any] | None = None) -> str:
    done = subprocess.run(words, env=os.environ | (environment or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ValueError(
            f"{words[0]}: {said.splitlines()[-1]}; correct the --sbatch options, or ask the cluster's help"
        )
    return done.stdout
