"""One run in several processes, each with devices of its own, that compute every step together.

The first process writes the run's records. The others keep records too, in a folder that is thrown away: they run the
same code, and whatever depends on files is decided by the first. Checkpoints are written by all into the run's folder.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Plain = TypeVar("Plain")

PATIENCE_MS = 3_600_000
"""Longest wait for another process."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Who takes part in a run."""

    coordinator: str
    """Address and port of the first process, as the others see it."""
    count: int
    index: int


def find_processes(environment: Mapping[str, str]) -> Processes | None:
    """The processes that a launcher announces; None where it announces no more than one.

    RUNGWISE_COORDINATOR is the address of the first, RUNGWISE_NUM_PROCESSES (or Slurm's SLURM_NTASKS) their number,
    RUNGWISE_PROCESS_ID (or SLURM_PROCID) this one's, from 0.

    Raises:
        ValueError: one of the three is missing or out of range.
    """
    coordinator = environment.get("RUNGWISE_COORDINATOR")
    if coordinator is None:
        return None
    count = _whole_number(environment, "RUNGWISE_NUM_PROCESSES", "SLURM_NTASKS")
    index = _whole_number(environment, "RUNGWISE_PROCESS_ID", "SLURM_PROCID")
    if not 0 <= index < count:
        raise ValueError(f"RUNGWISE_PROCESS_ID {index} is not within 0..{count - 1}; number the processes from 0")
    return Processes(coordinator=coordinator, count=count, index=index) if count > 1 else None


def _whole_number(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if name in environment:
            if not environment[name].isdecimal():
                raise ValueError(f"{name} {environment[name]!r} is no whole number; set one")
            return int(environment[name])
    raise ValueError(f"RUNGWISE_COORDINATOR is set but {names[0]} is not; set it for every process")


def is_first() -> bool:
    """Whether this process writes what a run leaves behind; needs no jax."""
    processes = find_processes(os.environ)
    return processes is None or processes.index == 0


def join_processes() -> None:
    """Meets the other processes, if there are any; before the first use of jax. Waits until all have come."""
    processes = find_processes(os.environ)
    if processes is None:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    _keep_output_to_results()
    jax.distributed.initialize(
        processes.coordinator,
        num_processes=processes.count,
        process_id=processes.index,
        local_device_ids=_own_devices(os.environ),
    )


def _keep_output_to_results() -> None:
    """Sends what libraries print on standard output, as Gloo does of its connections, to standard error."""
    sys.stdout.flush()
    sys.stdout = open(os.dup(1), "w", encoding=sys.stdout.encoding)  # noqa: SIM115
    os.dup2(2, 1)


def _own_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Under Slurm, several tasks on a node take one accelerator each; else a process takes all it sees."""
    on_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    shared = any(not part.startswith("1") or part[1:2].isdecimal() for part in on_node.split(","))
    return [int(environment["SLURM_LOCALID"])] if shared and "SLURM_LOCALID" in environment else None


def meet(name: str) -> None:
    """Waits until all processes have come here, however long their compilers took; nothing crosses devices.

    Gloo gives up on a collective for which another process comes half a minute late, so all meet before each program's
    first run.
    """
    import jax

    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=name, timeout_ms=PATIENCE_MS)


def agreed(value: Plain) -> Plain:
    """The first process's value on all of them; anything that JSON holds. Called by all processes in the same order."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    meet("agreed")
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        sent[:] = text
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes())


def on_first(work: Callable[[], None]) -> None:
    """Runs work in the first process while the others wait.

    Raises:
        OSError, ValueError: what the work raised there; in the other processes an OSError that says it.
    """
    failure: OSError | ValueError | None = None
    if is_first():
        try:
            work()
        except (OSError, ValueError) as error:
            failure = error
    said = agreed(None if failure is None else f"{type(failure).__name__} in the first process: {failure}")
    if said is not None:
        raise failure or OSError(said)


@contextmanager
def first_alone() -> Iterator[None]:
    """The first process does what stands inside before the others do: it fills caches that they then read."""
    if not is_first():
        meet("first alone")
    yield
    if is_first():
        meet("first alone")


@contextmanager
def records_folder(folder: Path) -> Iterator[Path]:
    """Where this process keeps a run's records: the run's folder, or for all but the first one that passes."""
    if is_first():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rungwise-") as passing:
        yield Path(passing)
