"""Copying a run's journal to MLflow, without the training loop noticing.

`Mirror` starts a process of the lowest priority that tails the journal; `mirror.py` is that process.
Why not a thread: `log_batch` into SQLite takes 5 ms of CPU for a step of 60 metrics (MLflow 3.17.2, 2 cores),
3 to 10 % of a step of 50 to 150 ms, and would hold the interpreter for that long. A process of niceness 19
takes what training leaves over, outlives a killed trainer, and completes the copy at full speed when training ends.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from rungwise.analysis.reading.records import ALERTS_FILE, EVENTS_FILE, JOURNAL_FILE, read_json
from rungwise.analysis.reading.store import check_reachable, public_address, sqlite_path
from rungwise.ladder.home import TRACKING_VARIABLE, write_json

FLUSH_S: Final = 30.0
MIRRORED_FILE: Final = "mirrored.json"


class Mirror:
    """Keeps MLflow up with a run's journal, from before the first attempt until `close`.

    Nothing here raises or waits because of MLflow. While the store does not answer, the copy is tried again,
    and one line on standard error says so; points stay in the journal. The next mirror of the folder, or
    `mirror_folder`, copies what is missing, of earlier attempts too, each point once.

    Close the journal first, so that the attempt's end is copied as well.
    """

    def __init__(self, folder: str | Path, *, tracking_uri: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "rungwise.ladder.recording.mirror",
            str(Path(folder).absolute()),
        ]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {TRACKING_VARIABLE: tracking_uri},  # not an argument: it may hold a password
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the trainer; a new session would undo the niceness
        )

    def close(self, timeout: float = FLUSH_S) -> bool:
        """Wait until the copy is complete, for at most `timeout` seconds; whether it is.

        What is left is still copied in the background, unless the store goes on not to answer for a minute.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def mirror_folder(folder: str | Path, tracking_uri: str) -> None:
    """Copy what MLflow lacks of one run, now, in this process; an attempt whose writer died is marked killed.

    Raises:
        ValueError: the server does not answer, or the folder holds no run.
    """
    from rungwise.ladder.recording.mirror import copy_once

    if tracking_uri.startswith("http"):
        check_reachable(tracking_uri)
    copy_once(Path(folder), tracking_uri)


def mirror_forecast(file: str | Path, tracking_uri: str) -> None:
    """Put a registered forecast, `<home>/<family>/forecasts/<hash>.json`, into MLflow, in this process.

    Raises:
        ValueError: the server does not answer.
    """
    from rungwise.ladder.recording.mirror import copy_forecast, open_experiment

    if tracking_uri.startswith("http"):
        check_reachable(tracking_uri)
    file = Path(file)
    copy_forecast(*open_experiment(tracking_uri, file.parents[1].name), file)


def mark_mirrored(folder: Path, tracking_uri: str, sizes: Mapping[str, int]) -> None:
    """Leave word in a run's folder that a store holds this many bytes of each of its journals."""
    write_json(folder / MIRRORED_FILE, {"store": public_address(tracking_uri), "bytes": dict(sizes)})


def is_mirrored(folder: Path, tracking_uri: str) -> bool:
    """Whether this store holds all of a run's journals, by the word its mirror left: nothing is asked."""
    database = sqlite_path(tracking_uri)
    if not (folder / MIRRORED_FILE).exists() or (database is not None and not database.exists()):
        return False
    word = read_json(folder / MIRRORED_FILE)
    return word["store"] == public_address(tracking_uri) and word["bytes"] == journal_sizes(folder)


def journal_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each journal of a run."""
    files = (folder / name for name in (JOURNAL_FILE, EVENTS_FILE, ALERTS_FILE))
    return {file.name: file.stat().st_size for file in files if file.exists()}
