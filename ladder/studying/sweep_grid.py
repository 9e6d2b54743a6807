"""The cells of a sweep: which factors of a recipe are tried on which rungs, and the run each is. Imports no jax.

A factor multiplies what the recipe gives: the batch factor the rung's data replicas, the horizon factor its tokens, the
learning-rate factor the peak that the family's law gives at the cell's own batch and tokens. Steps follow.
"""

import difflib
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import ValidationError

from rungwise.analysis.sweeps.optimum import sweep_key
from rungwise.analysis.vocabulary import canonical_json
from rungwise.ladder.console import one_line
from rungwise.ladder.family import LadderConfig, RunConfig, RungSpec, explain

SECTIONS: Final = ("recipe", "optimizer", "transport", "execution")
"""Tables of a family file whose fields `--set` may change; a name without a table is the recipe's."""

_NOT_MEASURED: Final = frozenset(["family", "run", "rung", "role", "checkpoint", "evaluation"])
_NOT_COMPILED: Final = _NOT_MEASURED | {"seed", "steps", "learning_rate"}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is swept; every combination is a cell. Factors are of the recipe's own values."""

    rungs: tuple[str, ...] = ()
    """Empty: the smallest."""
    lr: tuple[float, ...] = (1.0,)
    batch: tuple[float, ...] = (1.0,)
    horizon: tuple[float, ...] = (1.0,)
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(field, values as text): a field of the recipe, or `table.field` of one of SECTIONS."""
    seeds: tuple[int, ...] = ()
    """Empty: the rung's first."""

    @property
    def axes(self) -> list[str]:
        """Names of what takes more than one value, rungs and seeds apart."""
        axes = [name for name in ("lr", "batch", "horizon") if len(getattr(self, name)) > 1]
        return axes + [field for field, values in self.settings if len(values) > 1]

    @property
    def name(self) -> str:
        """Folder of a sweep that was given no name: what it varies."""
        return "-".join(axis.replace("_", "-") for axis in self.axes) or "single"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        axes = {name: list(getattr(self, name)) for name in ("rungs", "lr", "batch", "horizon", "seeds")}
        return {**axes, "set": {field: list(values) for field, values in self.settings}}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    rung: str
    lr: float
    batch: float
    horizon: float
    settings: dict[str, str]
    at_recipe: bool
    """Whether all but rate and seed is the family's own."""
    recipe_rate: float
    """Peak learning rate that the family's law gives at this batch and horizon."""
    config: RunConfig

    @property
    def group(self) -> tuple[Any, ...]:
        """What cells share whose learning rates are one sweep."""
        return self.rung, tuple(self.settings.items()), self.batch, self.horizon

    @property
    def file(self) -> str:
        """Name of the cell's file: the rung, and the identity of all that its figures depend on."""
        return f"{self.rung}-{_digest(self.config, without=_NOT_MEASURED)[:20]}.json"

    @property
    def program(self) -> str:
        """Identity of the compiled training step: rate, steps and, where nothing random is routed, seed are data."""
        without = _NOT_COMPILED if self.config.model.routing != "random" else _NOT_COMPILED - {"seed"}
        return _digest(self.config, without=without)

    @property
    def key(self) -> str:
        """Identity that a forecast finds this sweep by."""
        return sweep_key(self.config.model_dump(mode="json"))


def _digest(config: RunConfig, *, without: frozenset[str]) -> str:
    kept = {name: value for name, value in config.model_dump(mode="json").items() if name not in without}
    kept["num_sequences"] = config.evaluation.num_sequences
    return hashlib.sha256(canonical_json(kept).encode()).hexdigest()


def parse_factors(option: str, text: str) -> tuple[float, ...]:
    """Factors of an option such as `--lr 0.5,1,2`, ascending, each once.

    Raises:
        ValueError: one is not a positive number.

    >>> parse_factors("--lr", "2,0.5,1")
    (0.5, 1.0, 2.0)
    """
    factors = set()
    for word in text.split(","):
        try:
            factor = float(word)
        except ValueError:
            factor = math.nan
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"{option} {text!r}: {word!r} is no positive number; give factors such as 0.5,1,2")
        factors.add(factor)
    return tuple(sorted(factors))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds of `--seeds 0,1`.

    Raises:
        ValueError: one is not a whole number from 0.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--seeds {text!r}: give whole numbers from 0, such as 0,1")
    return tuple(sorted({int(word) for word in words}))


def parse_settings(options: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Fields and values of `--set field=value[,value]`, in the order given.

    Raises:
        ValueError: no `=`, no value, or a field given twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for option in options:
        field, equals, values = (part.strip() for part in option.partition("="))
        words = tuple(dict.fromkeys(word.strip() for word in values.split(",")))
        if not (field and equals and all(words)):
            raise ValueError(f"--set {option!r}: give a field and its values, such as balance=quantile,none")
        if field in found:
            raise ValueError(f"--set {field}: given twice; put all its values into one, separated by commas")
        found[field] = words
    return tuple(found.items())


def build_cells(family: LadderConfig, grid: Grid) -> list[Cell]:
    """Every cell of a grid, checked; smallest rung first.

    Raises:
        ValueError: an unknown rung or field, a bad value, or a batch of no whole replicas; one line.
    """
    known = {f"d{spec.hidden_dim}": spec for spec in family.rungs}
    for rung in grid.rungs:
        if rung not in known:
            raise ValueError(f"--rung {rung}: not in family {family.name}; its rungs are {', '.join(known)}")
    rungs = [rung for rung in known if rung in grid.rungs] or list(known)[:1]
    fields = [field for field, _ in grid.settings]
    cells = []
    for values in itertools.product(*(values for _, values in grid.settings)):
        settings = dict(zip(fields, values, strict=True))
        variant = _variant(family, settings)
        at_recipe = all(getattr(variant, section) == getattr(family, section) for section in SECTIONS)
        for rung, batch, horizon in itertools.product(rungs, grid.batch, grid.horizon):
            for seed in grid.seeds or known[rung].seeds[:1]:
                base = _base_run(variant, known[rung], rung=rung, batch=batch, horizon=horizon, seed=seed)
                cells += [
                    Cell(
                        rung=rung,
                        lr=lr,
                        batch=batch,
                        horizon=horizon,
                        settings=settings,
                        at_recipe=at_recipe and batch == horizon == 1.0,
                        recipe_rate=base.learning_rate,
                        config=base.replace(run=f"{base.run}-lr{lr:g}", learning_rate=lr * base.learning_rate),
                    )
                    for lr in grid.lr
                ]
    return cells


def _variant(family: LadderConfig, settings: Mapping[str, str]) -> LadderConfig:
    """The family with some fields changed. All fields of a table change together, so that pairs can be set."""
    changes: dict[str, dict[str, Any]] = {}
    for name, text in settings.items():
        section, _, field = name.rpartition(".")
        changes.setdefault(section or "recipe", {})[field] = _value(family, section or "recipe", field, text)
    tables = {}
    for section, fields in changes.items():
        try:
            tables[section] = getattr(family, section).replace(**fields)
        except ValidationError as error:
            shown = ", ".join(f"{field}={value}" for field, value in fields.items())
            raise ValueError(f"--set {shown}: {explain(error)}") from error
    return family.model_copy(update=tables)


def _value(family: LadderConfig, section: str, field: str, text: str) -> Any:
    if section not in SECTIONS:
        raise ValueError(f"--set {section}.{field}: no table {section!r}; tables are {', '.join(SECTIONS)}")
    known = type(getattr(family, section)).model_fields
    if field not in known:
        close = difflib.get_close_matches(field, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
        raise ValueError(f"--set {field}: no field of the family's [{section}]; {hint}")
    optional = type(None) in get_args(known[field].annotation)
    if isinstance(getattr(getattr(family, section), field), tuple):
        return tuple(word for word in text.split("+") if word != "none")
    return None if optional and text == "none" else text


def _base_run(family: LadderConfig, spec: RungSpec, *, rung: str, batch: float, horizon: float, seed: int) -> RunConfig:
    """The rung's run at another batch and horizon, at the recipe's learning rate there."""
    replicas = batch * spec.data_replicas
    if abs(replicas - round(replicas)) > 1e-9 or replicas < 0.5:
        raise ValueError(
            f"--batch {batch:g}: data_replicas {spec.data_replicas} of rung {rung} times {batch:g} is no whole number;"
            " choose a factor that makes it one"
        )
    name = f"{rung}-s{seed}-b{batch:g}-h{horizon:g}"
    try:
        (plain,) = family.model_copy(update={"rungs": (spec.replace(seeds=(seed,)),)}).rung_runs
        override = {key: value for key, value in spec.override.items() if key not in ("steps", "tokens")}
        changed = spec.replace(
            seeds=(seed,), data_replicas=round(replicas), override={**override, "tokens": horizon * plain.tokens}
        )
        (run,) = family.model_copy(update={"rungs": (changed,)}).rung_runs
        return run.replace(run=name)
    except ValidationError as error:
        raise ValueError(f"cell {name}: {one_line(error)}") from error
