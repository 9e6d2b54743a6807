"""Runs through a real Slurm: submitted, seen, requeued after being taken away, cancelled."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungwise.analysis.reading.records import read_records
from rungwise.analysis.reading.store import find_attempts, find_experiment, open_client
from rungwise.analysis.source import load_run
from rungwise.analysis.vocabulary import TAG_JOB, TAG_LOG
from rungwise.ladder.home import resolve_tracking
from rungwise.ladder.launching.slurm import JobOptions, Task, cancel_jobs, job_script
from rungwise.ladder.launching.status import family_status
from rungwise.ladder.recording.tracking import is_mirrored

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

EDITS = {
    'name = "tiny"': 'name = "mini"',
    "num_layers = 3 ": "num_layers = 2 ",
    "tokens_per_active_param = ": "tokens_per_active_param = 1.6 #",
    "num_sequences = ": "num_sequences = 96 #",
    "seeds = [0, 1]    ": "seeds = [0]    ",
    "seeds = [0, 1, 2] ": "seeds = [0, 1] ",
}
LIMIT_S = 400


@pytest.fixture
def mini(edited_family: Callable[..., Path]) -> Path:
    """`tiny` made shallow and short, and of its two smallest rungs alone."""

    def two_rungs(text: str) -> str:
        head, first, second, *_ = text.split("[[rungs]]")
        return "[[rungs]]".join([head, first, second]) + "[hero]" + text.split("[hero]")[1]

    return edited_family(EDITS, then=two_rungs)


def _ladder(*words: str, home: Path) -> Any:
    command = [sys.executable, "-P", "-m", "rungwise.ladder", *words, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


def _wait(condition: Callable[[], bool], *, what: str, logs: Path, every: float = 0.2) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        said = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(logs.glob("*.log")))
        failed = any(line.startswith("error: ") and "asked to stop" not in line for line in said.splitlines())
        assert not failed, f"{what} did not happen\n{said}"
        assert time.monotonic() < deadline, f"{what} did not happen in time\n{said}"
        time.sleep(every)


def test_a_ladder_runs_through_slurm_and_a_job_that_is_taken_away_goes_on(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    folder = home / "mini"
    submitted = _ladder("run", str(mini), "--launcher", "slurm", "--json", home=home)
    assert all(run["job"] for run in submitted["runs"] if run["run"] != "hero")

    journal = folder / "runs" / "d48" / "metrics.jsonl"
    _wait(
        lambda: journal.exists() and journal.read_text().count("train/loss") >= 8,
        what="d48",
        logs=folder / "jobs",
        every=0.02,
    )
    (start,) = (record for record in read_records(journal).records if record["kind"] == "attempt")
    os.kill(start["pid"], signal.SIGSTOP)  # or a fast machine has it done before it is taken away; Slurm lets it go on
    d48 = _run(mini, home, "d48")
    assert d48["state"] == "running"
    subprocess.run(["scontrol", "requeue", d48["job"]], check=True)

    def all_done() -> bool:
        runs = family_status(str(mini), home=home)["runs"]
        assert not any(run["state"] == "failed" and run["job"] is None for run in runs), runs
        return all(run["state"] == "done" for run in runs if run["run"] != "hero")

    _wait(all_done, what="the ladder's end", logs=folder / "jobs")
    for name in ("d32", "d32-seed1", "d48"):
        record = load_run(folder / "runs" / name)
        steps = record.trajectory.frame["step"].tolist()
        assert steps == list(range(1, record.plan["steps"] + 1)), name
    attempts = load_run(folder / "runs" / "d48").attempts
    assert [attempt.state for attempt in attempts] == ["killed", "finished"]
    assert attempts[1].restored_step > 0, "it went on from a checkpoint"
    starts = [json.loads(line) for line in journal.read_text().splitlines() if '"kind": "attempt"' in line]
    assert [start["job"] for start in starts] == [d48["job"]] * 2


def test_one_run_trains_in_two_processes_of_one_job(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    folder = home / "mini"
    words = ("run", str(mini), "--launcher", "slurm", "--rung", "d32", "--processes", "2", "--mesh", "data=2")
    _ladder(*words, home=home)
    _wait(lambda: _run(mini, home, "d32")["state"] == "done", what="the run's end", logs=folder / "jobs")
    record = load_run(folder / "runs" / "d32")
    assert record.trajectory.frame["step"].tolist() == list(range(1, record.plan["steps"] + 1))
    (start,) = (
        json.loads(line)
        for line in (folder / "runs" / "d32" / "metrics.jsonl").read_text().splitlines()
        if '"kind": "attempt"' in line
    )
    assert start["device"] == "cpu, mesh data=2", "each process has one device"


def _run(mini: Path, home: Path, run: str) -> dict[str, Any]:
    return next(found for found in family_status(str(mini), home=home)["runs"] if found["run"] == run)


def test_cooldowns_wait_for_their_run_and_are_jobs_of_their_own(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    folder = home / "mini"
    first, second = "d32-cooldown40", "d32-cooldown20to60"
    words = ("run", str(mini), "--launcher", "slurm", "--rung", "d32", "--cooldowns", "0.4,0.2-0.6", "--sbatch", "hold")
    shown = _ladder(*words, "--json", home=home)  # held: nothing moves until it is let go
    jobs = {run["run"]: run["job"] for run in shown["runs"] if run["state"] == "queued"}
    assert set(jobs) == {"d32", first, second}
    assert f"{second}: job {jobs[second]}" in _ladder("cancel", str(mini), "--rung", second, home=home)
    assert _run(mini, home, second)["state"] == "not started"
    again = _ladder(*words, "--json", home=home)
    renewed = {run["run"]: run["job"] for run in again["runs"] if run["state"] == "queued"}
    assert renewed == {**jobs, second: renewed[second]}
    assert renewed[second] != jobs[second]

    for job in (renewed[first], renewed[second], renewed["d32"]):
        assert "Dependency=afterok" in _scontrol("show", "job", job) or job == jobs["d32"]
        _scontrol("release", job)
    places, store = [folder / "runs" / name for name in renewed], resolve_tracking(home)
    _wait(lambda: all(is_mirrored(place, store) for place in places), what="the branches' ends", logs=folder / "jobs")
    assert {run["state"] for run in family_status(str(mini), home=home)["runs"] if run["run"] in renewed} == {"done"}
    parent = load_run(folder / "runs" / "d32")
    for name, start in ((first, 0.4), (second, 0.2)):
        record = load_run(folder / "runs" / name)
        steps = record.trajectory.frame["step"].tolist()
        assert steps == list(range(round(start * parent.plan["steps"]) + 1, record.plan["steps"] + 1))
    client = open_client(store)
    (attempt,) = find_attempts(client, find_experiment(client, "mini") or "", f"mini/{second}")
    assert attempt.data.tags[TAG_JOB] == renewed[second]
    assert Path(attempt.data.tags[TAG_LOG]) == folder / "jobs" / f"d32-cooldowns-{renewed[second]}.log"


def test_ending_a_run_ends_the_cooldowns_that_wait_for_it(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    words = ("run", str(mini), "--launcher", "slurm", "--cooldowns", "0.4", "--sbatch", "hold")
    shown = _ladder(*words, "--json", home=home)
    assert sum(run["state"] == "queued" for run in shown["runs"]) == 6
    ended = {job.run: job.job for job in cancel_jobs(home / "mini", ["d32-seed1"])}
    assert set(ended) == {"d32-seed1", "d32-seed1-cooldown40"}
    left = family_status(str(mini), home=home)["runs"]
    assert {run["run"] for run in left if run["job"]} == {"d32", "d48", "d32-cooldown40", "d48-cooldown40"}
    (lost,) = (run for run in left if run["run"] == "d32-seed1")
    log = home / "mini" / "jobs" / f"d32-{ended['d32-seed1']}.log"
    assert lost["reason"].endswith(f"run it again (log: {log})")
    assert len(cancel_jobs(home / "mini")) == 4


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout


def test_a_waiting_job_is_shown_and_cancelled(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    words = ("run", str(mini), "--launcher", "slurm", "--sbatch", "begin=now+1hour", "--rung", "d48")
    shown = _ladder(*words, "--json", home=home)
    (d48,) = (run for run in shown["runs"] if run["run"] == "d48")
    assert d48["state"] == "queued"
    assert "BeginTime" in d48["reason"]
    again = _ladder(*words, "--json", home=home)
    assert [run["job"] for run in again["runs"] if run["run"] == "d48"] == [d48["job"]]
    assert (home / "mini" / "jobs.jsonl").read_text().count('"d48"') == 1, "a waiting run is not submitted twice"
    assert d48["job"] in _ladder("cancel", str(mini), home=home)
    (d48,) = (run for run in _ladder("status", str(mini), "--json", home=home)["runs"] if run["run"] == "d48")
    assert d48["state"] == "not started"
    assert d48["job"] is None


def test_what_slurm_refuses_is_one_line_and_exit_code_2(slurm: Path, mini: Path, tmp_path: Path):
    command = [sys.executable, "-P", "-m", "rungwise.ladder", "run", str(mini), "--home", str(tmp_path / "home")]
    words = ["--launcher", "slurm", "--sbatch", "partition=nowhere"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "invalid partition" in done.stderr.lower()


def test_a_job_script_is_a_bash_script_that_names_every_run(mini: Path, tmp_path: Path):
    tasks = [Task(run=run, words=("--rung", run)) for run in ("d32", "d32-seed1")]
    options = JobOptions(processes=2, run_options=("--mesh", "data=2"))
    text = job_script(tasks, family=tmp_path / "a home" / "mini", name="d32", options=options)
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in (("srun", 'printf "%s\\n" "$RUNGWISE_LOG" "$@"'), ("scontrol", "echo node7")):
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "8",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "9",
    }
    said = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True).stdout
    log, *words = said.splitlines()
    assert log == str(tmp_path / "a home" / "mini" / "jobs" / "d32-8_1.log")
    assert words[words.index("--rung") + 1] == "d32-seed1"
    assert words[words.index("--home") + 1] == str(tmp_path / "a home")
    assert words[-2:] == ["--mesh", "data=2"]
