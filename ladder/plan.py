"""Every derived number of a family, before anything runs. Imports no jax."""

from dataclasses import asdict, dataclass
from typing import Any

from rungwise.ladder.family import LadderConfig, RunConfig
from rungwise.model.accounting import count_flops, count_params


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
    latent_dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    vocab_size: int
    seq_len: int
    num_params: int
    num_active_params: int
    """Without embedding and head."""
    tokens: int
    tokens_per_active_param: float
    steps: int
    batch_size: int
    tokens_per_step: int
    learning_rate: float
    flops: float
    """Whole attention windows, without head: what forecasts are fitted on."""
    flops_with_head: float
    flops_causal: float
    flops_causal_with_head: float
    optimizer: str
    transport: str
    num_ranks: int
    data_replicas: int
    tokens_per_rank: int
    sender_capacity_factor: float
    receiver_capacity_factor: float


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A family in numbers: every rung's runs, smallest first, and the hero."""

    family: str
    rungs: tuple[RunPlan, ...]
    hero: RunPlan

    @property
    def ladder_flops_share(self) -> float:
        """Training FLOPs of all rung runs, seeds included, over the hero's, without head."""
        return sum(rung.flops for rung in self.rungs) / self.hero.flops

    def to_dict(self) -> dict[str, Any]:
        """What `ladder plan --json` prints."""
        return {
            "family": self.family,
            "rungs": [asdict(rung) for rung in self.rungs],
            "hero": asdict(self.hero),
            "ladder_flops_share": self.ladder_flops_share,
        }


def plan_run(config: RunConfig) -> RunPlan:
    """Every derived number of one run."""
    model, transport = config.model, config.transport
    params, flops = count_params(model), count_flops(model)
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
        num_active_params=params.active,
        tokens=config.tokens,
        tokens_per_active_param=config.tokens / params.active,
        steps=config.steps,
        batch_size=config.batch_size,
        tokens_per_step=config.tokens_per_step,
        learning_rate=config.learning_rate,
        flops=config.tokens * flops.total(head=False),
        flops_with_head=config.tokens * flops.total(head=True),
        flops_causal=config.tokens * flops.total(head=False, causal=True),
        flops_causal_with_head=config.tokens * flops.total(head=True, causal=True),
        optimizer=config.optimizer.name,
        transport=transport.name,
        num_ranks=transport.num_ranks,
        data_replicas=config.data_replicas,
        tokens_per_rank=config.sequences_per_rank * model.seq_len,
        sender_capacity_factor=transport.sender_capacity_factor,
        receiver_capacity_factor=transport.receiver_capacity_factor,
    )


def plan_ladder(config: LadderConfig) -> LadderPlan:
    """The whole family in numbers."""
    return LadderPlan(
        family=config.name,
        rungs=tuple(plan_run(run) for run in config.rung_runs),
        hero=plan_run(config.hero_run),
    )
