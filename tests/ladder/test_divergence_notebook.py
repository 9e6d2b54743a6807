"""The notebook of a replayed divergence runs on the shipped data, and shows what its text says."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "divergence.ipynb"


@pytest.mark.slow
def test_divergence_notebook_runs_and_finds_what_was_planted():
    book = nbformat.read(NOTEBOOK, 4)
    NotebookClient(book, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = {cell.id: "".join(output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", []))
             for cell in book.cells}  # fmt: skip
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert shown["control"] == "0"
    assert "loss_spike" in shown["alerts"]
    assert "loss_level" in shown["alerts"]
    assert "unexpected_effect" in shown["declared"]


def test_divergence_notebook_defines_nothing():
    cells = (cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code")
    lines = (line for cell in cells for line in cell.source.splitlines() if not line.startswith("%"))
    tree = ast.parse("\n".join(lines))
    assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) for node in ast.walk(tree))
