"""Runs through a real Slurm: submitted, seen, requeued after being taken away, cancelled."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungwise.analysis.source import load_run
from rungwise.ladder.family import load_family
from rungwise.ladder.launching.slurm import JobOptions, job_script
from rungwise.ladder.launching.status import family_status

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


def _wait(condition: Callable[[], bool], *, what: str, logs: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        said = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(logs.glob("*.log")))
        failed = any(line.startswith("error: ") and "asked to stop" not in line for line in said.splitlines())
        assert not failed, f"{what} did not happen\n{said}"
        assert time.monotonic() < deadline, f"{what} did not happen in time\n{said}"
        time.sleep(0.2)


def test_a_ladder_runs_through_slurm_and_a_job_that_is_taken_away_goes_on(slurm: Path, mini: Path, tmp_path: Path):
    home = tmp_path / "home"
    folder = home / "mini"
    submitted = _ladder("run", str(mini), "--launcher", "slurm", "--json", home=home)
    assert all(run["job"] for run in submitted["runs"] if run["run"] != "hero")

    journal = folder / "runs" / "d48" / "metrics.jsonl"
    _wait(lambda: journal.exists() and journal.read_text().count("train/loss") >= 12, what="d48", logs=folder / "jobs")
    d48 = _run(mini, home, "d48")
    subprocess.run(["scontrol", "requeue", d48["job"]], check=True)  # at once: a fast machine has it done in seconds
    assert d48["state"] == "running"

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
    runs = [run for run in load_family(str(mini)).rung_runs if run.rung == "d32"]
    text = job_script(runs, home=tmp_path / "a home", options=JobOptions(processes=2, run_options=("--mesh", "data=2")))
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo node7")):
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "9",
    }
    said = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True).stdout
    words = said.splitlines()
    assert words[words.index("--rung") + 1] == "d32-seed1"
    assert words[words.index("--home") + 1] == str(tmp_path / "a home")
    assert words[-2:] == ["--mesh", "data=2"]
