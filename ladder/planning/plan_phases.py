"""What a plan says of phases and sources: each phase's shape and price, and how often each source is read.

Counts the text where it is here, in plain Python: planning stays instant. Imports no jax.
"""

from dataclasses import dataclass

from rungwise.ladder.changing.phases import longest_context, plan_phases, planned_stretches, source_names, weights_of
from rungwise.ladder.family import RunConfig
from rungwise.ladder.text.mixture import epochs_read, lay_out
from rungwise.ladder.text.sources import count_source_tokens, text_is_here
from rungwise.model.accounting import count_flops

PHASE_FLOPS = (
    "flops",
    "flops_with_head",
    "flops_causal",
    "flops_causal_with_head",
    "flops_everything",
    "flops_everything_causal",
)
"""Fields of a phase that add up over a run."""


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase of a run in numbers. FLOPs are of the whole phase, under the conventions of `RunPlan`."""

    first_step: int
    """Steps done before it."""
    last_step: int
    tokens: int
    seq_len: int
    batch_size: int
    sequences_per_rank: int
    window: int
    query_key_multiplier: float
    weights: dict[str, int] | None
    """Of the sources; None where all text is one."""
    flops_per_token: float
    """Without head."""
    flops: float
    flops_with_head: float
    flops_causal: float
    flops_causal_with_head: float
    flops_everything: float
    flops_everything_causal: float
    max_drop_fraction: float | None
    """Measured at its beginning; where more is dropped, the phase before goes on."""


def plan_run_phases(config: RunConfig) -> tuple[PhasePlan, ...]:
    """Every phase of one run; a run without phases has one."""
    return tuple(_plan_phase(config, *phase) for phase in plan_phases(config))


def _plan_phase(run: RunConfig, first: int, last: int, config: RunConfig, context: int | None) -> PhasePlan:
    model, flops = config.model, count_flops(config.model)
    tokens = (last - first) * config.tokens_per_step
    weights = dict(zip(source_names(config), weights_of(config), strict=True)) if config.data.mixture else None
    return PhasePlan(
        first_step=first,
        last_step=last,
        tokens=tokens,
        seq_len=model.seq_len,
        batch_size=config.batch_size,
        sequences_per_rank=config.sequences_per_rank,
        window=model.window,
        query_key_multiplier=model.query_key_multiplier,
        weights=weights,
        flops_per_token=flops.total(head=False),
        flops=tokens * flops.total(head=False),
        flops_with_head=tokens * flops.total(head=True),
        flops_causal=tokens * flops.total(head=False, causal=True),
        flops_causal_with_head=tokens * flops.total(head=True, causal=True),
        flops_everything=tokens * flops.total(head=True, everything=True),
        flops_everything_causal=tokens * flops.total(head=True, causal=True, everything=True),
        max_drop_fraction=None if context is None else run.context[context].max_drop_fraction,
    )


def source_epochs(config: RunConfig) -> dict[str, float] | None:
    """Passes over what the run may read of each source; None without sources, or where their text is not here."""
    if not config.data.sources or not text_is_here(config.data):
        return None
    counts = count_source_tokens(config.data, config.model.vocab_size)  # pyright: ignore[reportArgumentType]
    stretches = planned_stretches(config)
    parts = lay_out(stretches, counts, block=longest_context(config), share=config.text_share)
    return dict(zip(source_names(config), epochs_read(parts, steps=config.steps), strict=True))


def describe_epochs(epochs: dict[str, float] | None) -> str | None:
    """As a forecast's condition states them: "books 0.42, web 1.3"."""
    return None if epochs is None else ", ".join(f"{name} {value:.4g}" for name, value in epochs.items())
