"""What people hear: each rule once, worse at once, no rule silenced by another, nothing again after a restart."""

from dataclasses import replace

import numpy as np
import pytest

from rungwise.analysis.alerts import Alert, Episode, make_row
from rungwise.analysis.detection.detectors import NonFinite
from rungwise.analysis.detection.spike import LossSpike
from rungwise.ladder.watching.delivery import Delivery
from rungwise.ladder.watching.outbox import Outbox
from rungwise.ladder.watching.receivers import Webhook

ALERT = Alert(
    rule="loss_level", metric="train/loss", family="run_change", severity="warning", state="open", step=100, since=98,
    updated=100, observed=3.1, expected=3.0, explanation="the loss rose by 0.1",
)  # fmt: skip


@pytest.fixture
def receiver(loopback):
    return loopback()


@pytest.fixture
def tell(tmp_path, receiver):
    """Tells a delivery of its own, as a restarted watch would, and sends; returns what was newly heard."""

    def call(*alerts, now, name="tiny/hero", folder=tmp_path):
        before = len(receiver.requests)
        delivery = Delivery(name, folder, receivers=[Webhook("ops", receiver.address)])
        delivery.tell(alerts, now=now)
        delivery.send(now=now)
        return [request["body"]["text"] for request in receiver.requests[before:]]

    return call


def test_delivery_of_a_storm_is_one_message_a_rule_and_run(tmp_path, receiver, tell):
    """A hundred spikes of one run with a non-finite gradient among them, fifty of another, within ten minutes."""
    opened, events = [], 0
    for run, first, bad in (("a", 100, 140), ("b", 150, None)):
        noise = np.random.default_rng(0)
        episodes = [Episode(LossSpike()), Episode(NonFinite())]
        for step in range(200):
            level = 4.2 if step >= first else 3.0
            values = {"train/loss": level + 0.01 * noise.standard_normal(), "train/nonfinite": float(step == bad)}
            row = make_row({"step": step, **values}, horizon_tokens=None, horizon_steps=None)
            changed = [alert for episode in episodes if (alert := episode.observe(row)) is not None]
            if changed:
                opened += tell(*changed, now=3.0 * step, name=f"tiny/{run}", folder=tmp_path / run)
        spike = episodes[0].alert
        assert spike is not None
        events += 1 + spike.held_back
    ends = [text for text in opened if " resolved " in text]
    assert [text.split(":")[0] for text in opened if text not in ends] == [
        "tiny/a critical loss_spike open at step 100",
        "tiny/a critical nonfinite open at step 140",
        "tiny/b critical loss_spike open at step 150",
    ]
    assert events == 150
    assert len(ends) <= 3
    assert len({request["key"] for request in receiver.requests}) == len(receiver.requests)


def test_delivery_of_a_restarted_watch_repeats_nothing(tell):
    assert len(tell(ALERT, now=0.0)) == 1
    assert tell(ALERT, now=10.0) == []
    assert tell(replace(ALERT, state="recovering", updated=130), now=20.0) == []
    assert len(tell(replace(ALERT, state="resolved", updated=140), now=30.0)) == 1
    assert tell(replace(ALERT, state="resolved", updated=140), now=40.0) == []


def test_delivery_records_what_is_only_to_know(tell, receiver):
    assert tell(replace(ALERT, severity="info"), now=0.0) == []
    assert receiver.requests == []


def test_delivery_lets_a_rise_in_severity_through_the_cool_down(tell):
    assert len(tell(ALERT, now=0.0)) == 1
    assert tell(replace(ALERT, state="worsening", updated=110), now=10.0) == []
    worse = replace(ALERT, state="worsening", updated=120, severity="critical")
    assert tell(worse, now=20.0) == ["tiny/hero critical loss_level worsening at step 120: the loss rose by 0.1"]
    assert tell(replace(worse, updated=130), now=30.0) == []


def test_delivery_tells_of_a_rise_that_has_eased_by_the_next_look(tell):
    tell(ALERT, now=0.0)
    worse = replace(ALERT, state="worsening", updated=120, severity="critical")
    eased = replace(worse, state="recovering", updated=125)
    assert tell(worse, eased, now=20.0) == [
        "tiny/hero critical loss_level recovering at step 125: the loss rose by 0.1"
    ]


def test_delivery_gathers_what_it_held_back_when_the_cool_down_ends(tell):
    tell(ALERT, now=0.0)
    tell(replace(ALERT, state="resolved", updated=110), now=60.0)
    for number in range(1, 6):
        again = replace(ALERT, step=100 + 100 * number, updated=100 + 100 * number)
        assert tell(again, now=600.0 * number) == []
        assert tell(replace(again, state="resolved", updated=again.step + 10), now=600.0 * number + 60.0) == []
    assert tell(now=3599.0) == []
    assert tell(now=3700.0) == ["tiny/hero warning loss_level: 5 more announcements held back within the cool-down"]
    assert tell(now=9000.0) == []


def test_delivery_of_one_rule_never_waits_for_anothers_cool_down(tell):
    tell(ALERT, now=0.0)
    assert len(tell(replace(ALERT, rule="grad_norm", metric="train/grad_norm"), now=1.0)) == 1


def test_delivery_to_a_first_watch_leaves_old_stories_out(tell):
    old = replace(ALERT, state="resolved", updated=200)
    fresh = replace(ALERT, step=300, updated=300)
    assert tell(old, fresh, now=0.0) == ["tiny/hero warning loss_level open at step 300: the loss rose by 0.1"]
    assert tell(old, fresh, now=9000.0) == []


def test_delivery_without_receivers_writes_nothing(tmp_path):
    assert not Delivery("tiny/hero", tmp_path / "run", receivers=()).tell([ALERT], now=0.0)
    assert not (tmp_path / "run").exists()


def test_delivery_killed_between_alert_and_message_is_made_up_for(tmp_path, receiver, tell):
    """The alert is in its file, the message not yet in the outbox: the next watch, over the same records, puts it."""
    other = replace(ALERT, rule="grad_norm")
    tell(other, now=0.0)
    assert len(tell(other, ALERT, now=5.0)) == 1
    assert len(Outbox(tmp_path).messages) == 2
