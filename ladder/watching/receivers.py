"""Who hears of an alert outside this machine: webhooks, named in the environment and nowhere else.

An address is a secret. It never enters a config, a tag, a journal, a report, a log line or an error; what is written
is the receiver's name. `outbox.py` says when a message is sent and how often it is tried.
"""

import base64
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol

from rungwise.analysis.vocabulary import encode_number

WEBHOOKS_VARIABLE: Final = "RUNGWISE_WEBHOOKS"
TIMEOUT_S: Final = 10.0
_TRY_AGAIN: Final = (408, 425, 429)
"""Answers below 500 that ask for another try; any other of 300 to 499 refuses the message for good."""
_NAMED = re.compile(r"(?:(?P<name>[A-Za-z][\w-]*)=)?(?P<address>https?://\S+)")
_LONG: Final = ("event", "precedent")
_SHOWN: Final = ("observed", "expected", "since", "step", "cost", "probability", "carrier", "held_back", *_LONG)
"""Fields of an alert in a message, beside its sentence."""
_COLOURS: Final = {"info": "#5d646d", "warning": "#c77700", "critical": "#b3261e", "resolved": "#1d7a46"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one attempt: `delivered`, `failed` (try again) or `refused` (do not)."""

    outcome: str
    reason: str = ""
    retry_after: float | None = None
    """Seconds the receiver asks to be left alone for."""


class Receiver(Protocol):
    """Somebody an alert is delivered to."""

    @property
    def name(self) -> str: ...

    def deliver(self, message: Mapping[str, Any]) -> Answer:
        """One attempt; never raises."""
        ...


@dataclass(frozen=True)
class Webhook:
    """Posts Slack-compatible JSON. The same message carries the same `Idempotency-Key` at every attempt."""

    name: str
    address: str = field(repr=False)

    def deliver(self, message: Mapping[str, Any]) -> Answer:
        try:
            address, login = _without_login(self.address)
            head = {"Content-Type": "application/json", "Idempotency-Key": str(message["id"]), **login}
            data = json.dumps(slack_body(message), allow_nan=False).encode()
            request = urllib.request.Request(address, data=data, headers=head)
            with _OPENER.open(request, timeout=TIMEOUT_S) as response:
                return Answer(outcome="delivered", reason=f"HTTP {response.status}")
        except urllib.error.HTTPError as error:
            error.close()
            return _http_answer(error.code, error.headers.get("Retry-After"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(outcome="failed", reason=_reason(error))


def _without_login(address: str) -> tuple[str, dict[str, str]]:
    """An address with a user and password as the address alone and the header that says them."""
    parts = urllib.parse.urlsplit(address)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return address, {}
    word = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {word}"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body, at an address nobody named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _http_answer(code: int, retry_after: str | None) -> Answer:
    again = code >= 500 or code in _TRY_AGAIN
    return Answer(outcome="failed" if again else "refused", reason=f"HTTP {code}", retry_after=_seconds(retry_after))


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` as seconds: a number, or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, at.timestamp() - time.time())


def _reason(error: BaseException) -> str:
    """The kind of an error alone: its text may hold the address."""
    inner = getattr(error, "reason", None)
    kind = inner if isinstance(inner, BaseException) else error
    return "timed out" if isinstance(kind, TimeoutError) else type(kind).__name__


def load_receivers(environment: Mapping[str, str] = os.environ) -> tuple[Webhook, ...]:
    """The webhooks of `RUNGWISE_WEBHOOKS`: addresses with blanks between, each with a name in front if it has one.

    Raises:
        ValueError: an entry is no http address, or two have one name; the entry itself is not shown.

    >>> [hook.name for hook in load_receivers({"RUNGWISE_WEBHOOKS": "ops=https://a.example/x https://b.example/y"})]
    ['ops', 'webhook2']
    """
    hooks: list[Webhook] = []
    for place, entry in enumerate(environment.get(WEBHOOKS_VARIABLE, "").split(), start=1):
        found = _NAMED.fullmatch(entry)
        if found is None or not _has_host(found["address"]):
            raise ValueError(f"{WEBHOOKS_VARIABLE}: entry {place} is no http address; write name=https://… (not shown)")
        name = found["name"] or f"webhook{place}"
        if any(hook.name == name for hook in hooks):
            raise ValueError(f"{WEBHOOKS_VARIABLE}: two entries are named {name!r}; give each its own name")
        hooks.append(Webhook(name, found["address"]))
    return tuple(hooks)


def _has_host(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def slack_body(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as Slack and its likes read it: one line of text, and the figures below it."""
    alert, tone = message["alert"], message["severity"]
    if message["what"] == "resolved":
        tone = "resolved"
    fields = [
        {"title": name.replace("_", " "), "value": _escaped(_word(alert[name])), "short": name not in _LONG}
        for name in _SHOWN
        if alert.get(name) not in (None, 0)
    ]
    attachment = {"color": _COLOURS[tone], "fallback": _escaped(message["text"]), "fields": fields}
    return {"text": _escaped(message["text"]), "attachments": [attachment]}


def _word(value: Any) -> str:
    if isinstance(value, float):
        return value if isinstance(value := encode_number(value), str) else f"{value:.5g}"
    return str(value)


def _escaped(text: str) -> str:
    """Slack's three characters of control."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
