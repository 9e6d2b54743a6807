"""Copying a run's journal to MLflow, without the training loop noticing.

`Mirror` starts a process of the lowest priority that tails the journal; `ladder/mirror.py` is that process.
Why not a thread: `log_batch` into SQLite takes 5 ms of CPU for a step of 60 metrics (MLflow 3.17.2, 2 cores),
3 to 10 % of a step of 50 to 150 ms, and would hold the interpreter for that long. A process of niceness 19
takes what training leaves over, outlives a killed trainer, and completes the copy.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from rungwise.analysis.store import (
    check_reachable,
    find_attempts,
    find_experiment,
    open_client,
    public_address,
)
from rungwise.ladder.home import TRACKING_VARIABLE

__all__ = ["Mirror", "check_reachable", "mirror_folder", "tag_run"]

FLUSH_S: Final = 30.0


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
            "rungwise.ladder.mirror",
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
    from rungwise.ladder.mirror import copy_once

    if tracking_uri.startswith("http"):
        check_reachable(tracking_uri)
    copy_once(Path(folder), tracking_uri)


def tag_run(tracking_uri: str, family: str, run: str, tags: Mapping[str, str]) -> None:
    """Set tags on the live attempt of a run, such as the watch's state.

    Raises:
        ValueError: the address does not answer, or the store has no such run.
    """
    check_reachable(tracking_uri)
    client = open_client(tracking_uri)
    experiment = find_experiment(client, family)
    attempts = find_attempts(client, experiment, f"{family}/{run}") if experiment else []
    if not attempts:
        raise ValueError(f"run {family}/{run} is not in {public_address(tracking_uri)!r}; check the names")
    for name, value in tags.items():
        client.set_tag(attempts[-1].info.run_id, name, value)
