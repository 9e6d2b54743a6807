"""What trouble with the MLflow store costs a run that trains: nothing, if the journal keeps its word.

    python -m rungwise.ladder.trials.store_trouble tiny --rung d64 --home DIR --trouble server

One real run is trained while its store is well and in trouble by turns, `PAIRS` times: `server` is a real MLflow server
that is stopped (SIGSTOP: it accepts and does not answer), `locked` a SQLite store that another process holds locked,
`full` a SQLite store on a small file system that is filled up (needs root, for the mount). Prints the step time in
trouble over the step time without, the median over pairs with a 90% bootstrap interval, the trainer's CPU seconds a
step likewise, and whether the store holds every point afterwards.
"""

import argparse
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from rungwise.ladder.family import load_family
from rungwise.ladder.home import run_folder
from rungwise.ladder.trials.alternating import Alternation
from rungwise.ladder.trials.kill_campaign import store_faults

PAIRS: Final = 10

Switch = Callable[[bool], None]
"""Begins (True) or ends (False) the trouble."""


@contextmanager
def server_trouble(home: Path) -> Iterator[tuple[str, Switch]]:
    """A real tracking server on loopback that is stopped and let go on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"sqlite:///{home / 'server.db'}"
    words = ["--backend-store-uri", store, "--artifacts-destination", str(home / "artifacts"), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *words, "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(address):
            time.sleep(0.2)
        yield address, lambda begin: os.killpg(server.pid, signal.SIGSTOP if begin else signal.SIGCONT)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=1):
        return True
    return False


@contextmanager
def locked_trouble(home: Path) -> Iterator[tuple[str, Switch]]:
    """A SQLite store that another connection holds locked for writing, from as soon as it gets the lock."""
    path = home / "locked.db"
    holder: list[tuple[threading.Thread, threading.Event]] = []

    def hold(over: threading.Event) -> None:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0.2)) as connection:
            while not over.is_set():
                with suppress(sqlite3.OperationalError):  # its writer holds it: try again
                    connection.execute("BEGIN EXCLUSIVE")
                    over.wait()

    def switch(begin: bool) -> None:
        while holder:
            thread, over = holder.pop()
            over.set()
            thread.join()
        if begin and path.exists():
            over = threading.Event()
            holder.append((threading.Thread(target=hold, args=(over,), daemon=True), over))
            holder[0][0].start()

    try:
        yield f"sqlite:///{path}", switch
    finally:
        switch(False)


@contextmanager
def full_trouble(home: Path) -> Iterator[tuple[str, Switch]]:
    """A SQLite store on a small file system that is filled to its last byte."""
    place = home / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    filler = place / "filler"

    def switch(begin: bool) -> None:
        if not begin:
            filler.unlink(missing_ok=True)
            return
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    try:
        yield f"sqlite:///{place / 'mlflow.db'}", switch
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


TROUBLES: Final = {"server": server_trouble, "locked": locked_trouble, "full": full_trouble}


def measure(family: str, run: str, *, home: Path, trouble: str, pairs: int = PAIRS) -> dict[str, Any]:
    """Trains `run` to its end with the store well and in trouble by turns.

    Raises:
        ValueError: the run has too few steps for the windows.
    """
    from rungwise.ladder.recording.tracking import mirror_folder
    from rungwise.ladder.training.backend import prepare_backend
    from rungwise.ladder.training.train import train_run

    config = next(found for found in load_family(family).runs if found.run == run)
    turns = Alternation.within(config.steps, pairs=pairs)
    prepare_backend(threads=config.threads, cache=home / "cache")
    with TROUBLES[trouble](home) as (tracking, switch):

        def observe(step: int, values: dict[str, float]) -> None:
            if "train/loss" not in values:
                return
            turns.seen(step)
            if turns.starts_window(step):
                switch(turns.is_changed(step))
                turns.forget()

        try:
            folder = run_folder(home, config.family, run)
            train_run(config, folder, cache=home / "cache", tracking=tracking, observers=(observe,))
        finally:
            switch(False)
        mirror_folder(folder, tracking)
        whole = not list(store_faults(folder, tracking, config.family, run))
    return {"trouble": trouble, **turns.result(), "store_holds_every_point": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a run while its MLflow store is well and in trouble by turns.")
    parser.add_argument("family")
    parser.add_argument("--rung", default="d64")
    parser.add_argument("--home", type=Path, required=True, help="an empty folder")
    parser.add_argument("--trouble", choices=sorted(TROUBLES), default="server")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of windows with and without (default: {PAIRS})")
    words = parser.parse_args()
    words.home.mkdir(parents=True, exist_ok=True)
    found = measure(words.family, words.rung, home=words.home.absolute(), trouble=words.trouble, pairs=words.pairs)
    print(json.dumps(found, indent=2))
    sys.exit(0 if found["store_holds_every_point"] else 1)


if __name__ == "__main__":
    main()
