"""Runs that meet at a store which is not there yet: none may fail, and each of their points must be there once.

    python -m rungwise.ladder.trials.new_store --rounds 20 --home DIR

Every round takes a new home with a run of each of four rungs, as its trainer left it, and a process each that copies it
to MLflow. All have loaded MLflow before the first of them touches the store: they set out at the same moment, closer
together than trainers ever do, and none tries again. The store is the home's own SQLite file, or with `--server` a real
tracking server over a new one. Prints one JSON object; exit code 1 where anything failed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

from rungwise.ladder.console import log
from rungwise.ladder.family import load_family
from rungwise.ladder.home import make_folder, resolve_tracking, run_folder
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.provenance import write_run_config
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.trials.kill_campaign import store_faults
from rungwise.ladder.trials.store_trouble import server_trouble

FAMILY: Final = "tiny"
STEPS: Final = 100
LIMIT_S: Final = 600.0


def new_store(rounds: int, *, home: Path, server: bool = False) -> dict[str, Any]:
    """Lets the family's rungs meet at a new store, `rounds` times.

    Args:
        home: an empty folder; the stores stay in it.
    """
    faults: list[str] = []
    for number in range(1, rounds + 1):
        place = make_folder(home / f"round-{number}")
        with server_trouble(place) if server else nullcontext((resolve_tracking(place), None)) as (tracking, _):
            found = [f"round {number}: {fault}" for fault in _round(place, tracking)]
        faults += found
        log(f"round {number} of {rounds}: {'; '.join(found) or 'well'}")
    return {
        "store": "server" if server else "sqlite",
        "rounds": rounds,
        "processes": len(load_family(FAMILY).rungs),
        "failed_rounds": len({fault.partition(":")[0] for fault in faults}),
        "faults": faults,
    }


def _round(home: Path, tracking: str) -> Iterator[str]:
    """What went wrong in one round."""
    folders = _finished_runs(home)
    context = get_context("spawn")
    together = context.Barrier(len(folders))
    copiers = [context.Process(target=_copy, args=(folder, tracking, together)) for folder in folders]
    for copier in copiers:
        copier.start()
    for folder, copier in zip(folders, copiers, strict=True):
        copier.join()
        if copier.exitcode:
            yield f"{folder.name}: exit code {copier.exitcode}"
    if not any(copier.exitcode for copier in copiers):
        for folder in folders:
            yield from (f"{folder.name}: {fault}" for fault in store_faults(folder, tracking, FAMILY, folder.name))


def _finished_runs(home: Path) -> list[Path]:
    """A run of each rung, with a config and a journal of `STEPS` steps."""
    folders = []
    for config in (run for run in load_family(FAMILY).rung_runs if run.run == run.rung):
        folder = make_folder(run_folder(home, FAMILY, config.run))
        write_run_config(folder, config, corpus_hash="0" * 64)
        with Journal(folder, family=FAMILY, run=config.run) as journal:
            journal.start_attempt(0)
            for step in range(1, STEPS + 1):
                journal.write(step, {"train/loss": 5 / step, "progress/tokens": float(step * config.tokens_per_step)})
            journal.end(STEPS, "finished")
        folders.append(folder)
    return folders


def _copy(folder: Path, tracking: str, together: Barrier) -> None:
    import mlflow  # noqa: F401  # its second of loading would set them apart

    together.wait(LIMIT_S)
    mirror_folder(folder, tracking)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let runs that start together meet at a new MLflow store.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--home", type=Path, required=True, help="an empty folder")
    parser.add_argument("--server", action="store_true", help="through a tracking server, a new one each round")
    words = parser.parse_args()
    found = new_store(words.rounds, home=words.home.absolute(), server=words.server)
    print(json.dumps(found, indent=2))
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
