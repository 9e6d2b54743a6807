"""Messages on their way to their receivers: on disk before they are sent, tried again, given up in plain sight.

`outbox.jsonl` beside a run's alerts holds each message once, by its key, and a receipt for every attempt at every
receiver. Whoever opens it goes on where the last one stopped, after a kill too. A receiver that fails is left alone
for 1 s, 2 s, 4 s … 60 s, whatever waits for it; the others do not hear of it. A message older than `GIVE_UP_AFTER_S`
is given up, one that is refused at once.

A process killed between an answer and its receipt asks again, with the same `Idempotency-Key`: nothing is lost, and a
receiver that honours the key hears once.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.reading.records import decode_record
from rungwise.ladder.recording.journal import append_shared
from rungwise.ladder.watching.receivers import Answer, Receiver, load_receivers

OUTBOX_FILE: Final = "outbox.jsonl"
FIRST_DELAY_S: Final = 1.0
LONGEST_DELAY_S: Final = 60.0
GIVE_UP_AFTER_S: Final = 3600.0
JITTER: Final = 0.1
"""Share by which a delay may be longer or shorter, so that many watches do not ask at once."""


@dataclass(kw_only=True)
class _Line:
    """A receiver as its receipts tell it."""

    failures: int = 0
    """In a row."""
    resume_at: float = 0.0


class Outbox:
    """The messages of one run.

    Args:
        folder: where `outbox.jsonl` lies; made with the first message.
        jitter: see `JITTER`; 0 for none.
    """

    def __init__(self, folder: Path, *, give_up_after: float = GIVE_UP_AFTER_S, jitter: float = JITTER) -> None:
        self.folder, self._give_up_after, self._jitter = folder, give_up_after, jitter
        self.messages: dict[str, dict[str, Any]] = {}
        """By key, in the order put."""
        self.held: dict[str, dict[str, Any]] = {}
        """What was decided not to be sent, by key."""
        self._done: dict[tuple[str, str], str] = {}
        self._lines: dict[str, _Line] = {}
        self._read = 0
        self.refresh()

    @property
    def path(self) -> Path:
        return self.folder / OUTBOX_FILE

    @property
    def pending(self) -> list[tuple[str, str]]:
        """(key, receiver) of what is neither delivered nor given up, oldest first."""
        return [pair for pair in self._pairs() if pair not in self._done]

    @property
    def given_up(self) -> list[tuple[str, str]]:
        """(key, receiver) of what was given up, until that receiver accepts something later."""
        latest: dict[str, list[tuple[str, str]]] = {}
        for key, name in self._pairs():
            outcome = self._done.get((key, name))
            if outcome == "delivered":
                latest[name] = []
            elif outcome == "given_up":
                latest.setdefault(name, []).append((key, name))
        return [pair for pairs in latest.values() for pair in pairs]

    def next_attempt(self) -> float | None:
        """Unix seconds of the next attempt that is due; None where nothing waits."""
        times = [self._lines.get(name, _Line()).resume_at for _, name in self.pending]
        return min(times, default=None)

    def attempts(self, name: str) -> int:
        """Failures in a row at a receiver."""
        return self._lines.get(name, _Line()).failures

    def deliveries(self) -> Iterator[tuple[str, str, str]]:
        """Receiver, what became of it and text of each message at each receiver, oldest first."""
        for key, name in self._pairs():
            yield name, self._done.get((key, name), "on its way").replace("_", " "), self.messages[key]["text"]

    def is_decided(self, key: str) -> bool:
        return key in self.messages or key in self.held

    def put(self, key: str, message: Mapping[str, Any], receivers: Sequence[str], *, now: float) -> bool:
        """Keep a message for these receivers; False where its key is known already."""
        return self._decide({"kind": "message", "id": key, "receivers": list(receivers), "put": now, **message})

    def hold(self, key: str, rule: str, reason: str) -> bool:
        """Keep in mind that this is not sent."""
        return self._decide({"kind": "held", "id": key, "rule": rule, "reason": reason})

    def send(self, receivers: Sequence[Receiver], *, now: float | None = None) -> None:
        """One attempt at everything due; returns at once where another process is sending.

        Args:
            now: Unix seconds; a test's own clock.
        """
        with self._alone("outbox.sender", wait=False) as mine:
            if not mine:
                return
            self.refresh()
            known = {receiver.name: receiver for receiver in receivers}
            for name in dict.fromkeys(name for _, name in self.pending):
                self._send_to(name, known.get(name), now)

    def send_until(self, receivers: Sequence[Receiver], *, deadline: float) -> None:
        """Goes on until nothing waits, or `time.monotonic()` reaches `deadline`."""
        while True:
            self.send(receivers)
            due = self.next_attempt()
            if due is None or time.monotonic() >= deadline:
                return
            time.sleep(max(0.1, min(due - time.time(), deadline - time.monotonic())))
            self.refresh()

    def refresh(self) -> None:
        """Read what was added to the file since the last call, by any process."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if (record := decode_record(line)) is not None:
                    self._take(record)

    def _pairs(self) -> Iterator[tuple[str, str]]:
        return ((key, name) for key, message in self.messages.items() for name in message["receivers"])

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "message":
                self.messages.setdefault(record["id"], record)
            case "held":
                self.held.setdefault(record["id"], record)
            case "receipt":
                line = self._lines.setdefault(record["receiver"], _Line())
                outcome = record["outcome"]
                if outcome != "failed":
                    self._done[record["id"], record["receiver"]] = outcome
                if outcome == "delivered":
                    line.failures, line.resume_at = 0, 0.0
                elif outcome == "failed" or record.get("again"):
                    line.failures, line.resume_at = line.failures + 1, record["resume_at"]

    def _decide(self, record: dict[str, Any]) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone("outbox.turn", wait=True):
            self.refresh()
            if self.is_decided(record["id"]):
                return False
            append_shared(self.path, record)
            self.refresh()
        return True

    def _send_to(self, name: str, receiver: Receiver | None, now: float | None) -> None:
        """Oldest first; the first failure ends the receiver's turn."""
        for key, other in self.pending:
            clock = time.time() if now is None else now
            if other != name or 0 < self._lines.get(name, _Line()).resume_at - clock < GIVE_UP_AFTER_S:
                continue
            expired = clock - self.messages[key]["put"] >= self._give_up_after
            if receiver is None:
                if expired:
                    self._write_receipt(key, name, Answer(outcome="refused", reason="not in RUNGWISE_WEBHOOKS"), clock)
                continue
            answer = receiver.deliver(self.messages[key])
            self._write_receipt(key, name, answer, clock, expired=expired)
            if answer.outcome == "failed":
                return

    def _write_receipt(self, key: str, name: str, answer: Answer, now: float, *, expired: bool = False) -> None:
        given_up = answer.outcome == "refused" or (answer.outcome == "failed" and expired)
        receipt = {"kind": "receipt", "id": key, "receiver": name, "reason": answer.reason}
        receipt["outcome"] = "given_up" if given_up else answer.outcome
        if answer.outcome == "failed":
            failures = self.attempts(name)
            delay = max(retry_delay(failures, key=f"{key}{name}", jitter=self._jitter), answer.retry_after or 0.0)
            receipt |= {"again": True, "attempt": failures + 1, "resume_at": now + delay}
        append_shared(self.path, receipt)
        self.refresh()

    @contextmanager
    def _alone(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Holds a lock of the folder; False where another process has it and `wait` is off."""
        if not self.folder.exists():
            yield False
            return
        with (self.folder / name).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True


def retry_delay(failures: int, *, key: str = "", jitter: float = 0.0) -> float:
    """Seconds from a failed attempt to the next: 1 doubling to 60, give or take `jitter`, the same for the same key.

    Args:
        failures: in a row, before this one.

    >>> [retry_delay(failures) for failures in (0, 1, 5, 6, 100)]
    [1.0, 2.0, 32.0, 60.0, 60.0]
    """
    delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 10))
    part = int(hashlib.sha256(f"{key}{failures}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    return delay * (1.0 + jitter * (2.0 * part - 1.0))


def start_sender(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process of the lowest priority that sends what waits here, and outlives its parent; addresses stay in
    the environment."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rungwise.ladder.watching.outbox", str(folder.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def main() -> int:
    """Send what waits in the folder named by the argument until all is delivered or given up."""
    os.nice(19)
    Outbox(Path(sys.argv[1])).send_until(load_receivers(), deadline=time.monotonic() + 2 * GIVE_UP_AFTER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
