"""Webhooks: what is sent, how an answer is read, and that an address is never said."""

import math
import socket
import time
import traceback

import pytest

from rungwise.ladder.watching.receivers import Webhook, load_receivers, slack_body

MESSAGE = {
    "id": "tiny/hero/nonfinite/train/loss/140/open",
    "what": "open",
    "severity": "critical",
    "text": "tiny/hero critical nonfinite open at step 140: loss is nan <best 2.9 & falling>",
    "alert": {"observed": math.nan, "expected": 2.9, "since": 140, "step": 140, "carrier": None, "held_back": 0},
}


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "delivered"), (204, "delivered"), (500, "failed"), (503, "failed"), (429, "failed"), (408, "failed"),
     (404, "refused"), (400, "refused"), (302, "refused")],
)  # fmt: skip
def test_webhook_reads_an_answer(loopback, status, outcome):
    answer = Webhook("ops", loopback(status).address).deliver(MESSAGE)
    assert (answer.outcome, answer.reason) == (outcome, f"HTTP {status}")


def test_webhook_posts_what_slack_reads_with_the_key_and_the_login(loopback):
    receiver = loopback()
    Webhook("ops", receiver.address).deliver(MESSAGE)
    (request,) = receiver.requests
    assert request["key"] == MESSAGE["id"]
    assert request["user"].startswith("Basic ")
    assert request["body"]["text"].endswith("loss is nan &lt;best 2.9 &amp; falling&gt;")
    (attachment,) = request["body"]["attachments"]
    assert {"title": "observed", "value": "NaN", "short": True} in attachment["fields"]
    assert not [entry for entry in attachment["fields"] if entry["title"] in ("carrier", "held back")]


def test_webhook_honours_the_time_it_is_asked_to_wait(loopback):
    assert Webhook("ops", loopback(429, **{"Retry-After": "120"}).address).deliver(MESSAGE).retry_after == 120.0


def test_webhook_gives_a_slow_receiver_up(loopback, monkeypatch):
    monkeypatch.setattr("rungwise.ladder.watching.receivers.TIMEOUT_S", 0.1)

    def late() -> int:
        time.sleep(0.5)
        return 200

    answer = Webhook("ops", loopback(late).address).deliver(MESSAGE)
    assert (answer.outcome, answer.reason) == ("failed", "timed out")


def test_webhook_errors_never_hold_the_address(loopback):
    secret = "T0PSECRET-9f2c"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (
        f"http://127.0.0.1:{port}/{secret}",
        f"http://{secret}.invalid/x",
        f"http://127.0.0.1/{secret}\x01",
    ):
        answer = Webhook("ops", address).deliver(MESSAGE)
        assert answer.outcome == "failed"
        assert secret not in repr(answer)
    assert secret not in repr(Webhook("ops", f"https://{secret}"))


@pytest.mark.parametrize(
    "words", ["T0PSECRET", "ops=ftp://T0PSECRET", "a=https://T0PSECRET a=https://b", "https://:80/T0PSECRET"]
)
def test_receivers_refuse_a_wrong_entry_without_showing_it(words):
    with pytest.raises(ValueError, match="RUNGWISE_WEBHOOKS") as caught:
        load_receivers({"RUNGWISE_WEBHOOKS": words})
    assert "T0PSECRET" not in "".join(traceback.format_exception(caught.value))


def test_receivers_of_no_environment_are_none():
    assert load_receivers({}) == ()
    named = load_receivers({"RUNGWISE_WEBHOOKS": "ops=https://a/x?q=1\n https://b/y"})
    assert [hook.name for hook in named] == ["ops", "webhook2"]


def test_slack_body_of_an_end_is_green():
    assert slack_body(MESSAGE | {"what": "resolved"})["attachments"][0]["color"] == "#1d7a46"
