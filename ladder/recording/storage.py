"""A disk that is full or does not answer costs neither the run nor its records: they wait in memory, and it is said.

`Backlog` is what the journal writes through; `StorageTrouble` turns failures and recoveries into one alert each.
"""

import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Final

from rungwise.analysis.alerts import Alert
from rungwise.ladder.console import log, one_line

MAX_WAITING: Final = 100_000
"""Records kept in memory while the disk takes none: about 300 MB; past it the run stops rather than forget."""


class Backlog:
    """Bytes on their way to an append-only file: written at once, or in order as soon as the disk takes them again."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._waiting: deque[bytes] = deque()

    def __len__(self) -> int:
        """Records that are not on disk yet."""
        return len(self._waiting)

    def write(self, record: bytes) -> OSError | None:
        """Appends a record after all that wait; what keeps it from the disk, if anything.

        Raises:
            OSError: `MAX_WAITING` records wait already.
        """
        self._waiting.append(record)
        error = self.flush()
        if error is not None and len(self._waiting) > MAX_WAITING:
            raise OSError(error.errno, f"{len(self._waiting)} journal records could not be written: {error.strerror}")
        return error

    def flush(self) -> OSError | None:
        """Writes what waits, as far as the disk takes it."""
        while self._waiting:
            data = self._waiting[0]
            try:
                written = os.write(self._file, data)
            except OSError as error:
                return error
            if written == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = data[written:]
        return None


class StorageTrouble:
    """Says once that a kind of writing fails, and once that it works again, on standard error and as an alert.

    The alert goes to `alerts.jsonl` beside the run, as soon as that can be written.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._open: dict[str, Alert] = {}
        self._unsaid: deque[Alert] = deque()

    def failed(self, what: str, step: int, error: BaseException) -> None:
        """Args: what: `journal` or `checkpoint`."""
        if what in self._open:
            return
        explanation = f"{what} cannot be written: {one_line(error)}; free space or repair the disk: the run goes on"
        log(f"{self._run} at step {step}: {explanation}")
        self._open[what] = Alert(
            rule=f"storage_{what}",
            metric=what,
            family="fault",
            severity="critical",
            state="open",
            step=step,
            since=step,
            updated=step,
            observed=float(step),
            expected=None,
            explanation=explanation,
        )
        self._say(self._open[what])

    def worked(self, what: str, step: int) -> None:
        """Closes the trouble of this kind, if there is one."""
        alert = self._open.pop(what, None)
        if alert is not None:
            log(f"{self._run} at step {step}: {what} is written again")
            self._say(replace(alert, state="resolved", updated=step))

    def _say(self, alert: Alert) -> None:
        from rungwise.ladder.recording.journal import append_alert

        self._unsaid.append(alert)
        while self._unsaid:
            try:
                append_alert(self._folder, self._unsaid[0].to_dict())
            except OSError:
                return  # said with the next one
            self._unsaid.popleft()
