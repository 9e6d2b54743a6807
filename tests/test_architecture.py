"""The import rule, walked in the syntax trees: who may import whom, and how."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "comm": set(),
    "model": {"comm"},
    "analysis": set(),
    "ladder": {"comm", "model", "analysis"},
}
HEAVY = ("jax", "numpy", "pandas", "mlflow", "pydantic")
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
OURS_AND_TESTS = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names a syntax tree imports, at any depth; a relative import keeps its leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            deeper = module in ("rungwise", ".")
            yield from ((f"{module}.{alias.name}" for alias in node.names) if deeper else (module,))


def broken_arrows(package: str, source: str) -> list[str]:
    """Imports in a file of `package` that the table of the design does not allow."""
    allowed = MAY_IMPORT[package] | {package, "__version__"}
    named = (name.split(".") for name in imports(ast.parse(source)))
    return [".".join(parts) for parts in named if parts[0] == "rungwise" and parts[1:2] and parts[1] not in allowed]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_packages_import_only_what_the_table_allows(path):
    assert not broken_arrows(path.relative_to(ROOT).parts[0], path.read_text())


def test_arrow_check_sees_a_forbidden_import_at_any_depth():
    source = "def judge():\n    from rungwise.ladder.launching.run import run_ladder\n    from rungwise import model\n"
    assert broken_arrows("analysis", source) == ["rungwise.ladder.launching.run", "rungwise.model"]


@pytest.mark.parametrize("path", OURS_AND_TESTS, ids=_name)
def test_imports_are_absolute_and_rooted_in_rungwise(path):
    for name in imports(ast.parse(path.read_text())):
        assert not name.startswith("."), f"relative import {name}"
        assert name.split(".")[0] not in MAY_IMPORT, f"import {name} without its root rungwise"


@pytest.mark.parametrize("path", OURS_AND_TESTS, ids=_name)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=_name)
def test_package_init_is_a_docstring(path):
    body = ast.parse(path.read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_vocabulary_is_standard_library_only():
    tree = ast.parse((ROOT / "analysis" / "vocabulary.py").read_text())
    assert {name.split(".")[0] for name in imports(tree)} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT / "analysis")], ids=_name)
def test_analysis_names_no_jax(path):
    roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}


def _modules_after(code: str) -> set[str]:
    report = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    child = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\n{report}"],
        env=os.environ | {"TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(child.stdout.splitlines()[-1].split())


def test_help_imports_nothing_heavy():
    code = "import sys; from rungwise.ladder.cli import app; app(['--help'], standalone_mode=False)"
    modules = _modules_after(code)
    assert "typer" in modules
    assert not modules & set(HEAVY)


def test_analysis_runs_without_jax():
    ours = [path.relative_to(ROOT) for path in FILES if path.is_relative_to(ROOT / "analysis")]
    names = [".".join(path.with_suffix("").parts) for path in ours if path.stem not in ("__init__", "__main__")]
    modules = _modules_after("\n".join(f"import rungwise.{name}" for name in names))
    assert not modules & {"jax", "flax", "mlflow"}
