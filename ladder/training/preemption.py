"""A run that is asked to stop: it saves what it has and leaves, to go on in its next attempt.

Schedulers announce what they take away: Slurm sends SIGTERM before a preemption, and our job script before the time
limit. One process looks at a flag after each step. Several processes would stop at different steps and wait for each
other for ever, so there JAX's own coordinator agrees on one.
"""

import signal
import threading
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(RuntimeError):
    """The run saved its state and left because it was asked to; running it again resumes it."""


class StopRun(Exception):
    """Raised by an observer of a run: save what there is and stop, for the reason it gives."""


class Diverged(RuntimeError):
    """The run saved its state and stopped because its watch found it diverging."""


class StopRequest:
    """Listens for the signals that ask a run to stop, inside a `with` block in the main thread.

    With several processes nothing is listened for here: JAX's coordinator hears SIGTERM itself.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that came; None while nobody asked."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        return self.signal.name if self.signal else "SIGTERM"

    def reached(self, step: int) -> bool:
        """Whether to save and leave after this step, the same on every process of the run."""
        import jax

        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)

    def __enter__(self) -> Self:
        import jax

        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
