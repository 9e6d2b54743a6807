"""What a teammate sees who has the tracking address and nothing else: the owner's runs, forecast and verdict."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from rungwise.analysis.registry import load_registered_mlflow
from rungwise.ladder.family import family_text
from rungwise.ladder.home import forecasts_folder, resolve_tracking, run_folder
from rungwise.ladder.launching.status import family_status
from rungwise.ladder.predict import forecast_runs, load_family_runs, register_forecast
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.recording.tracking import mirror_folder
from rungwise.ladder.watching.watch import follow_run, judge_loaded, judge_run, load_watched


def mirror_all(home: Path, uri: str) -> None:
    for folder in sorted((home / "tiny" / "runs").iterdir()):
        mirror_folder(folder, uri)


@pytest.fixture
def store(registered_home: Path) -> str:
    """The address of a store that has the rungs of `tiny` and the registered forecast."""
    runs, uri = load_family_runs("tiny", home=registered_home), resolve_tracking(registered_home)
    assert runs.registered is not None
    mirror_all(registered_home, uri)
    register_forecast(runs.registered, runs, home=registered_home)
    return uri


def test_teammate_finds_the_registered_forecast_and_makes_the_same(store, registered_home, tmp_path):
    ours = load_family_runs("tiny", home=registered_home)
    theirs = load_family_runs("tiny", home=tmp_path / "empty", tracking=store)
    assert theirs.registered == ours.registered
    assert forecast_runs(theirs) == forecast_runs(ours)


def test_teammate_cannot_register_another_forecast(store, tmp_path):
    runs = load_family_runs("tiny", home=tmp_path / "empty", tracking=store)
    with pytest.raises(ValueError, match="never replaced"):
        register_forecast(forecast_runs(runs, level=0.5), runs, home=tmp_path / "empty", tracking=store)
    assert load_registered_mlflow(store, "tiny") == runs.registered


def test_teammate_is_told_of_a_changed_forecast(store, registered_home, tmp_path):
    (kept,) = (registered_home / "mlflow-artifacts").rglob(
        f"{next(forecasts_folder(registered_home, 'tiny').iterdir()).name}"
    )
    kept.write_text(kept.read_text().replace('"level": 0.9', '"level": 0.8'))
    with pytest.raises(ValueError, match=r"was changed: content hashes to"):
        load_family_runs("tiny", home=tmp_path / "empty", tracking=store)


def test_teammate_needs_no_family_file_for_runs_that_are_in_the_store(registered_home, write_part, tmp_path):
    uri = resolve_tracking(registered_home)
    text = family_text("tiny").replace('name = "tiny"', 'name = "ours"', 1)
    shutil.move(registered_home / "tiny", registered_home / "ours")
    (registered_home / "ours" / "family.toml").write_text(text)
    config = run_folder(registered_home, "ours", "d32") / "config.json"
    config.write_text(config.read_text().replace('"family": "tiny"', '"family": "ours"'))
    mirror_folder(config.parent, uri)
    runs = load_family_runs("ours", home=tmp_path / "empty", tracking=uri)
    assert (runs.family, [record.run for record in runs.records]) == ("ours", ["d32"])
    with pytest.raises(ValueError, match="'others' is unknown"):
        load_family_runs("others", home=tmp_path / "empty", tracking=uri)


def test_teammate_sees_how_far_the_runs_are(store, registered_home, write_hero, tmp_path):
    write_hero()
    mirror_folder(run_folder(registered_home, "tiny", "hero"), store)
    ours = family_status("tiny", home=registered_home)
    theirs = family_status("tiny", home=tmp_path / "empty", tracking=store)
    assert [run["state"] for run in theirs["runs"]] == ["done"] * len(ours["runs"])
    assert theirs == {**ours, "runs": [{**run, "seconds_left": None} for run in ours["runs"]]}
    assert {run["state"] for run in family_status("tiny", home=tmp_path / "empty")["runs"]} == {"not started"}


def test_teammate_judges_as_the_owner_does(store, registered_home, write_hero, tmp_path):
    write_hero(shift=0.3)
    mirror_folder(run_folder(registered_home, "tiny", "hero"), store)
    ours = judge_loaded(load_watched("tiny", "hero", home=registered_home), "hero")
    theirs = judge_run(
        load_watched("tiny", "hero", home=tmp_path / "empty", tracking=store), "hero", home=tmp_path / "empty"
    )
    assert theirs == ours
    assert not (tmp_path / "empty").exists()


def test_teammate_follows_a_hero_through_the_store(store, registered_home, write_hero, tmp_path):
    write_hero(shift=0.3)
    folder = run_folder(registered_home, "tiny", "hero")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    expected = judge_loaded(load_watched("tiny", "hero", home=registered_home), "hero")
    runs, found = load_watched("tiny", "hero", home=tmp_path / "empty", tracking=store), []
    follower = threading.Thread(
        target=lambda: found.append(follow_run(runs, "hero", home=tmp_path / "empty", tracking=store, every=0.1)),
        daemon=True,
    )
    follower.start()
    with Journal(folder, family="tiny", run="hero"):  # somebody writes it
        for part in range(1, 4):
            (folder / "metrics.jsonl").write_bytes(b"".join(lines[: len(lines) * part // 3]))
            mirror_folder(folder, store)
    follower.join(timeout=60)
    assert found[0].alerts == expected.alerts
    assert (found[0].state, found[0].step) == (expected.state, expected.step)


@pytest.mark.slow
def test_teammate_needs_only_the_address_of_a_server(registered_home, write_hero, mlflow_server, ladder, tmp_path):
    write_hero(shift=0.3)
    here, page = ("--home", registered_home), tmp_path / "page.html"

    def printed(*words: object, code: int) -> dict:
        result = ladder(*words, "--json")
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    with mlflow_server() as uri:
        mirror_all(registered_home, uri)
        there = ("--home", tmp_path / "empty", "--tracking", uri)
        assert printed("forecast", "tiny", *there, code=0) == printed("forecast", "tiny", *here, code=0)
        verdict = printed("watch", "tiny", *there, code=10)
        assert verdict == printed("watch", "tiny", *here, code=10)
        assert printed("watch", "tiny", "--follow", *there, code=10)["alerts"] == verdict["alerts"]
        printed("report", "tiny", "--output", page, *there, code=0)
    assert not (tmp_path / "empty").exists()
    assert "did not hold" in page.read_text()
    assert "jax 0.10.2" in page.read_text()
