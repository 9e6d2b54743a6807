"""The outbox with real receivers: all arrives, nothing twice, nothing is tried for ever, a kill changes nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rungwise.ladder.watching.outbox import GIVE_UP_AFTER_S, Outbox, retry_delay
from rungwise.ladder.watching.receivers import Webhook

ALERT = {"observed": 5.0, "expected": 3.0, "since": 100, "step": 100}


def message(text="tiny/hero warning loss_spike open at step 100: it rose"):
    return {
        "what": "open",
        "rule": "loss_spike",
        "severity": "warning",
        "text": text,
        "alert": ALERT,
        "run": "tiny/hero",
    }


def test_outbox_delivers_to_each_receiver_once_through_failures_and_restarts(tmp_path, loopback):
    failing, healthy = loopback(500, 500), loopback()
    receivers = [Webhook("a", failing.address), Webhook("b", healthy.address)]
    now = 1000.0
    Outbox(tmp_path).put("k", message(), ["a", "b"], now=now)
    for _ in range(40):  # every second, by another monitor each time
        Outbox(tmp_path).send(receivers, now=now)
        now += 1.0
    assert (len(failing.requests), failing.accepted) == (3, ["k"])
    assert (len(healthy.requests), healthy.accepted) == (1, ["k"])
    assert Outbox(tmp_path).pending == Outbox(tmp_path).given_up == []


def test_outbox_tries_fifteen_times_in_ten_minutes_of_outage_however_much_waits(tmp_path, loopback):
    receiver = loopback(*[503] * 15)
    outbox = Outbox(tmp_path, jitter=0.0)
    for number in range(50):
        outbox.put(f"k{number}", message(), ["a"], now=0.0)
    for second in range(600):
        outbox.send([Webhook("a", receiver.address)], now=float(second))
    assert len(receiver.requests) == 15
    assert {request["key"] for request in receiver.requests} == {"k0"}
    outbox.send([Webhook("a", receiver.address)], now=660.0)
    assert receiver.accepted == [f"k{number}" for number in range(50)]


def test_outbox_gives_up_what_is_refused_at_once_and_an_outage_after_an_hour(tmp_path, loopback):
    refusing, dead = loopback(404), loopback(*[500] * 1000)
    receivers = [Webhook("a", refusing.address), Webhook("b", dead.address)]
    outbox = Outbox(tmp_path)
    outbox.put("k", message(), ["a", "b"], now=0.0)
    outbox.send(receivers, now=0.0)
    assert outbox.given_up == [("k", "a")]
    for turn in range(1, 400):
        outbox.send(receivers, now=10.0 * turn)
    assert sorted(outbox.given_up) == [("k", "a"), ("k", "b")]
    assert (len(refusing.requests), outbox.pending) == (1, [])
    assert 50 < len(dead.requests) < 70
    outbox.put("later", message(), ["a"], now=6000.0)
    outbox.send(receivers, now=6000.0)
    assert outbox.given_up == [("k", "b")]  # the other has heard something since


def test_outbox_gives_up_a_receiver_that_is_no_longer_named(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put("k", message(), ["gone"], now=0.0)
    outbox.send([], now=10.0)
    assert outbox.pending == [("k", "gone")]
    outbox.send([], now=GIVE_UP_AFTER_S)
    assert outbox.given_up == [("k", "gone")]


def test_outbox_keeps_a_message_once_by_its_key(tmp_path):
    first, second = Outbox(tmp_path), Outbox(tmp_path)
    assert first.put("k", message(), ["a"], now=0.0)
    assert not second.put("k", message("another text"), ["a"], now=1.0)
    assert not second.hold("k", "loss_spike", "cool-down")
    assert list(second.messages) == ["k"]


def test_outbox_reads_past_a_torn_and_a_corrupt_line(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put("k", message(), ["a"], now=0.0)
    with outbox.path.open("ab") as file:
        file.write(b'{"kind": "receipt", "id"\n\xff\xfe\n{"kind": "mess')
    other = Outbox(tmp_path)
    assert other.pending == [("k", "a")]
    assert other.put("l", message(), ["a"], now=1.0)
    assert Outbox(tmp_path).pending == [("k", "a"), ("l", "a")]


def test_outbox_waits_differ_by_the_jitter_and_no_more():
    waits = {retry_delay(3, key=str(number), jitter=0.1) for number in range(200)}
    assert len(waits) == 200
    assert 7.2 <= min(waits) < 7.4
    assert 8.6 < max(waits) <= 8.8


def test_outbox_sender_killed_in_the_middle_is_followed_by_one_that_loses_nothing(tmp_path, loopback):
    """The first sender dies while the receiver is thinking; the next asks again with the same key."""
    receiver = loopback(lambda: time.sleep(1.0) or 500)
    outbox = Outbox(tmp_path)
    for number in range(3):
        outbox.put(f"k{number}", message(), ["ops"], now=time.time())
    command = [sys.executable, "-P", "-m", "rungwise.ladder.watching.outbox", str(tmp_path)]
    environment = os.environ | {"RUNGWISE_WEBHOOKS": f"ops={receiver.address}"}
    killed = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    while not receiver.requests:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    _, said = killed.communicate()
    assert said == b""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert receiver.accepted == ["k0", "k1", "k2"]
    assert receiver.requests[0]["key"] == receiver.requests[1]["key"] == "k0"
    outbox.refresh()
    assert outbox.pending == []
    written = "".join(path.read_text() for path in tmp_path.iterdir()) + done.stdout + done.stderr
    assert receiver.SECRET not in written
    assert "127.0.0.1" not in written


def test_outbox_of_two_senders_sends_once(tmp_path, loopback):
    receiver = loopback(lambda: time.sleep(0.3) or 200)
    first, second = Outbox(tmp_path), Outbox(tmp_path)
    first.put("k", message(), ["a"], now=0.0)
    hooks = [Webhook("a", receiver.address)]
    busy = threading.Thread(target=first.send, args=(hooks,))
    busy.start()
    while not receiver.requests:
        time.sleep(0.005)
    second.send(hooks)
    busy.join()
    second.send(hooks)
    assert receiver.accepted == ["k"]
    assert len(receiver.requests) == 1


def test_outbox_lines_are_strict_json(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put("k", message() | {"alert": ALERT | {"observed": float("nan")}}, ["a"], now=0.0)
    for line in outbox.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
