"""Declared changes: checked when declared, shown where people look."""

import json

import pytest

from rungwise.analysis.events import Change
from rungwise.analysis.source import load_run
from rungwise.ladder.changing.declare import declare_event
from rungwise.ladder.home import run_folder


def test_event_is_written_as_the_detectors_read_it(tracked_home, write_hero):
    write_hero(steps=20)
    declare_event(
        "tiny", "hero", "mixture", home=tracked_home, step=15, note="more code", grace=10,
        expect=["train/loss +0.03", "train/grad_norm -14%", "moe/* either", "eval/loss none"],
    )  # fmt: skip
    (event,) = load_run(run_folder(tracked_home, "tiny", "hero")).events
    change = Change.of(event)
    assert (change.kind, change.step, change.grace, change.text) == ("mixture", 15, 10, "more code")
    effects = {metric: str(effect) for metric, effect in change.effects.items()}
    assert effects == {"train/loss": "up 0.03", "train/grad_norm": "down 14.0%", "moe/*": "either", "eval/loss": "none"}


def test_event_without_a_step_is_for_the_next(tracked_home, write_hero):
    write_hero(steps=20)
    assert declare_event("tiny", "hero", "note", home=tracked_home, note="hello")["step"] == 21


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "mixtures"}, "use one of transport, mixture"),
        ({"run": "d33"}, "no folder"),
        ({"step": 0}, "from 1 to"),
        ({"step": 10**9}, "from 1 to"),
        ({"expect": ["train/los +0.03"]}, "did you mean train/loss"),
        ({"expect": ["train/loss"]}, "names no effect"),
        ({"expect": ["train/loss quite a bit"]}, "none of: up"),
    ],
)
def test_event_that_says_nothing_clear_is_refused_and_not_written(tracked_home, write_hero, change, said):
    write_hero(steps=5)
    words = {"run": "hero", "kind": "mixture", "step": 3} | change
    with pytest.raises(ValueError, match=said):
        declare_event("tiny", words.pop("run"), words.pop("kind"), home=tracked_home, **words)
    assert not (run_folder(tracked_home, "tiny", "hero") / "events.jsonl").exists()


@pytest.mark.slow
def test_event_from_the_command_line_shows_in_the_report(ladder, registered_home, write_hero):
    write_hero()
    words = ["--kind", "mixture", "--step", "90", "--expect", "train/loss +0.03", "--note", "more code"]
    told = ladder("event", "tiny", *words, "--json", "--home", registered_home)
    assert json.loads(told.stdout)["expected"] == {"train/loss": 0.03}
    with pytest.raises(ValueError, match="declared already"):
        declare_event(
            "tiny", "hero", "mixture", home=registered_home, step=90, expect=["train/loss +0.03"], note="more code"
        )
    page = registered_home / "page.html"
    assert ladder("report", "tiny", "--output", page, "--home", registered_home).returncode == 0
    shown = page.read_text()
    assert 'id="events"' in shown
    assert "train/loss +0.03" in shown
    assert "more code" in shown
