"""Checkpoints of a run that are kept for good because something begins there later: shares of the run, and steps.

What is asked for stands in the run's folder, apart from its config: it changes nothing of the run. Imports no jax.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rungwise.ladder.changing.course import Course
from rungwise.ladder.home import make_folder, read_json, write_json

KEPT_FILE: Final = "kept.json"


def keep_at(folder: Path, fractions: Iterable[float]) -> None:
    """Asks for checkpoints at these shares of the run, beside those asked for before, from its next start on."""
    wanted = sorted({*kept_fractions(folder), *(round(fraction, 6) for fraction in fractions)})
    if wanted != kept_fractions(folder):
        write_json(make_folder(folder) / KEPT_FILE, {"fractions": wanted})


def kept_fractions(folder: Path) -> list[float]:
    """Shares of the run, ascending."""
    path = folder / KEPT_FILE
    return list(read_json(path)["fractions"]) if path.exists() else []


def kept_steps(folder: Path, course: Course) -> frozenset[int]:
    """Their steps, by the length the run began with: a replan moves none of them."""
    return frozenset(step_at(course, fraction) for fraction in kept_fractions(folder))


def step_at(course: Course, fraction: float) -> int:
    """Optimizer steps done at a share of the run as it was planned at first."""
    return max(1, round(fraction * course[0].decay.steps))
