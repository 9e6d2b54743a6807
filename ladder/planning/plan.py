"""Every derived number of a family, before anything runs, and what others state about the same runs beside it.

Imports no jax and allocates no parameter: a plan of 535 billion takes as long as one of a million.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rungwise.ladder.changing.phases import describe_context, describe_mixture, has_phases
from rungwise.ladder.family import WHOLE_LADDER, LadderConfig, PublishedFigures, RunConfig
from rungwise.ladder.planning.drops_expected import DropConditions, compare_with_hero, drop_conditions
from rungwise.ladder.planning.memory_check import FamilyMemory, family_memory
from rungwise.ladder.planning.plan_phases import PHASE_FLOPS, PhasePlan, describe_epochs, plan_run_phases, source_epochs
from rungwise.model.accounting import ContextPrice, count_flops, count_params, price_context

CONTEXT_FACTORS = (1, 2, 4, 16, 64)
"""Multiples of the hero's context length that are priced; the reference considered 2, 4, 16 and 64 times its own."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run in numbers. FLOPs are whole-run training FLOPs under the conventions of `model/accounting.py`."""

    name: str
    rung: str
    role: str
    seed: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None
    expert_dim: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    vocab_size: int
    seq_len: int
    num_params: int
    num_params_with_bias: int
    """With the balancing bias of each expert, which is state here and a parameter elsewhere."""
    num_active_params: int
    """Without embedding and head, gates and convolutions: the reference's convention."""
    num_active_params_with_gates: int
    """Without embedding and head."""
    num_active_params_everything: int
    tokens: int
    tokens_per_active_param: float
    steps: int
    batch_size: int
    tokens_per_step: int
    learning_rate: float
    flops: float
    """Whole attention windows, without head, gates and convolutions: what forecasts are fitted on."""
    flops_with_head: float
    flops_causal: float
    flops_causal_with_head: float
    flops_everything: float
    """Whole attention windows, with head, gates and convolutions."""
    flops_everything_causal: float
    optimizer: str
    transport: str
    num_ranks: int
    data_replicas: int
    tokens_per_rank: int
    sender_capacity_factor: float
    receiver_capacity_factor: float
    context: str | None = None
    """Lengths by phase, where they change."""
    mixture: str | None = None
    """Weights by phase, where there are sources."""
    epochs: str | None = None
    """Passes over what may be read of each source; None without sources, or where their text is not here."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Where a run's parameters and FLOPs are, by part of the model."""

    params: dict[str, int]
    active_params: dict[str, int]
    """Of one token, embedding and head whole."""
    balancing_bias: int
    """State, in no sum of the others."""
    flops_per_token: dict[str, float]
    """Training. `attention` counts whole windows; `attention_causal`, the keys a token may see, stands in its stead."""
    training_flops_per_token: dict[str, float]
    """Sums of the parts under each convention: without_head, with_head, everything; the same causal."""
    forward_flops_per_token: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """The hero at one token horizon: its own, or an alternative of the family file."""

    name: str
    tokens: int
    steps: int
    tokens_per_active_param: float
    learning_rate: float
    flops: float
    flops_with_head: float
    ladder_flops_share: float
    ladder_flops_share_with_head: float


@dataclass(frozen=True, kw_only=True)
class PublishedComparison:
    """A figure stated elsewhere beside ours."""

    quantity: str
    run: str
    published: int | float
    ours: int | float
    difference: int | float
    """Ours minus published."""
    relative_difference: float
    """Of the published figure."""
    rounds_to_published: bool
    """Ours, rounded to as many digits as were published, is the published figure."""
    source: str
    note: str


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A family in numbers: every rung's runs, smallest first, and the hero."""

    family: str
    plan_only: bool
    rungs: tuple[RunPlan, ...]
    hero: RunPlan
    parts: dict[str, RunParts]
    """By run."""
    horizons: tuple[Horizon, ...]
    """The hero's own first."""
    context: tuple[ContextPrice, ...]
    published: tuple[PublishedComparison, ...]
    phases: dict[str, tuple[PhasePlan, ...]]
    """By run; of families whose context or mixture changes on the way, else empty."""
    epochs: dict[str, dict[str, float]]
    """By run and source, where there are sources and their text is here."""
    drops: dict[str, DropConditions]
    """By run: what its drop figures depend on, what sampling alone drops, what differs from the hero's."""
    memory: FamilyMemory
    deadline: float | None = None
    """Of the hero, Unix seconds, where the family states one."""

    @property
    def ladder_flops_share(self) -> float:
        """Training FLOPs of all rung runs, seeds included, over the hero's, without head."""
        return sum(rung.flops for rung in self.rungs) / self.hero.flops

    @property
    def ladder_flops_share_with_head(self) -> float:
        """The same with head: small models spend more of their work on it."""
        return sum(rung.flops_with_head for rung in self.rungs) / self.hero.flops_with_head

    def to_dict(self) -> dict[str, Any]:
        """What `ladder plan --json` prints."""
        shares = ("ladder_flops_share", "ladder_flops_share_with_head")
        whole = asdict(self) | {name: getattr(self, name) for name in shares}
        return whole if self.deadline is not None else {name: whole[name] for name in whole if name != "deadline"}


def plan_run(config: RunConfig) -> RunPlan:
    """Every derived number of one run."""
    model, transport = config.model, config.transport
    params, phases = count_params(model), plan_run_phases(config)
    return RunPlan(
        name=config.run,
        rung=config.rung,
        role=config.role,
        seed=config.seed,
        hidden_dim=model.hidden_dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        latent_dim=model.latent_dim,
        expert_dim=model.expert_dim,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_shared_experts=model.num_shared_experts,
        vocab_size=model.vocab_size,
        seq_len=model.seq_len,
        num_params=params.total,
        num_params_with_bias=params.total + params.balancing_bias,
        num_active_params=params.active,
        num_active_params_with_gates=params.active_with_gates,
        num_active_params_everything=params.active_everything,
        tokens=config.tokens,
        tokens_per_active_param=config.tokens / params.active,
        steps=config.steps,
        batch_size=config.batch_size,
        tokens_per_step=config.tokens_per_step,
        learning_rate=config.learning_rate,
        **{name: sum(getattr(phase, name) for phase in phases) for name in PHASE_FLOPS},
        optimizer=config.optimizer.name,
        transport=transport.name,
        num_ranks=transport.num_ranks,
        data_replicas=config.data_replicas,
        tokens_per_rank=config.sequences_per_rank * model.seq_len,
        sender_capacity_factor=transport.sender_capacity_factor,
        receiver_capacity_factor=transport.receiver_capacity_factor,
        context=describe_context(config),
        mixture=describe_mixture(config),
        epochs=describe_epochs(source_epochs(config)),
    )


def count_parts(config: RunConfig) -> RunParts:
    """Parameters and FLOPs of one run by part."""
    params, flops = count_params(config.model), count_flops(config.model)
    chosen = {
        "without_head": {"head": False},
        "with_head": {"head": True},
        "everything": {"head": True, "everything": True},
    }
    chosen |= {f"{name}_causal": choice | {"causal": True} for name, choice in chosen.items()}
    return RunParts(
        params=params.parts(),
        active_params=params.active_parts(),
        balancing_bias=params.balancing_bias,
        flops_per_token=asdict(flops),
        training_flops_per_token={name: flops.total(**choice) for name, choice in chosen.items()},
        forward_flops_per_token={name: flops.forward(**choice) for name, choice in chosen.items()},
    )


def plan_horizons(config: LadderConfig, rungs: Iterable[RunPlan]) -> tuple[Horizon, ...]:
    """The hero at its own horizon and at each alternative, with the share of it that the rungs cost."""
    rungs = tuple(rungs)
    heroes = {"own": config.hero_run}
    heroes |= {name: config.hero_at(tokens) for name, tokens in config.hero.alternative_tokens.items()}

    def horizon(name: str, hero: RunPlan) -> Horizon:
        return Horizon(
            name=name,
            tokens=hero.tokens,
            steps=hero.steps,
            tokens_per_active_param=hero.tokens_per_active_param,
            learning_rate=hero.learning_rate,
            flops=hero.flops,
            flops_with_head=hero.flops_with_head,
            ladder_flops_share=sum(rung.flops for rung in rungs) / hero.flops,
            ladder_flops_share_with_head=sum(rung.flops_with_head for rung in rungs) / hero.flops_with_head,
        )

    return tuple(horizon(name, plan_run(run)) for name, run in heroes.items())


def compare_published(plan: LadderPlan, published: Iterable[PublishedFigures]) -> tuple[PublishedComparison, ...]:
    """Every published figure beside ours, in the order of the family file.

    Raises:
        ValueError: a quantity that no plan has.
    """
    by_name = {run.name: run for run in (*plan.rungs, plan.hero)}

    def compare(figures: PublishedFigures, run: str, value: int | float) -> PublishedComparison:
        ours = getattr(plan if run == WHOLE_LADDER else by_name[run], figures.quantity, None)
        if not isinstance(ours, int | float):
            raise ValueError(
                f"published: quantity {figures.quantity!r} is no number in the plan of {run!r};"
                " take a field that `ladder plan --json` prints"
            )
        return PublishedComparison(
            quantity=figures.quantity,
            run=run,
            published=value,
            ours=ours,
            difference=ours - value,
            relative_difference=ours / value - 1,
            rounds_to_published=rounds_to(ours, value, digits=figures.digits),
            source=figures.source,
            note=figures.note,
        )

    return tuple(compare(figures, run, value) for figures in published for run, value in figures.values.items())


def rounds_to(ours: float, published: float, *, digits: int | None = None) -> bool:
    """Whether a figure, rounded to the significant digits of a published one, is that.

    Args:
        digits: None takes as many as the published figure needs.

    >>> rounds_to(1_591_845_376, 1.6e9), rounds_to(9.27e21, 9.2e21), rounds_to(1.15, 1.1, digits=3)
    (True, False, False)
    """
    needed = (digits for digits in range(1, 19) if float(f"{published:.{digits - 1}e}") == float(published))
    return float(f"{ours:.{(digits or next(needed)) - 1}e}") == float(published)


def plan_ladder(
    config: LadderConfig,
    *,
    mesh: str | None = None,
    execution: str | None = None,
    device_memory: int | None = None,
    fused: bool = False,
) -> LadderPlan:
    """The whole family in numbers.

    Args:
        mesh, execution, device_memory, fused: of the memory a device needs, as `family_memory`.
    Raises:
        ValueError: a published figure of a quantity that no plan has, or a mesh that does not divide a run.
    """
    rungs, hero = tuple(plan_run(run) for run in config.rung_runs), config.hero_run
    plan = LadderPlan(
        family=config.name,
        plan_only=config.plan_only,
        rungs=rungs,
        hero=plan_run(hero),
        parts={run.run: count_parts(run) for run in config.runs},
        horizons=plan_horizons(config, rungs),
        context=price_context(hero.model, [factor * hero.model.seq_len for factor in CONTEXT_FACTORS]),
        published=(),
        phases={run.run: plan_run_phases(run) for run in config.runs if has_phases(run)},
        epochs={run.run: epochs for run in config.runs if (epochs := source_epochs(run)) is not None},
        drops=compare_with_hero(map(drop_conditions, config.rung_runs), drop_conditions(hero)),
        memory=family_memory(config, mesh=mesh, execution=execution, device_memory=device_memory, fused=fused),
        deadline=None if config.deadline is None else config.deadline.timestamp(),
    )
    return replace(plan, published=compare_published(plan, config.published))
