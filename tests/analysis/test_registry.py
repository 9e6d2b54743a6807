"""A registered forecast: written once, whole, and never changed unnoticed."""

from dataclasses import replace
from pathlib import Path

import pytest

from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.registry import load_registered, register


@pytest.fixture
def forecast() -> Forecast:
    rows = [{"flops": c, "loss": loss} for c, loss in ((1e18, 3.52), (1e19, 3.15), (1e20, 2.852), (1e21, 2.596))]
    return forecast_final(rows, {"flops": 1e23})


def test_register_writes_one_file_named_by_its_hash(tmp_path: Path, forecast: Forecast):
    folder = tmp_path / "forecasts"
    digest = register(forecast, folder)
    assert [path.name for path in folder.iterdir()] == [f"{digest}.json"]
    assert load_registered(folder) == forecast


def test_register_the_same_content_again_changes_nothing(tmp_path: Path, forecast: Forecast):
    digest = register(forecast, tmp_path)
    before = (tmp_path / f"{digest}.json").stat().st_mtime_ns
    assert register(forecast, tmp_path) == digest
    assert (tmp_path / f"{digest}.json").stat().st_mtime_ns == before


def test_register_refuses_other_content_and_names_both(tmp_path: Path, forecast: Forecast):
    other = replace(forecast, level=0.8)
    register(forecast, tmp_path)
    with pytest.raises(ValueError, match=forecast.hash) as caught:
        register(other, tmp_path)
    assert other.hash in str(caught.value)
    assert load_registered(tmp_path) == forecast


@pytest.mark.parametrize(("old", "new"), [('"level": 0.9', '"level": 0.5'), ('"hash": "', '"hash": "0'), ("{", "")])
def test_load_detects_a_changed_file(tmp_path: Path, forecast: Forecast, old: str, new: str):
    path = tmp_path / f"{register(forecast, tmp_path)}.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match="was changed"):
        load_registered(tmp_path)
    with pytest.raises(ValueError, match="was changed"):
        register(forecast, tmp_path)


def test_load_of_an_empty_or_missing_folder_is_none(tmp_path: Path):
    assert load_registered(tmp_path) is None
    assert load_registered(tmp_path / "nowhere") is None


def test_a_forecast_of_an_earlier_version_is_read_under_its_own_hash(tmp_path: Path, forecast: Forecast):
    """Fields added since are left out of the content where they are unset, so that old hashes stay true."""
    earlier = replace(forecast, method=None)
    record = earlier.to_dict()
    assert "method" not in record
    assert Forecast.from_dict(record) == earlier
    digest = register(earlier, tmp_path)
    found = load_registered(tmp_path)
    assert found is not None
    assert (found.hash, found.method) == (digest, None)
    assert forecast.hash != digest
