"""Run every table and write them to one Markdown page.

python -m rungwise.analysis.benchmarks [final_loss calibration trajectory divergence] [--out docs/benchmarks.md]

Parts that are named replace their section of a page that is there, and leave the others.

The folder of public runs is named by RUNGWISE_REFERENCE_DATA. Public tools that are installed are measured beside ours:
pip install chinchilla simple-scaling-laws.
"""

import argparse
import importlib
import platform
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import scipy

PARTS: Final = {
    "final_loss": "Final losses",
    "calibration": "Calibration of final-loss intervals",
    "trajectory": "Trajectories",
    "divergence": "Alerts",
    "incidents": "Published incidents",
}
"""Modules of this package, each with `tables()`: a list of (title, table, note)."""


def to_markdown(table: pd.DataFrame) -> str:
    """A pipe table; numbers to four significant figures, whole ones as they are."""
    head = "| " + " | ".join(str(name) for name in table.columns) + " |"
    rule = "|" + "|".join("---" for _ in table.columns) + "|"
    rows = ("| " + " | ".join(_cell(value) for value in row) + " |" for row in table.itertuples(index=False))
    return "\n".join([head, rule, *rows])


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return str(value)


def page(parts: list[str]) -> str:
    """The whole page as Markdown."""
    packages = ", ".join(f"{module.__name__} {module.__version__}" for module in (np, scipy, pd))
    lines = [
        "# Benchmarks",
        "",
        "Made by `python -m rungwise.analysis.benchmarks`, on public runs in the folder that RUNGWISE_REFERENCE_DATA "
        f"names, with Python {platform.python_version()}, {packages}. Errors are relative, in percent, unless said "
        "otherwise. What was not reached is said in the notes.",
    ]
    for part in parts:
        start = time.process_time()
        module = importlib.import_module(f"rungwise.analysis.benchmarks.{part}")
        lines += ["", f"## {PARTS[part]}"]
        for title, table, note in module.tables():
            lines += ["", f"### {title}", "", to_markdown(table), "", note]
        print(f"{part}: {time.process_time() - start:.0f} s of one core", file=sys.stderr)
    return "\n".join(lines) + "\n"


def merged(old: str, new: str) -> str:
    """The old page with the new one's sections in place of its own, and what it lacks at the end.

    >>> merged("# B\\n\\n## a\\n1\\n\\n## b\\n2\\n", "# B\\n\\n## b\\n3\\n")
    '# B\\n\\n## a\\n1\\n\\n## b\\n3\\n'
    """
    head, *before = old.rstrip("\n").split("\n## ")
    sections = {text.split("\n", 1)[0]: text for text in before}
    sections |= {text.split("\n", 1)[0]: text for text in new.rstrip("\n").split("\n## ")[1:]}
    return "\n## ".join([head, *(text.rstrip("\n") + "\n" for text in sections.values())]).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rungwise.analysis.benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("parts", nargs="*", help=f"all where none is named: {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    options = parser.parse_args()
    parts = [*options.parts, *filter(None, options.only.split(","))] or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        print(f"part {unknown[0]!r} is unknown; use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        text = page(parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if parts != list(PARTS) and options.out.exists():
        text = merged(options.out.read_text(encoding="utf-8"), text)
    options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
