"""A family: one TOML file that says how a width becomes a model, and how its rungs and hero are trained.

`load_family` reads and checks it; `RunConfig` is one run with every number resolved. Imports no jax.
"""

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from rungwise.comm.config import TransportConfig
from rungwise.ladder.changing.branch_config import Start
from rungwise.ladder.mesh.mesh_config import MeshConfig, check_mesh, check_pipeline
from rungwise.ladder.text.data_config import ContextPhases, DataConfig, check_context
from rungwise.ladder.training.actions import ActionsConfig
from rungwise.ladder.training.optimizer_config import LearningRateLaw, OptimizerConfig, OptimizerSection
from rungwise.model.accounting import count_params
from rungwise.model.config import Architecture, ModelConfig, Record

FAMILY_SCHEMA = 1


class Recipe(Architecture):
    """How a width becomes a model. Ratios are of `hidden_dim` unless they say otherwise."""

    num_layers: int | None = Field(default=None, ge=1, description="fixed depth; else from aspect_ratio")
    aspect_ratio: float | None = Field(default=None, gt=0, description="hidden_dim per layer")
    num_heads: int | None = Field(default=None, ge=1, description="fixed count; else from head_dim")
    head_dim: int | None = Field(default=None, ge=2, description="fixed width; else from num_heads")
    queries_per_kv_head: int = Field(ge=1)
    global_kv_divisor: int = Field(default=1, ge=1, description="local over global layers' key/value heads")
    latent_ratio: float | None = Field(default=None, gt=0, description="absent: experts work at full width")
    expert_ratio: float = Field(gt=0)
    window_ratio: float = Field(gt=0, le=1, description="local window over seq_len")

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for first, second in (("num_layers", "aspect_ratio"), ("num_heads", "head_dim")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise ValueError(f"{first} and {second}: give exactly one of the two")
        return self


class TransportSection(Record):
    """How routed tokens cross ranks, without what the recipe already says."""

    name: str
    num_ranks: int = Field(ge=1, description="ranks that share the experts; virtual on one device")
    sender_capacity_factor: float
    receiver_capacity_factor: float
    num_waves: int = Field(ge=1)
    spill: int = Field(default=0, ge=0, description="other choices of a token that a full slot spills to")
    payload: Literal["compute", "mxfp8"] = Field(default="compute", description="type in which rows travel")
    payload_scale: Literal["rceil", "floor"] = Field(default="rceil", description="rounding of a block's scale")
    ragged_exchange: Literal["by_backend", "native", "emulated"] = "by_backend"


class ExecutionConfig(Record):
    """How a step is carried out. Nothing here changes a result beyond rounding."""

    param_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of weights and optimizer state")
    compute_dtype: Literal["by_device", "float32", "bfloat16"] = Field(
        default="by_device", description="of matrix products; by_device: float32 on CPU, bfloat16 on accelerators"
    )
    rematerialize: Literal["nothing", "blocks", "blocks_keep_communication", "blocks_offload"] = Field(
        default="nothing",
        description="what the backward pass computes again instead of keeping; blocks_offload: all but what crossed a"
        " rank, with each layer's input kept in the host's memory",
    )
    rematerialize_experts: bool = Field(
        default=False,
        exclude_if=lambda again: not again,
        description="beside it: experts from the rows that reached them, one wave at a time",
    )
    expert_matmul: Literal["compute", "mxfp8"] = Field(
        default="compute",
        exclude_if=lambda matmul: matmul == "compute",
        description="type of the experts' products; mxfp8: blocks of 32 values of eight bits with a common scale",
    )
    microbatches: int = Field(default=1, ge=1, description="parts of a batch whose gradients are added, in float32")


class EvaluationConfig(Record):
    """When and on how much held-out text."""

    every_fraction: float = Field(gt=0, le=1, description="of the run, between evaluations")
    num_sequences: int = Field(ge=1)


class CheckpointConfig(Record):
    """When to save."""

    every_fraction: float = Field(gt=0, le=1, description="of the run, between checkpoints")
    keep: int = Field(ge=1)


class RungSpec(Record):
    """One rung (or the hero): a width, its replicas and seeds, and what overrules the recipe."""

    hidden_dim: int = Field(ge=2)
    data_replicas: int = Field(default=1, ge=1, description="copies of the expert group, each with its own sequences")
    mesh: MeshConfig | None = Field(default=None, description="absent: the family's")
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    override: dict[str, Any] = Field(
        default_factory=dict, description="any ModelConfig field, or tokens, steps, learning_rate"
    )
    alternative_tokens: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="other token horizons by name, planned beside the run's own"
    )

    @field_validator("override")
    @classmethod
    def _known(cls, override: dict[str, Any]) -> dict[str, Any]:
        known = [*ModelConfig.model_fields, *RUN_OVERRIDES]
        for key in override:
            if key not in known:
                raise ValueError(f"override.{key} is not a known field{_nearest(key, known)}")
        return override


RUN_OVERRIDES = ("tokens", "steps", "learning_rate")

WHOLE_LADDER = "ladder"
"""Stands for a run where a published figure is one of the whole ladder."""


class PublishedFigures(Record):
    """What others state about runs of this family; `plan` prints ours beside it. Nothing is derived from it."""

    quantity: str = Field(description="a field of a run's plan, or of the whole plan")
    values: dict[str, Annotated[int | float, Field(gt=0)]] = Field(
        min_length=1, description="by run, or of the whole ladder: 'ladder'"
    )
    digits: int | None = Field(default=None, ge=1, description="significant digits stated; absent: those written here")
    source: str = Field(min_length=1)
    note: str = ""


class RunConfig(Record):
    """One training run, every number resolved. Its `content_hash` is the run's identity."""

    family: str
    run: str
    role: Literal["rung", "hero", "branch", "engineering"]
    rung: str
    seed: int
    model: ModelConfig
    transport: TransportConfig
    data_replicas: int
    sequences_per_rank: int
    steps: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    optimizer: OptimizerConfig
    execution: ExecutionConfig = ExecutionConfig()
    mesh: MeshConfig = Field(default=MeshConfig(), exclude=True, description="no part of a run's identity")
    data: DataConfig
    context: ContextPhases = ()
    text_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        exclude_if=lambda share: share == 1.0,
        description="part of each source that is read: a rung's, where it repeats text as often as the hero",
    )
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    actions: ActionsConfig = Field(default=ActionsConfig(), exclude_if=lambda actions: actions == ActionsConfig())
    start: Start | None = Field(
        default=None, exclude_if=lambda start: start is None, description="of a branch; absent: from the first step"
    )
    threads: int = Field(ge=1, description="of the CPU backend; part of a run's identity, since bits depend on it")

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        tokens_per_rank = self.sequences_per_rank * self.model.seq_len
        check_context(self.context, seq_len=self.model.seq_len, tokens_per_rank=tokens_per_rank, run=self.run)
        return self

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        ranks = self.transport.num_ranks
        check_mesh(self.mesh, run=self.run, data_replicas=self.data_replicas, num_ranks=ranks)
        check_pipeline(
            self.mesh,
            run=self.run,
            num_layers=self.model.num_layers,
            replicas_here=self.data_replicas // self.mesh.data,
            microbatches=self.execution.microbatches,
        )
        return self

    @model_validator(mode="after")
    def _check_microbatches(self) -> Self:
        if self.data_replicas % self.execution.microbatches:
            raise ValueError(
                f"execution.microbatches {self.execution.microbatches} does not divide data_replicas"
                f" {self.data_replicas} of run {self.run}; choose a divisor"
            )
        if (
            self.execution.microbatches > 1
            and self.model.balance == "auxiliary_loss"
            and self.model.balance_scope == "global"
        ):
            raise ValueError(
                f"execution.microbatches {self.execution.microbatches} with balance_scope 'global': the loss needs all"
                " routes before the first gradient; use balance_scope 'local' or 'sequence', or microbatches 1"
            )
        return self

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        return self.data_replicas * self.transport.num_ranks * self.sequences_per_rank

    @property
    def tokens_per_step(self) -> int:
        """Training tokens per optimizer step."""
        return self.batch_size * self.model.seq_len

    @property
    def tokens(self) -> int:
        """The token horizon."""
        return self.steps * self.tokens_per_step


class LadderConfig(Record):
    """A whole family file."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    summary: str
    plan_only: bool = Field(default=False, description="described, not meant to be trained here")
    tokens_per_active_param: float = Field(gt=0)
    sequences_per_rank: int = Field(ge=1)
    rung_threads: int = Field(default=1, ge=1)
    hero_threads: int = Field(default=2, ge=1)
    recipe: Recipe
    transport: TransportSection
    learning_rate: LearningRateLaw
    optimizer: OptimizerSection
    execution: ExecutionConfig = ExecutionConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig
    context: ContextPhases = ()
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    actions: ActionsConfig = ActionsConfig()
    rungs: tuple[RungSpec, ...] = Field(min_length=1)
    hero: RungSpec
    deadline: AwareDatetime | None = Field(default=None, description="by which the hero is to end; the watch minds it")
    published: tuple[PublishedFigures, ...] = ()

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        widths = [rung.hidden_dim for rung in self.rungs]
        if widths != sorted(set(widths)):
            raise ValueError(f"rungs: hidden_dim {widths} must rise from rung to rung, each width once")
        if self.hero.hidden_dim < widths[-1]:
            raise ValueError(f"hero.hidden_dim {self.hero.hidden_dim} is below the top rung's {widths[-1]}")
        known = [run.run for run in self.runs]  # also every run's own checks, before anything starts
        for name in (name for figures in self.published for name in figures.values):
            if name not in (*known, WHOLE_LADDER):
                raise ValueError(f"published: run {name!r} is unknown{_nearest(name, [*known, WHOLE_LADDER])}")
        return self

    def model_config_for(self, spec: RungSpec) -> ModelConfig:
        """The shape of a rung: the recipe at its width, then its overrides."""
        recipe, width = self.recipe, spec.hidden_dim
        num_heads = recipe.num_heads or _whole(width, recipe.head_dim or 1, what="num_heads = hidden_dim / head_dim")
        head_dim = recipe.head_dim or _whole(width, num_heads, what="head_dim = hidden_dim / num_heads")
        layers = recipe.num_layers or max(2, round(width / (recipe.aspect_ratio or width)))
        num_kv_heads = max(1, num_heads // recipe.queries_per_kv_head)
        derived = {
            "hidden_dim": width,
            "num_layers": layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "global_kv_heads": max(1, num_kv_heads // recipe.global_kv_divisor),
            "head_dim": head_dim,
            "window": max(1, round(recipe.window_ratio * recipe.seq_len)),
            "expert_dim": round(recipe.expert_ratio * width),
            "latent_dim": None if recipe.latent_ratio is None else round(recipe.latent_ratio * width),
        }
        shared = {name: getattr(recipe, name) for name in Architecture.model_fields}
        overrides = {key: value for key, value in spec.override.items() if key not in RUN_OVERRIDES}
        return ModelConfig(**{**shared, **derived, **overrides})

    def _run(self, spec: RungSpec, seed: int, role: Literal["rung", "hero"]) -> RunConfig:
        model = self.model_config_for(spec)
        rung = "hero" if role == "hero" else f"d{spec.hidden_dim}"
        tokens_per_step = spec.data_replicas * self.transport.num_ranks * self.sequences_per_rank * model.seq_len
        wanted = spec.override.get("tokens", self.tokens_per_active_param * count_params(model).active)
        steps = int(spec.override.get("steps", max(1, round(wanted / tokens_per_step))))
        peak = self.learning_rate.peak(
            tokens=steps * tokens_per_step, hidden_dim=spec.hidden_dim, tokens_per_step=tokens_per_step
        )
        return RunConfig(
            family=self.name,
            run=rung if seed == spec.seeds[0] else f"{rung}-seed{seed}",
            role=role,
            rung=rung,
            seed=seed,
            model=model,
            transport=TransportConfig(num_experts=model.num_experts, top_k=model.top_k, **self.transport.model_dump()),
            data_replicas=spec.data_replicas,
            sequences_per_rank=self.sequences_per_rank,
            steps=steps,
            learning_rate=spec.override.get("learning_rate", peak),
            optimizer=self.optimizer.resolve(steps=steps, tokens_per_step=tokens_per_step),
            execution=self.execution,
            mesh=self.mesh if spec.mesh is None else spec.mesh,
            data=self.data,
            context=self.context,
            text_share=self._text_share(steps * tokens_per_step) if role == "rung" else 1.0,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
            actions=self.actions,
            threads=self.hero_threads if role == "hero" else self.rung_threads,
        )

    def _text_share(self, tokens: int) -> float:
        """Of each source for a rung, so that its epochs are the hero's: tokens over the hero's."""
        return min(1.0, tokens / self.hero_run.tokens) if self.data.simulate_epochs else 1.0

    @property
    def rung_runs(self) -> tuple[RunConfig, ...]:
        """Every run of the ladder, smallest rung first, each seed of a rung a run of its own."""
        return tuple(self._run(spec, seed, "rung") for spec in self.rungs for seed in spec.seeds)

    @property
    def hero_run(self) -> RunConfig:
        """The hero's run."""
        return self._run(self.hero, self.hero.seeds[0], "hero")

    def hero_at(self, tokens: int) -> RunConfig:
        """The hero's run at another token horizon, its steps and learning rate by the recipe's rules."""
        kept = {key: value for key, value in self.hero.override.items() if key not in RUN_OVERRIDES}
        spec = self.hero.model_copy(update={"override": kept | {"tokens": tokens}})
        return self._run(spec, spec.seeds[0], "hero")

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """Rungs, then hero."""
        return (*self.rung_runs, self.hero_run)


def _whole(numerator: int, denominator: int, *, what: str) -> int:
    if numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not a multiple of {denominator}; choose a width that divides")
    return numerator // denominator


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def shipped_families() -> tuple[str, ...]:
    """Names of the families that come with the package."""
    folder = resources.files("rungwise.ladder") / "families"
    return tuple(sorted(Path(item.name).stem for item in folder.iterdir() if item.name.endswith(".toml")))


class UnknownFamily(ValueError):
    """A name that is neither a shipped family's nor a file's."""


def family_text(name_or_path: str) -> str:
    """The TOML text of a shipped family or of a file.

    Raises:
        ValueError: neither a shipped name (`UnknownFamily`) nor a readable file.
    """
    if name_or_path in shipped_families():
        return (resources.files("rungwise.ladder") / "families" / f"{name_or_path}.toml").read_text()
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        try:
            return path.read_text()
        except OSError as error:
            raise ValueError(f"family file {name_or_path}: {error.strerror}; give a readable TOML file") from error
    raise UnknownFamily(f"family {name_or_path!r} is unknown{_nearest(name_or_path, list(shipped_families()))}")


def load_family(name_or_path: str) -> LadderConfig:
    """Reads and checks a family.

    Raises:
        ValueError: one line that names the file, the field, its value and the remedy.
    """
    try:
        return LadderConfig.model_validate(tomllib.loads(family_text(name_or_path)))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"family {name_or_path}: not TOML: {error}") from error
    except ValidationError as error:
        raise ValueError(f"family {name_or_path}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """The first problem of a validation error as one line: where, what, remedy."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_nearest(str(first['loc'][-1]), _siblings(first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"key {where!r} is missing; add it"
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """Known keys of the table at a location of the family file."""
    model: Any = LadderConfig
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            arguments = getattr(annotation, "__args__", ())
            model = next((item for item in (annotation, *arguments) if hasattr(item, "model_fields")), model)
    return [field.alias or name for name, field in model.model_fields.items()]
