"""The report: one page that loads nothing, opens with the four things, and hides no failure."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from rungwise.ladder.home import run_folder
from rungwise.ladder.predict import load_family_runs
from rungwise.ladder.recording.journal import Journal, append_event
from rungwise.ladder.reporting.report import write_report
from rungwise.ladder.reporting.report_nowcast import nowcast_section

VOID = {"meta", "br", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """Checks that every element is closed in turn, and keeps text by section, ids and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.ids: list[str] = []
        self.loads: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "section":
            self._section = values["id"] or ""
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            if values.get(name) and not (values[name] or "").startswith(("#", "data:")):
                self.loads.append(f"{tag} {name}={values[name]}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        self.sections[self._section] = self.sections.get(self._section, "") + data


def page(home) -> Page:
    text = write_report("tiny", home=home).read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    return Page(text)


def test_report_is_whole_html_that_loads_nothing(registered_home, write_hero):
    write_hero()
    found = page(registered_home)
    assert found.open == []
    assert found.loads == []
    assert len(found.ids) == len(set(found.ids))
    assert {"opening", "plan", "fit", "floor", "trajectory", "drops", "alerts", "runs"} <= set(found.sections)


@pytest.mark.parametrize(("shift", "verdict"), [(0.005, "held"), (0.3, "did not hold")])
def test_report_opens_with_forecast_interval_outcome_verdict(registered_home, write_hero, shift, verdict):
    write_hero(shift=shift)
    opening = page(registered_home).sections["opening"]
    forecast = load_family_runs("tiny", home=registered_home).registered
    assert forecast is not None
    words = ["forecast", f"{forecast.point:.4f}", "90% interval", f"{forecast.low:.3f} – {forecast.high:.3f}"]
    positions = [opening.index(word) for word in [*words, "outcome", "verdict", verdict]]
    assert positions == sorted(positions)
    assert ("The forecast did not hold: the hero ended at" in opening) is (verdict != "held")


def test_report_before_the_hero_leaves_the_verdict_open(registered_home):
    opening = page(registered_home).sections["opening"]
    assert "open" in opening
    assert "the hero has not started" in opening


def test_report_without_a_forecast_says_so(rungs_home):
    found = page(rungs_home)
    assert "none is registered" in found.sections["opening"]
    assert "fit" not in found.sections


def test_report_names_failed_attempts_and_escapes_what_they_said(registered_home, write_part):
    write_part("d48", steps=20)
    folder = registered_home / "tiny" / "runs" / "d48"
    with Journal(folder, family="tiny", run="d48") as journal:
        journal.start_attempt(10)
        journal.end(12, "failed", "<script>no space</script>")
    text = page(registered_home).sections["runs"]
    assert "Attempt 1 of d48 was killed." in text
    assert "Attempt 2 of d48 was failed (<script>no space</script>)." in text


def test_report_lists_hashes_and_versions(registered_home):
    text = page(registered_home).sections["provenance"]
    for word in ("forecast", "corpus", "c" * 64, "jax 0.10.2", "config of d32", "last eval/loss"):
        assert word in text


def test_report_shows_the_nowcast_of_a_hero_under_way_and_its_record_afterwards(registered_home, write_hero):
    folder = run_folder(registered_home, "tiny", "hero")

    def section():
        return nowcast_section(load_family_runs("tiny", home=registered_home))

    assert not section()
    write_hero(steps=500)
    under_way = page(registered_home).sections
    assert under_way["trajectory"].count("the rest of the curve as the run so far has it") == 2
    assert "At 40% of the run the final eval/loss is forecast as" in under_way["nowcast"]
    assert "Nowcast of the hero at 40%: final eval/loss" in under_way["opening"]
    append_event(folder, "context", 400)
    assert section().text[0].startswith("There is no nowcast: eval/loss is no longer comparable")
    shutil.rmtree(folder)
    write_hero()
    record = section()
    assert record.text == [f"5 of 5 nowcasts held the outcome, {record.tables[0].rows[-1][1]}."]
    marks = ["none: registered", "10%", "20%", "40%", "59%", "79%", "all: outcome"]
    assert [row[0] for row in record.tables[0].rows] == marks
