"""The tour runs on a finished ladder, in a kernel of its own, and says nothing about the machine it ran on."""

import ast
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rungwise.ladder.home import resolve_tracking
from rungwise.ladder.recording.tracking import mirror_folder

TOUR = Path(__file__).parents[2] / "notebooks" / "tour.ipynb"


@pytest.mark.slow
def test_tour_runs_on_a_finished_ladder(
    tracked_home: Path, registered_home: Path, write_hero: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    write_hero()
    for folder in (registered_home / "tiny" / "runs").iterdir():
        mirror_folder(folder, resolve_tracking(tracked_home))
    monkeypatch.setenv("RUNGWISE_HOME", str(tracked_home))
    tour = nbformat.read(TOUR, 4)
    NotebookClient(tour, resources={"metadata": {"path": str(tracked_home)}}).execute()
    outputs = [output for cell in tour.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert str(tracked_home) not in nbformat.writes(tour)


def test_tour_defines_nothing():
    cells = (cell for cell in nbformat.read(TOUR, 4).cells if cell.cell_type == "code")
    lines = (line for cell in cells for line in cell.source.splitlines() if not line.startswith("%"))
    tree = ast.parse("\n".join(lines))
    assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) for node in ast.walk(tree))
