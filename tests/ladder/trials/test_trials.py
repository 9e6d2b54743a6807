"""The trials of the platform in miniature: a short hero of planted rungs, trained for real, with real faults."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungwise.analysis.registry import register
from rungwise.analysis.source import load_run
from rungwise.ladder.family import load_family
from rungwise.ladder.home import forecasts_folder
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.predict import forecast_runs, load_family_runs

pytestmark = pytest.mark.slow

EDITS = {
    'name = "tiny"': 'name = "mini"',
    "num_layers = 3 ": "num_layers = 2 ",
    "tokens_per_active_param = 10": "tokens_per_active_param = 2",
    "num_sequences = ": "num_sequences = 96 #",
}


@pytest.fixture
def mini(edited_family: Callable[..., Path]) -> Path:
    """`tiny` made shallow and short, its hero little larger than its top rung."""

    def smaller_hero(text: str) -> str:
        head, hero = text.split("[hero]")
        return f"{head}[hero]" + hero.replace("= 128", "= 96", 1).replace("= 8", "= 3", 1)

    return edited_family(EDITS, then=smaller_hero)


@pytest.fixture
def planted_home(mini: Path, tracked_home: Path, write_family_run: Callable[..., None]) -> Path:
    """Finished rungs of `mini` by a planted law, and a forecast of them."""
    for plan in plan_ladder(load_family(str(mini))).rungs:
        write_family_run(tracked_home, "mini", plan)
    runs = load_family_runs(str(mini), home=tracked_home)
    register(forecast_runs(runs), forecasts_folder(tracked_home, "mini"))
    (tracked_home / "mini" / "family.toml").write_text(mini.read_text())
    return tracked_home


def _trial(name: str, *words: str | Path) -> list[Any]:
    """Objects that a trial printed."""
    command = [sys.executable, "-P", "-m", f"rungwise.ladder.trials.{name}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    text, found, decoder = done.stdout.strip(), [], json.JSONDecoder()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def test_month_finds_a_poisoned_weight_and_says_nothing_of_a_kill(mini: Path, planted_home: Path, tmp_path: Path):
    cases = ("healthy", "a weight is NaN", "killed and resumed")
    words = [word for case in cases for word in ("--case", case)]
    words += ["--home", str(planted_home), "--work", str(tmp_path / "work")]
    healthy, poisoned, killed = _trial("simulated_month", mini, *words)
    assert (healthy["rule"], killed["rule"]) == (None, None)
    assert poisoned["severity"] == "critical"
    assert 1 <= poisoned["delay"] <= 2
    assert healthy["loss"] == killed["loss"], "a kill leaves no trace in the losses"


def test_a_locked_store_costs_no_point(mini: Path, tmp_path: Path):
    words = ("--rung", "d48", "--home", tmp_path / "work", "--trouble", "locked", "--pairs", "1")
    (found,) = _trial("store_trouble", mini, *words)
    assert found["store_holds_every_point"]
    assert found["step_time"]["ratio"] > 0


def test_overhead_records_half_of_the_steps_and_measures_both(mini: Path, planted_home: Path, tmp_path: Path):
    work = tmp_path / "work"
    (found,) = _trial("overhead", mini, "--home", planted_home, "--work", work, "--pairs", "1")
    assert found["step_time"]["ratio"] > 0
    assert found["mirror_cpu_seconds_per_second_of_steps"] > 0
    assert 0 < found["record_cpu_share"] < 1
    record = load_run(work / "mini" / "runs" / "hero")
    steps = record.trajectory.frame["step"].tolist()
    assert record.state == "finished"
    assert found["steps_a_window"] < len(steps) < record.plan["steps"]
