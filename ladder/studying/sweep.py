"""Sweeps: every cell of a grid trained for real, and what the cells say together.

`<home>/<family>/sweeps/<name>/` holds one file a cell (`cells/`), `result.json`, the figure, and the children's logs;
the family's `sweep.json` gathers the optima of all its sweeps, for forecasts. A cell whose file is there is not run
again. Cells of equal shape go to one child, which compiles one program for all of them (`sweep_cells.py`).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rungwise.analysis.sweeps.optimum import Sweep, fit_optima
from rungwise.analysis.sweeps.rate_law import fit_sweep_law
from rungwise.analysis.vocabulary import decode_number, load_json
from rungwise.ladder.console import ProgressView, log
from rungwise.ladder.family import LadderConfig, RunConfig, load_family
from rungwise.ladder.home import family_folder, make_folder, read_json, write_json
from rungwise.ladder.launching.run import RunFailed
from rungwise.ladder.studying.sweep_grid import Cell, Grid, build_cells
from rungwise.ladder.studying.sweep_measure import DIVERGENCE_RULE
from rungwise.ladder.text.data import check_budgets, load_tokens
from rungwise.ladder.training.backend import prepare_backend

SUMMARY_FILE: Final = "sweep.json"
RESULT_FILE: Final = "result.json"
FIGURE_FILE: Final = "sweep.png"
POLL_SECONDS: Final = 0.2


def run_sweep(
    family: str, grid: Grid, *, home: Path, name: str | None = None, level: float = 0.9, progress: bool = True
) -> dict[str, Any]:
    """Trains what is missing of a grid and returns what `ladder sweep --json` prints.

    Args:
        family: a shipped name or a path.
        name: of the sweep's folder; None: what the grid varies.
        level: coverage the intervals aim at.
    Raises:
        ValueError: bad input, or too little text for a cell; nothing is trained.
        RunFailed: a child failed; the cells that ended are kept.
    """
    config = load_family(family)
    if config.plan_only:
        raise ValueError(
            f"family {config.name} is plan_only: use `ladder plan {family}`; it is not meant to be trained here"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"--level {level} must lie in (0, 1); 0.9 is usual")
    cells = build_cells(config, grid)
    folder = sweep_folder(home, config.name, name or grid.name)
    cache = make_folder(home) / "cache"
    if cells[0].config.context:
        raise ValueError(f"family {config.name} changes its context on the way; sweep a copy without [[context]]")
    check_budgets([cell.config for cell in cells], cache)
    corpora = _corpora(cells, cache)
    todo = [cell for cell in cells if _finished(folder, cell, corpora[_corpus_of(cell)]) is None]
    if todo:
        make_folder(folder / "cells")
        _train_groups(_groups(todo), folder, cache, progress=progress)
    records = [_finished(folder, cell, corpora[_corpus_of(cell)]) for cell in cells]
    missing = [cell.config.run for cell, record in zip(cells, records, strict=True) if record is None]
    if missing:
        raise RunFailed(f"sweep: {len(missing)} of {len(cells)} cells have no result: {', '.join(missing)}")
    rows = [_cell_row(cell, record or {}) for cell, record in zip(cells, records, strict=True)]
    result = conclude(config, grid, cells, rows, name=folder.name, level=level)
    write_json(folder / RESULT_FILE, result)
    _draw(result, folder / FIGURE_FILE)
    write_json(family_folder(home, config.name) / SUMMARY_FILE, summarise(home, config.name))
    return {**result, "folder": str(folder), "figure": str(folder / FIGURE_FILE)}


def sweep_folder(home: Path, family: str, name: str) -> Path:
    """Folder of one sweep."""
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"--name {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    return family_folder(home, family) / "sweeps" / name


def load_summary(home: Path, family: str) -> dict[str, Any] | None:
    """The family's `sweep.json`; None where nothing was swept."""
    path = family_folder(home, family) / SUMMARY_FILE
    return read_json(path) if path.exists() else None


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Cells of one program, and how far their child is."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def steps(self) -> int:
        return sum(cell.config.steps for cell in self.cells)

    @property
    def work(self) -> float:
        return sum(cell.config.tokens * cell.config.model.hidden_dim**2 for cell in self.cells)

    @property
    def threads(self) -> int:
        return self.cells[0].config.threads


def _groups(cells: Iterable[Cell]) -> list[_Group]:
    """By program, most work first."""
    by_program: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_program.setdefault(cell.program, {})[cell.file] = cell  # two names of one run are trained once
    groups = []
    for program, members in by_program.items():
        first = next(iter(members.values()))
        words = [first.rung, f"b{first.batch:g}", *first.settings.values(), program[:6]]
        groups.append(_Group("-".join(word.replace("/", "_") for word in words), tuple(members.values())))
    return sorted(groups, key=lambda group: -group.work)


def _train_groups(groups: Sequence[_Group], folder: Path, cache: Path, *, progress: bool) -> None:
    """Children, as many at once as their threads fit the cores; one that fails does not end the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = list(reversed(groups))
    running: list[tuple[_Group, subprocess.Popen[str], threading.Thread]] = []
    failed: list[str] = []
    with ProgressView(enabled=progress) as view:
        try:
            while waiting or running:
                used = sum(group.threads for group, _, _ in running)
                while waiting and (not running or used + waiting[-1].threads <= cores):
                    group = waiting.pop()
                    view.start(group.name, group.steps)
                    running.append((group, *_start_child(group, folder, cache, view)))
                    used += group.threads
                time.sleep(POLL_SECONDS)
                for entry in [entry for entry in running if entry[1].poll() is not None]:
                    running.remove(entry)
                    entry[2].join()
                    if entry[1].returncode:
                        failed.append(_failure(entry[0], folder, entry[1].returncode))
                        log(f"{failed[-1]}; the other cells go on")
        finally:
            for _, child, _ in running:
                child.terminate()
            for _, child, reader in running:
                child.wait()
                reader.join()
    if failed:
        raise RunFailed(f"{len(failed)} of {len(groups)} groups of cells failed: {'; '.join(failed)}")


def _start_child(
    group: _Group, folder: Path, cache: Path, view: ProgressView
) -> tuple[subprocess.Popen[str], threading.Thread]:
    """A child that trains a group's cells, and the thread that shows what it reports."""
    order = make_folder(folder / "logs") / f"{group.name}.json"
    files = [str(folder / "cells" / cell.file) for cell in group.cells]
    configs = [cell.config.model_dump(mode="json") for cell in group.cells]
    write_json(order, {"cache": str(cache), "files": files, "configs": configs})
    with order.with_suffix(".log").open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rungwise.ladder.studying.sweep", str(order)],
            stdout=subprocess.PIPE,
            stderr=output,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def read() -> None:
        for line in child.stdout or ():
            report = load_json(line)
            loss = decode_number(report["loss"])
            view.update(group.name, report["step"], loss=loss, tokens_per_second=report["speed"])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return child, reader


def _failure(group: _Group, folder: Path, code: int) -> str:
    path = folder / "logs" / f"{group.name}.log"
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    said = f"killed by {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else f"exit code {code}"
    return f"{group.name}: {said} (log: {path})"


def _corpus_of(cell: Cell) -> tuple[Any, ...]:
    return cell.config.data.path, cell.config.data.tokenizer, cell.config.model.vocab_size


def _corpora(cells: Iterable[Cell], cache: Path) -> dict[tuple[Any, ...], str]:
    """Hash of the text of each corpus the cells read."""
    by_corpus = {_corpus_of(cell): cell.config for cell in cells}
    return {corpus: load_tokens(config, cache).corpus_hash for corpus, config in by_corpus.items()}


def _finished(folder: Path, cell: Cell, corpus_hash: str) -> dict[str, Any] | None:
    """A cell's record, if it has ended on this text."""
    path = folder / "cells" / cell.file
    if not path.exists():
        return None
    record = read_json(path)
    return record if record["corpus_hash"] == corpus_hash else None


# --- conclusions ------------------------------------------------------------------------------------------------------


def _cell_row(cell: Cell, record: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` says of a cell: where it stands in the grid, then what was measured."""
    config = cell.config
    place = {"rung": cell.rung, "set": cell.settings, "batch": cell.batch, "horizon": cell.horizon, "lr": cell.lr}
    sizes = {"hidden_dim": config.model.hidden_dim, "tokens": config.tokens, "tokens_per_step": config.tokens_per_step}
    measured = {key: value for key, value in record.items() if key not in ("schema", "config", "rung")}
    return {**place, **sizes, **measured, "file": cell.file}


def conclude(
    family: LadderConfig,
    grid: Grid,
    cells: Sequence[Cell],
    rows: Sequence[Mapping[str, Any]],
    *,
    name: str,
    level: float,
) -> dict[str, Any]:
    """Optima, laws and all cells, as plain values."""
    grouped: dict[tuple[Any, ...], list[tuple[Cell, Mapping[str, Any]]]] = {}
    for cell, row in zip(cells, rows, strict=True):
        grouped.setdefault(cell.group, []).append((cell, row))
    sweeps = [_sweep(members) for members in grouped.values()]
    optima = [
        {**_group_row(members), "optimum": optimum.to_dict()}
        for members, optimum in zip(grouped.values(), fit_optima(sweeps, level=level), strict=True)
    ]
    batches = _batch_optima(family, optima, level=level) if len(grid.batch) > 1 else []
    laws = []
    for settings in {json.dumps(row["set"]): row["set"] for row in optima}.values():
        of_settings = [[row for row in table if row["set"] == settings] for table in (optima, batches)]
        laws.append({"set": settings, **_laws(family, *of_settings, level=level)})
    return {
        "family": family.name,
        "name": name,
        "grid": grid.to_dict(),
        "level": level,
        "divergence_rule": DIVERGENCE_RULE,
        "optima": optima,
        "batch_optima": batches,
        "laws": laws,
        "cells": list(rows),
    }


def _sweep(members: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Sweep:
    return Sweep(
        values=tuple(cell.config.learning_rate for cell, _ in members),
        losses=tuple(decode_number(row["eval_loss"]) for _, row in members),
        diverged=tuple(row["diverged"] for _, row in members),
        recipe=members[0][0].recipe_rate,
    )


def _group_row(members: Sequence[tuple[Cell, Mapping[str, Any]]]) -> dict[str, Any]:
    """One sweep of the learning rate: where it stands, and the mean loss of each rate that did not diverge."""
    cell, row = members[0]
    losses: dict[float, list[float]] = {}
    for other, figures in members:
        if not figures["diverged"]:
            losses.setdefault(other.config.learning_rate, []).append(decode_number(figures["eval_loss"]))
    return {
        **{key: row[key] for key in ("rung", "set", "batch", "horizon", "hidden_dim", "tokens", "tokens_per_step")},
        "name": _label(cell),
        "steps": cell.config.steps,
        "at_recipe": cell.at_recipe,
        "key": cell.key,
        "values": sorted(losses),
        "losses": [sum(losses[rate]) / len(losses[rate]) for rate in sorted(losses)],
    }


def _label(cell: Cell) -> str:
    words = [cell.rung, f"batch ×{cell.batch:g}", f"horizon ×{cell.horizon:g}"]
    return ", ".join([*words, *(f"{field}={value}" for field, value in cell.settings.items())])


def _batch_optima(family: LadderConfig, optima: Sequence[Mapping[str, Any]], *, level: float) -> list[dict[str, Any]]:
    """Best batch of each rung and horizon, each batch at its own best learning rate, tokens equal."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in optima:
        grouped.setdefault(json.dumps([row["rung"], row["horizon"], row["set"]]), []).append(row)
    sweeps = [
        Sweep(
            values=tuple(row["tokens_per_step"] for row in rows),
            losses=tuple(float("nan") if row["optimum"]["loss"] is None else row["optimum"]["loss"] for row in rows),
            diverged=tuple(row["optimum"]["loss"] is None for row in rows),
            recipe=rows[0]["tokens_per_step"] / rows[0]["batch"],
        )
        for rows in grouped.values()
    ]
    return [
        {
            **{key: rows[0][key] for key in ("rung", "set", "horizon", "hidden_dim", "tokens")},
            "name": rows[0]["name"].replace(f", batch ×{rows[0]['batch']:g}", ""),
            "rests_on_edges": [row["name"] for row in rows if row["optimum"]["at_edge"]],
            "optimum": optimum.to_dict(),
        }
        for rows, optimum in zip(grouped.values(), fit_optima(sweeps, level=level), strict=True)
    ]


def _laws(
    family: LadderConfig, optima: Sequence[Mapping[str, Any]], batches: Sequence[Mapping[str, Any]], *, level: float
) -> dict[str, Any]:
    recipe = family.learning_rate
    held = {
        "hidden_dim": recipe.hidden_exponent,
        "tokens_per_step": recipe.batch_exponent,
        "tokens": recipe.tokens_exponent,
    }
    runs = [run for run in family.runs if run.run == run.rung]
    sizes = [
        {
            "name": run.run,
            "hidden_dim": run.model.hidden_dim,
            "tokens_per_step": run.tokens_per_step,
            "tokens": run.tokens,
        }
        for run in runs
    ]
    rate = fit_sweep_law(optima, quantity="learning_rate", held=held, at=sizes, level=level)
    held = {"hidden_dim": 0.0, "tokens": 0.0}
    batch = fit_sweep_law(batches, quantity="tokens_per_step", held=held, at=sizes, level=level)
    return {"learning_rate": rate and rate.to_dict(), "batch": batch and batch.to_dict()}


def summarise(home: Path, family: str) -> dict[str, Any]:
    """The family's `sweep.json`, from the results of all its sweeps: learning-rate optima by rung, laws by sweep."""
    rungs: dict[str, list[dict[str, Any]]] = {}
    laws: dict[str, Any] = {}
    kept = ("name", "key", "at_recipe", "batch", "horizon", "set", "values", "losses", "optimum")
    for path in sorted((family_folder(home, family) / "sweeps").glob(f"*/{RESULT_FILE}")):
        result = read_json(path)
        laws[result["name"]] = result["laws"]
        for row in result["optima"]:
            entry = {"sweep": result["name"], **{key: row[key] for key in kept}}
            rungs.setdefault(row["rung"], []).append(entry)
    return {"family": family, "rungs": rungs, "laws": laws}


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """The figure, whole or absent."""
    from rungwise.analysis.sweeps.sweep_figure import sweep_figure

    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        sweep_figure(result).savefig(draft, format="png")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _train_ordered(order: Path) -> None:
    """What a child does: the cells of one group, in its own process."""
    document = read_json(order)
    configs = [RunConfig.model_validate(config) for config in document["configs"]]
    cache = Path(document["cache"])
    prepare_backend(threads=configs[0].threads, cache=cache)
    from rungwise.ladder.studying.sweep_cells import train_cells

    train_cells(configs, [Path(file) for file in document["files"]], cache=cache)


if __name__ == "__main__":
    _train_ordered(Path(sys.argv[1]))
