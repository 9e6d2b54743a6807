"""What a run was: its resolved config, its hash, code and package versions, written once into `config.json`. Its plan
there follows what is declared of the run on the way."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rungwise
from rungwise.analysis.reading.records import CONFIG_FILE, read_json
from rungwise.ladder.changing.course import Course, course_of, plan_course
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import write_json

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "scipy",
    "pandas",
    "mlflow",
)


@cache
def code_version() -> str:
    """Package version, and the commit it was run from where the code is a git checkout."""
    root = Path(rungwise.__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return rungwise.__version__
    commit = found.stdout.strip()
    return f"{rungwise.__version__}+{commit}" if found.returncode == 0 and commit else rungwise.__version__


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages a run's numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_document(config: RunConfig, *, corpus_hash: str, course: Course | None = None) -> dict[str, Any]:
    """The content of a run's `config.json`."""
    return {
        "family": config.family,
        "run": config.run,
        "role": config.role,
        "rung": config.rung,
        "seed": config.seed,
        "config_hash": config.content_hash,
        "corpus_hash": corpus_hash,
        "code_version": code_version(),
        "packages": package_versions(),
        "plan": vars(plan_course(course or course_of(config))),
        "config": config.model_dump(mode="json"),
    }


def write_run_config(folder: Path, config: RunConfig, *, corpus_hash: str, course: Course | None = None) -> None:
    """Writes `config.json`, or checks it against the one that is there and brings its plan up to date.

    Args:
        course: with what was declared since; None leaves the plan that is there.

    Raises:
        ValueError: the folder holds this run under another definition; the message names the first field that differs.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        write_json(path, run_document(config, corpus_hash=corpus_hash, course=course))
        return
    old = read_json(path)
    if old["corpus_hash"] != corpus_hash:
        raise ValueError(
            f"corpus of run {config.run} was {old['corpus_hash'][:12]} and is now {corpus_hash[:12]};"
            f" a run does not change its text: restore it, or move {folder} away"
        )
    if old["config_hash"] != config.content_hash:
        where = first_difference(old["config"], config.model_dump(mode="json"))
        raise ValueError(
            f"run {config.run} in {folder} was started with another {where};"
            " restore it, or choose another home with --home"
        )
    if course is not None and old["plan"] != (plan := vars(plan_course(course))):
        write_json(path, {name: value for name, value in old.items() if name != "schema"} | {"plan": plan})


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """The first place where two plain documents differ, with both values.

    >>> first_difference({"model": {"top_k": 4}}, {"model": {"top_k": 2}})
    'model.top_k (4, now 2)'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                return first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    return f"{path or 'definition'} ({old}, now {new})"
