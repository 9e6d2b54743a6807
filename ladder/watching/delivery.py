"""Which change of an alert is told to people: each rule of a run once, worse at once, the rest gathered.

`info` is recorded only. A `critical` alert goes out at once. A `warning` goes out unless its rule has spoken within the
cool-down; what was held back meanwhile is one message when that ends. A rise in severity passes through a cool-down,
and no rule's cool-down touches another's. All decisions are in the outbox: a watch that is started again repeats none.
"""

import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.alerts import OPEN_STATES, Alert
from rungwise.analysis.vocabulary import SEVERITIES
from rungwise.ladder.watching.outbox import OUTBOX_FILE, Outbox, start_sender
from rungwise.ladder.watching.receivers import Receiver, load_receivers

COOL_DOWN_S: Final = 3600.0


class Delivery:
    """The alerts of one run on their way to people.

    Args:
        name: of the run, as people read it: `<family>/<run>`.
        folder: where the outbox lives; nothing is written without receivers.
        receivers: else those of the environment.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        receivers: Sequence[Receiver] | None = None,
        cool_down: float = COOL_DOWN_S,
        outbox: Outbox | None = None,
    ) -> None:
        self.name, self.cool_down = name, cool_down
        self.receivers = tuple(load_receivers() if receivers is None else receivers)
        self.outbox = outbox or Outbox(folder)
        self._sender: subprocess.Popen[bytes] | None = None
        self._first_look = not (folder / OUTBOX_FILE).exists()

    def tell(self, alerts: Iterable[Alert], *, now: float | None = None) -> bool:
        """Put what people should hear of into the outbox; whether anything was.

        Args:
            alerts: that opened or changed since the last call, in order; of several states of one, the last counts.
        """
        if not self.receivers:
            return False
        now = time.time() if now is None else now
        latest = {(alert.rule, alert.metric, alert.step): alert for alert in alerts if alert.severity != "info"}
        told = [self._tell(alert, now) for alert in latest.values()]
        self._first_look = False
        return any([*told, *self._gathered(now)])

    def send(self, *, now: float | None = None) -> None:
        """One attempt at everything due."""
        self.outbox.send(self.receivers, now=now)

    def send_for(self, seconds: float) -> None:
        """Go on until all is delivered or given up, for so long at most."""
        self.outbox.send_until(self.receivers, deadline=time.monotonic() + seconds)

    def send_apart(self) -> None:
        """The same in a process of its own, where anything waits and none is at it, so that nothing here waits."""
        due = self.outbox.next_attempt() if self.receivers else None
        if due is not None and (self._sender is None or self._sender.poll() is not None):
            self._sender = start_sender(self.outbox.folder)

    def summary(self) -> dict[str, list[str]]:
        """What has not reached its receivers: `pending` and `given_up`, each as "<message> to <receiver>"."""
        self.outbox.refresh()
        pending = [f"{key} to {name}" for key, name in self.outbox.pending]
        return {"pending": pending, "given_up": [f"{key} to {name}" for key, name in self.outbox.given_up]}

    def _tell(self, alert: Alert, now: float) -> bool:
        opened, over = self._key(alert, "open"), alert.state == "resolved"
        if not self.outbox.is_decided(opened):
            if over and self._first_look:
                self.outbox.hold(self._key(alert, "resolved"), alert.rule, "over before the watch began")
                return not self.outbox.hold(opened, alert.rule, "over before the watch began")
            if self._is_quiet(alert, now):
                return not self.outbox.hold(opened, alert.rule, "cool-down")
            return self._put(opened, alert, "open", now)
        if over:
            return self._close(alert, now)
        if alert.severity == "critical" and self._loudest(opened) != "critical":
            return self._put(self._key(alert, "critical"), alert, "critical", now)
        if alert.state == "worsening":
            key = self._key(alert, f"worsening@{alert.updated}")
            if self._is_quiet(alert, now):
                return not self.outbox.hold(key, alert.rule, "cool-down")
            return self._put(key, alert, "worsening", now)
        return False

    def _close(self, alert: Alert, now: float) -> bool:
        """The end is told to those who heard of the beginning, once a rule and cool-down."""
        key = self._key(alert, "resolved")
        heard = self._key(alert, "open") in self.outbox.messages or self._key(alert, "critical") in self.outbox.messages
        return self._put(key, alert, "resolved", now) if heard else not self.outbox.hold(key, alert.rule, "unheard")

    def _gathered(self, now: float) -> Iterable[bool]:
        """One message for what a rule held back, when its cool-down is over."""
        for rule in {entry["rule"] for entry in self.outbox.held.values() if entry["reason"] == "cool-down"}:
            held = [key for key, entry in self.outbox.held.items() if entry["rule"] == rule]
            sent = self._messages_of(rule)
            told = sum(message["what"] == "gathered" and message["count"] for message in sent)
            waiting = sum(self.outbox.held[key]["reason"] == "cool-down" for key in held) - told
            if waiting <= 0 or now - max(message["put"] for message in sent) < self.cool_down:
                continue
            last = sent[-1]
            text = f"{self.name} {last['severity']} {rule}: {waiting} more announcements held back within the cool-down"
            body = {name: last[name] for name in ("rule", "severity", "alert")}
            key = f"{self.name}/{rule}/gathered@{told + waiting}"
            yield self._put_message(key, body | {"what": "gathered", "count": waiting, "text": text}, now)

    def _is_quiet(self, alert: Alert, now: float) -> bool:
        """Whether this rule has spoken within the cool-down, and no more softly than this."""
        loud = SEVERITIES.index(alert.severity)
        return any(
            now - message["put"] < self.cool_down and SEVERITIES.index(message["severity"]) >= loud
            for message in self._messages_of(alert.rule)
            if message["what"] != "resolved"
        )

    def _messages_of(self, rule: str) -> list[dict[str, Any]]:
        return [message for message in self.outbox.messages.values() if message["rule"] == rule]

    def _loudest(self, opened: str) -> str | None:
        """Severity last told of this alert."""
        keys = (opened, opened.removesuffix("open") + "critical")
        told = [self.outbox.messages[key]["severity"] for key in keys if key in self.outbox.messages]
        return told[-1] if told else None

    def _key(self, alert: Alert, what: str) -> str:
        return f"{self.name}/{alert.rule}/{alert.metric}/{alert.step}/{what}"

    def _put(self, key: str, alert: Alert, what: str, now: float) -> bool:
        body = {"what": what, "rule": alert.rule, "severity": alert.severity, "text": alert_text(self.name, alert)}
        return self._put_message(key, body | {"alert": alert.to_dict()}, now)

    def _put_message(self, key: str, message: Mapping[str, Any], now: float) -> bool:
        names = [receiver.name for receiver in self.receivers]
        return self.outbox.put(key, {"run": self.name, **message}, names, now=now)


def alert_text(name: str, alert: Alert) -> str:
    """An alert in one line, as people are told of it."""
    state = alert.state if alert.state in OPEN_STATES or alert.state == "resolved" else "open"
    return f"{name} {alert.severity} {alert.rule} {state} at step {alert.updated:,}: {alert.explanation}"
