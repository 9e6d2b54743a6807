"""Runs as Slurm jobs: one job a rung, its seeds an array, requeued when preempted or out of time. A run's cooldowns are
an array of their own that waits for the run's job.

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
from rungwise.ladder.home import FAMILY_FILE, family_folder, make_folder
from rungwise.ladder.recording.journal import append_shared

JOBS_FILE: Final = "jobs.jsonl"
JOBS_FOLDER: Final = "jobs"
WARNING_SECONDS: Final = 120
"""How long before its time limit a job is told to save and leave."""
WAITING: Final = frozenset({"PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "SUSPENDED"})
ALIVE: Final = WAITING | {"RUNNING", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"}
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_OURS: Final = frozenset({"array", "job-name", "output", "error", "open-mode", "parsable", "requeue", "wrap", "ntasks"})


LOG_VARIABLE: Final = "RUNGWISE_LOG"
"""Tells a trainer where what it prints goes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run to be trained by a job: the words of `ladder run` that train it."""

    run: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as a job: `job` is Slurm's own name of it, `12` or, for a task of an array, `12_3`."""

    run: str
    job: str
    log: str
    after: str | None = None
    """The job it waits for; where that fails or is ended, it ends too."""


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


def job_script(tasks: Sequence[Task], *, family: Path, name: str, options: JobOptions) -> str:
    """The batch script of a job; the task of the array, 0 without one, says which run it trains.

    Slurm warns the script before the time limit; it has the run save, then queues itself again. A preempted job is
    queued again by Slurm, and the run goes on from its last checkpoint.

    Args:
        family: the family's folder in the home.
    """
    command = shlex.join([sys.executable, "-P", "-m", "rungwise.ladder", "run", str(family / FAMILY_FILE)])
    rest = shlex.join(["--home", str(family.parent), "--quiet", *options.run_options])
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if len(tasks) > 1 else "$SLURM_JOB_ID"
    lines = [
        "#!/bin/bash",
        f"# One task is one run of {family.name}; submitted by `ladder run --launcher slurm`.",
        f"runs=({shlex.join(shlex.join(task.words) for task in tasks)})",
        f"export {LOG_VARIABLE}={shlex.quote(str(family / JOBS_FOLDER))}/{name}-{job}.log",
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
    run = "${runs[${SLURM_ARRAY_TASK_ID:-0}]}"  # several words
    lines += [f"srun --kill-on-bad-exit=1 {command} {run} {rest} &", "step=$!", 'wait "$step"', ""]
    return "\n".join(lines)


def submit_runs(todo: Iterable[RunConfig], *, home: Path, tracking: str, options: JobOptions) -> list[Job]:
    """Submits runs that no living job trains yet, each rung as a job; returns the new jobs.

    Raises:
        ValueError: Slurm is not here, or refused a job; its own words are in the message.
    """
    submitted: list[Job] = []
    for rung, group in groupby(todo, key=lambda run: run.rung):
        runs = list(group)
        tasks = [Task(run=run.run, words=("--hero",) if run.role == "hero" else ("--rung", run.run)) for run in runs]
        submitted += submit_tasks(tasks, runs[0], name=rung, home=home, tracking=tracking, options=options)
    return submitted


def submit_tasks(
    tasks: Iterable[Task],
    like: RunConfig,
    *,
    name: str,
    home: Path,
    tracking: str,
    options: JobOptions,
    after: str | None = None,
) -> list[Job]:
    """Submits as one job, an array of several, the runs that no living job trains yet; returns the new jobs.

    Args:
        like: a run that says what each of them needs.
        name: of the job, its script and its logs.
        after: a job that must have done well before.
    Raises:
        ValueError: as `submit_runs`.
    """
    _require("sbatch")
    folder = make_folder(family_folder(home, like.family))
    queued = {job.run for job in living_jobs(folder)}
    wanted = [task for task in tasks if task.run not in queued]
    if not wanted:
        return []
    script, tail = make_folder(folder / JOBS_FOLDER) / f"{name}.sh", "%A_%a" if len(wanted) > 1 else "%j"
    script.write_text(job_script(wanted, family=folder, name=name, options=options))
    words = [
        f"--job-name={like.family}-{name}",
        f"--output={folder / JOBS_FOLDER / f'{name}-{tail}.log'}",
        *("--open-mode=append", "--requeue", f"--signal=B:USR1@{WARNING_SECONDS}"),
        *(f"--ntasks={options.processes}", f"--cpus-per-task={like.threads}"),
        *([f"--array=0-{len(wanted) - 1}"] if len(wanted) > 1 else []),
        *(f"--{option}" for option in options.sbatch),  # later ones win
        *([f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []),
    ]
    environment = {"MLFLOW_TRACKING_URI": tracking}  # not in the script: it may hold a password
    number = _call("sbatch", "--parsable", *words, str(script), environment=environment).strip().partition(";")[0]
    jobs = []
    for position, task in enumerate(wanted):
        job = f"{number}_{position}" if len(wanted) > 1 else number
        jobs.append(Job(run=task.run, job=job, log=str(folder / JOBS_FOLDER / f"{name}-{job}.log"), after=after))
        append_shared(folder / JOBS_FILE, {"kind": "job", **asdict(jobs[-1])})
    return jobs


def submitted_jobs(folder: Path) -> list[Job]:
    """The last job of each run of a family, as submitted.

    Args:
        folder: of the family.
    """
    records = read_records(folder / JOBS_FILE).records if (folder / JOBS_FILE).exists() else ()
    last = {record["run"]: record for record in records if record["kind"] == "job"}
    return [
        Job(run=record["run"], job=record["job"], log=record["log"], after=record.get("after"))
        for record in last.values()
    ]


def living_jobs(folder: Path) -> list[Job]:
    """Those of `submitted_jobs` that wait or run. Empty where there is no Slurm."""
    return [job for job, state, _ in seen_jobs(folder) if state in ALIVE]


def seen_jobs(folder: Path) -> list[tuple[Job, str, str]]:
    """`submitted_jobs` with Slurm's state and reason, both empty once it has forgotten a job. Empty where there is no
    Slurm.
    """
    jobs = submitted_jobs(folder)
    if not jobs or shutil.which("squeue") is None:
        return []
    answer = _call("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--user={_user()}")
    states = {name: (state, reason) for name, state, reason in (line.split("|", 2) for line in answer.splitlines())}
    return [(job, *states.get(job.job, ("", ""))) for job in jobs]


def cancel_jobs(folder: Path, runs: Iterable[str] | None = None) -> list[Job]:
    """Ends the living jobs of the named runs and those that wait for them, all when absent; what they have saved stays.

    Raises:
        ValueError: Slurm is not here.
    """
    _require("scancel")
    wanted = None if runs is None else set(runs)
    living = living_jobs(folder)
    named = {job.job for job in living if wanted is None or job.run in wanted}
    ended = [job for job in living if job.job in named or job.after in named]
    if ended:
        _call("scancel", *(job.job for job in ended))
    return ended


def current_job() -> dict[str, str]:
    """What is known of the job this process belongs to: `job`, its name in Slurm's own words, and `log`, its output."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    found = {"job": job, "log": os.environ.get(LOG_VARIABLE)}
    return {name: value for name, value in found.items() if value}


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
