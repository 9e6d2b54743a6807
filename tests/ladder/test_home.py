import os
from pathlib import Path

import pytest

from rungwise.ladder.home import (
    make_folder,
    read_json,
    resolve_home,
    resolve_tracking,
    run_folder,
    write_json,
)


def test_home_argument_wins_over_environment_over_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert resolve_home() == tmp_path / "rungwise-runs"
    monkeypatch.setenv("RUNGWISE_HOME", str(tmp_path / "set"))
    assert resolve_home() == tmp_path / "set"
    assert resolve_home(tmp_path / "given") == tmp_path / "given"


def test_home_tracking_defaults_to_a_database_at_home(monkeypatch, tmp_path):
    assert resolve_tracking(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert resolve_tracking(tmp_path) == "http://host:5000"
    assert resolve_tracking(tmp_path, "http://other") == "http://other"


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden"])
def test_home_refuses_names_that_leave_it(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a folder"):
        run_folder(tmp_path, "tiny", name)


def test_home_unwritable_folder_is_one_line_with_path_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/runs cannot be created .*--home") as raised:
        make_folder(tmp_path / "file" / "runs")
    assert "\n" not in str(raised.value)


def test_home_json_is_replaced_whole_and_carries_its_schema(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"schema": 1, "loss": "NaN"}
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    assert read_json(path) == {"schema": 1, "loss": "NaN"}
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2}', "schema 2 .* upgrade"),
        ("[]", "schema None"),
        ('{"schema": NaN}', "strict JSON"),
        ("{", "JSON"),
    ],
)
def test_home_json_of_another_kind_is_refused_by_name(tmp_path: Path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_json(path)
    assert str(path) in str(raised.value)
