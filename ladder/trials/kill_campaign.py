"""Kills a run at random moments until it is done, again and again, and compares what is left with a run never killed.

    python -m rungwise.ladder.trials.kill_campaign tiny --rung d32 --kills 100 --home /tmp/campaign

A kill is SIGKILL to the trainer, of every fourth to its MLflow mirror as well, at a random moment: while it starts,
between steps, while a checkpoint is being written, right after a journal record. Every finished run must hold the same
arrays and figures as the calm one, bit for bit, and MLflow each point once. With `--registrations N`, registering the
forecast is killed N times instead, in a home whose rungs are done. Prints one JSON object.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rungwise.ladder.console import log
from rungwise.ladder.family import load_family
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder

MOMENTS: Final = ("start", "step", "checkpoint", "journal")
LIMIT_S: Final = 900.0
POLL_S: Final = 0.001


@dataclass
class Campaign:
    """What a campaign did and found."""

    family: str
    run: str
    kills: Counter[str] = field(default_factory=Counter)
    """By moment."""
    mirrors_killed: int = 0
    finished_runs: int = 0
    differences: list[str] = field(default_factory=list)
    """What a finished run has that the calm one has not; empty where all is well."""
    steps_repeated: int = 0
    """Steps that were trained more than once."""
    seconds_calm: float = 0.0
    """One run, never killed, start included."""
    seconds_killed: float = 0.0
    """All runs of the campaign."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "kills": dict(self.kills), "seconds_lost_per_kill": self.seconds_lost_per_kill}

    @property
    def seconds_lost_per_kill(self) -> float:
        """Time beyond that of as many calm runs, over the kills of trainers."""
        return (self.seconds_killed - self.finished_runs * self.seconds_calm) / max(1, self.kills.total())


def kill_campaign(family: str, run: str, *, kills: int, home: Path, seed: int = 0) -> Campaign:
    """Trains `run` calmly once, then under `kills` kills.

    Args:
        family: a shipped name or a path.
        home: an empty folder; the runs stay in it.
    """
    draw, config = random.Random(seed), load_family(family)
    campaign = Campaign(config.name, run)
    calm = home / "calm"
    began = time.monotonic()
    _finish(_start(family, run, calm))
    campaign.seconds_calm = time.monotonic() - began
    expected = final_state(run_folder(calm, config.name, run))
    while campaign.kills.total() < kills:
        stormy = home / f"stormy-{campaign.finished_runs}"
        began = time.monotonic()
        while campaign.kills.total() < kills:
            if not _train_and_kill(family, run, stormy, campaign, draw):
                break
        _finish(_start(family, run, stormy))
        campaign.seconds_killed += time.monotonic() - began
        campaign.finished_runs += 1
        folder = run_folder(stormy, config.name, run)
        campaign.differences += _differences(expected, final_state(folder))
        campaign.differences += store_faults(folder, resolve_tracking(stormy), config.name, run)
        campaign.steps_repeated += _steps_repeated(folder)
        log(f"{campaign.kills.total()} kills, {campaign.finished_runs} runs, {len(campaign.differences)} differences")
    return campaign


def registration_campaign(family: str, *, kills: int, home: Path, seed: int = 0) -> dict[str, Any]:
    """Kills `ladder forecast --register` at random moments, in copies of a home whose rungs are done.

    After each kill nothing is registered, or a whole forecast is; a last call registers the same as a calm one.
    """
    draw, name = random.Random(seed), load_family(family).name
    calm = shutil.copytree(home, home.with_name(f"{home.name}-calm"))
    began = time.monotonic()
    subprocess.run(_words("forecast", family, "--register", home=calm), check=True, capture_output=True)
    seconds = time.monotonic() - began
    (expected,) = forecasts_folder(calm, name).glob("*.json")
    shutil.rmtree(calm)
    whole = 0
    for _ in range(kills):
        child = subprocess.Popen(_words("forecast", family, "--register", home=home), stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 1.05) * seconds)
        child.kill()
        child.wait()
        found = list(forecasts_folder(home, name).glob("*.json"))
        assert all(json.loads(path.read_text())["hash"] == path.stem for path in found)
        whole += len(found)
        shutil.rmtree(forecasts_folder(home, name), ignore_errors=True)
    subprocess.run(_words("forecast", family, "--register", home=home), check=True, capture_output=True)
    (found,) = forecasts_folder(home, name).glob("*.json")
    return {"kills": kills, "whole": whole, "none": kills - whole, "same_hash": found.name == expected.name}


def _words(verb: str, family: str, *words: str, home: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "rungwise.ladder", verb, family, *words, "--home", str(home)]


def _start(family: str, run: str, home: Path) -> "subprocess.Popen[bytes]":
    which = ["--hero"] if run == "hero" else ["--rung", run]
    return subprocess.Popen(_words("run", family, *which, "--quiet", home=home), stderr=subprocess.PIPE)


def _finish(child: "subprocess.Popen[bytes]") -> None:
    _, said = child.communicate(timeout=LIMIT_S)
    if child.returncode:
        raise RuntimeError(f"a run failed with code {child.returncode}: {said.decode(errors='replace').strip()}")


def _train_and_kill(family: str, run: str, home: Path, campaign: Campaign, draw: random.Random) -> bool:
    """One attempt that is killed; False where it came to its end before its moment."""
    moment = draw.choice(MOMENTS)
    folder = run_folder(home, campaign.family, run)
    child = _start(family, run, home)
    try:
        if not _wait_for(moment, child, folder, draw):
            _finish(child)
            return False
        mirrors = list(_children(child.pid)) if draw.random() < 0.25 else []
        for victim in (child.pid, *mirrors):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        campaign.kills[moment] += 1
        campaign.mirrors_killed += len(mirrors)
        return True
    finally:
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def _wait_for(moment: str, child: "subprocess.Popen[bytes]", folder: Path, draw: random.Random) -> bool:
    """Whether the moment came while the trainer lived."""
    if moment == "start":
        time.sleep(draw.uniform(0.0, 3.0))
        return child.poll() is None
    journal, deadline = folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    size = journal.stat().st_size if journal.exists() else 0
    records = draw.randint(1, 40)  # of this attempt, before the moment
    seen = 0
    while child.poll() is None and time.monotonic() < deadline:
        now = journal.stat().st_size if journal.exists() else 0
        seen, size = seen + (now != size), now
        if moment == "checkpoint" and seen and any((folder / "checkpoints").glob(".draft-*")):
            time.sleep(draw.uniform(0.0, 0.05))
            return child.poll() is None
        if moment != "checkpoint" and seen >= records:
            time.sleep(draw.uniform(0.0, 0.05) if moment == "step" else 0.0)
            return child.poll() is None
        time.sleep(POLL_S)
    return False


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def final_state(folder: Path) -> dict[str, Any]:
    """What a finished run leaves: arrays of its last checkpoint as bytes, and its figures by step, speeds left out."""
    import jax
    import numpy as np

    from rungwise.analysis.source import load_run
    from rungwise.ladder.home import read_json
    from rungwise.ladder.recording.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints")
    manifest = read_json(folder / "checkpoints" / str(checkpoints.latest_step()) / "manifest.json")
    like = {name: jax.ShapeDtypeStruct(shape, np.dtype(kind)) for name, (shape, kind) in manifest["leaves"].items()}
    step, tree, _ = checkpoints.restore(like)
    record = load_run(folder)
    frame = record.trajectory.frame
    columns = [name for name in frame.columns if name not in ("time", "attempt") and not name.startswith("perf/")]
    return {
        "state": record.state,
        "step": step,
        "arrays": {name: np.asarray(leaf).tobytes() for name, leaf in tree.items()},
        "figures": {name: frame[name].to_numpy(dtype=float).tobytes() for name in columns},
    }


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for kind in ("state", "step"):
        if expected[kind] != found[kind]:
            yield f"{kind} is {found[kind]}, not {expected[kind]}"
    for kind in ("arrays", "figures"):
        names = sorted({*expected[kind], *found[kind]})
        yield from (f"{kind}: {name}" for name in names if expected[kind].get(name) != found[kind].get(name))


def store_faults(folder: Path, tracking: str, family: str, run: str) -> Iterator[str]:
    """Where MLflow does not hold exactly what a run's journal says, each point once (counted where it is a file)."""
    import sqlite3

    import pandas as pd

    from rungwise.analysis.reading.store import sqlite_path
    from rungwise.analysis.source import load_run, load_run_mlflow

    ours, theirs = load_run(folder), load_run_mlflow(tracking, family, run)
    try:
        pd.testing.assert_frame_equal(ours.trajectory.frame, theirs.trajectory.frame, check_like=True)
    except AssertionError as error:
        yield f"MLflow: {str(error).splitlines()[0]}"
    states = [attempt.state for attempt in theirs.attempts]
    if states != [attempt.state for attempt in ours.attempts]:
        yield f"MLflow: attempts {states}, not {[attempt.state for attempt in ours.attempts]}"
    query = "SELECT run_uuid, key, step, timestamp, COUNT(*) FROM metrics GROUP BY 1, 2, 3, 4 HAVING COUNT(*) > 1"
    if (database := sqlite_path(tracking)) is None:
        return
    with sqlite3.connect(database) as store:
        yield from (f"MLflow: {key} at step {step} {count} times" for _, key, step, _, count in store.execute(query))


def _steps_repeated(folder: Path) -> int:
    from rungwise.analysis.reading.records import read_records

    records = read_records(folder / "metrics.jsonl").records
    steps = [record["step"] for record in records if record["kind"] == "metrics" and "train/loss" in record["values"]]
    return len(steps) - len(set(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a run at random moments and compare it with a calm one.")
    parser.add_argument("family")
    parser.add_argument("--rung", default="d32", help="the run; `hero` too")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--home", type=Path, required=True, help="an empty folder")
    parser.add_argument("--registrations", type=int, default=0, help="kill these, in a home with finished rungs")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    if words.registrations:
        print(json.dumps(registration_campaign(words.family, kills=words.registrations, home=words.home)))
        return
    found = kill_campaign(words.family, words.rung, kills=words.kills, home=words.home, seed=words.seed)
    print(json.dumps(found.to_dict(), indent=2))
    sys.exit(1 if found.differences else 0)


if __name__ == "__main__":
    main()
