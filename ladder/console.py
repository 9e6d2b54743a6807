"""The one place that writes to the terminal: results to standard output, progress and logs to standard error.

What a result looks like as a table lives in `tables.py`; which verb prints what, in `cli.py`.
"""

import sys
import time
from functools import cache
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from rungwise.analysis.vocabulary import dump_json

PLAIN_LINE_EVERY = 20.0
"""Seconds between the progress lines of one run where standard error is no terminal."""

_NARROWEST = 100
"""Columns a table may use where there is no terminal."""


def result_console() -> Console:
    """Standard output, which holds the result only."""
    return _console(stderr=False)


@cache
def log_console() -> Console:
    """Standard error: progress, logs, errors. One console, so that a line lands above a live progress bar."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    return console


def print_result(*renderables: RenderableType) -> None:
    """Prints a verb's result for a reader."""
    result_console().print(*renderables, sep="\n")


def print_json(value: dict[str, Any]) -> None:
    """Prints a verb's result as one strict JSON object."""
    print(dump_json(value, indent=2), flush=True)


def log(message: str) -> None:
    """Prints one line to standard error; no markup is read in it."""
    log_console().print(message, markup=False, soft_wrap=True)


def print_error(error: BaseException | str) -> None:
    """Prints `error: …`, always one line, whatever the message holds."""
    print(f"error: {error if isinstance(error, str) else one_line(error)}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """What an error says, in one line; a pydantic record's complaints as `field: message; …`.

    >>> one_line(ValueError("top_k = 9 exceeds num_experts = 8;\\n  lower it"))
    'top_k = 9 exceeds num_experts = 8; lower it'
    """
    text = str(error)
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        complaints = error.errors(include_url=False)  # pyright: ignore[reportAttributeAccessIssue]
        text = "; ".join(_complaint(complaint) for complaint in complaints)
    return " ".join(text.split()) or type(error).__name__


def _complaint(complaint: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in complaint["loc"])
    message = complaint["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def duration(seconds: float | None) -> str:
    """Seconds as a reader says them; an empty string where unknown.

    >>> duration(42.4), duration(372), duration(7_384), duration(None)
    ('42 s', '6 min 12 s', '2 h 03 min', '')
    """
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _TimeLeft(ProgressColumn):
    """Time left from the pace of this attempt, so that a resumed run is not credited with restored steps."""

    def render(self, task: Task) -> Text:
        first, elapsed = task.fields["first_step"], task.elapsed
        done = task.completed - first
        if task.finished:
            return Text(duration(task.finished_time), style="dim")
        if not done or not elapsed or task.total is None:
            return Text("")
        return Text(f"{duration((task.total - task.completed) * elapsed / done)} left", style="dim")


class ProgressView:
    """One bar a run on a terminal, else a plain line every `PLAIN_LINE_EVERY` seconds; on standard error.

    Safe to call from several threads. `enabled=False` prints nothing.

    >>> with ProgressView(enabled=False) as view:
    ...     view.start("d64", steps=300)
    ...     view.update("d64", 1, loss=5.54, tokens_per_second=31_000.0)
    """

    def __init__(self, *, enabled: bool = True) -> None:
        console = log_console()
        self._enabled = enabled
        self._last_line: dict[str, tuple[float, int]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reading]}"),
            _TimeLeft(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, run: str, steps: int, *, step: int = 0) -> None:
        """Announces a run of `steps` optimizer steps, of which `step` were restored."""
        self._tasks[run] = self._progress.add_task(
            run, total=steps, completed=step, reading="compiling", first_step=step, start=True
        )
        self._last_line[run] = (0.0, step)

    def update(self, run: str, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Shows a run's newest step."""
        reading = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._tasks[run], completed=step, reading=reading)
        if not self._enabled or not self._progress.disable:
            return
        steps, now = self._progress.tasks[self._tasks[run]].total, time.monotonic()
        last, last_step = self._last_line[run]
        if step != last_step and (now - last >= PLAIN_LINE_EVERY or step == steps):
            self._last_line[run] = (now, step)
            log(f"{run}: step {step}/{steps:.0f}  {reading}")
