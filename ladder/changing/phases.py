"""A run's phases: from which step on it has which context length and mixture. Imports no jax.

A phase is a plain `RunConfig` without phases of its own, so that whatever takes a run's config (training step, plan,
FLOPs, evaluation) takes a phase's. Neither learning rate nor tokens per step change.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from rungwise.ladder.family import RunConfig
from rungwise.ladder.text.data_config import ContextPhase, MixturePhase
from rungwise.ladder.text.mixture import Stretch
from rungwise.model.config import ModelConfig


class Phase(NamedTuple):
    """A part of a run under one config."""

    first_step: int
    """Optimizer steps done before it."""
    last_step: int
    """Done at its end."""
    config: RunConfig
    context: int | None = None
    """Index of the context phase in effect; None: the run's own length."""

    @property
    def tokens(self) -> int:
        """Trained on within it."""
        return (self.last_step - self.first_step) * self.config.tokens_per_step


def query_key_scale(seq_len: int, own: int) -> float:
    """Factor on the query-key multiplier at another context length: 1 + 0.1 · ln(seq_len / own).

    Source: the reference run's plan for longer contexts (marin-community/marin #8435), after YaRN (Peng et al. 2023).

    >>> round(1.3 * query_key_scale(16_384, 4096), 2)
    1.48
    """
    return 1.0 + 0.1 * math.log(seq_len / own)


def model_at(model: ModelConfig, phase: ContextPhase) -> ModelConfig:
    """The same weights at a phase's length: rotary angles and global layers reach further, windows by its rule."""
    scaled = phase.window == "scaled"
    window = max(1, round(model.window * phase.seq_len / model.seq_len)) if scaled else model.window
    multiplier = phase.query_key_multiplier or model.query_key_multiplier * query_key_scale(
        phase.seq_len, model.seq_len
    )
    return model.replace(seq_len=phase.seq_len, window=window, query_key_multiplier=multiplier)


def config_at(config: RunConfig, *, context: ContextPhase | None, mixture: MixturePhase | None) -> RunConfig:
    """A run's config as it is in one phase; a step keeps its tokens, so a rank has fewer, longer sequences."""
    data, model = config.data, config.model
    if mixture is not None:
        data = data.replace(mixture=(mixture.replace(start=0.0),))
    if context is not None:
        model = model_at(model, context)
    tokens_per_rank = config.sequences_per_rank * config.model.seq_len
    return config.replace(model=model, data=data, context=(), sequences_per_rank=tokens_per_rank // model.seq_len)


def plan_phases(config: RunConfig, *, refused: Collection[int] = ()) -> tuple[Phase, ...]:
    """A run cut where its context or mixture changes.

    A phase begins after round(start · steps) steps; where two of a kind begin at the same step the later one holds.

    Args:
        refused: indices of context phases that were refused; the length before them stays.
    """
    context: dict[int, int | None] = {0: None}
    context |= {_step(config, p.start): i for i, p in enumerate(config.context) if i not in refused}
    mixture: dict[int, MixturePhase | None] = {0: None}
    mixture |= {_step(config, phase.start): phase for phase in config.data.mixture}
    starts = [step for step in sorted({*context, *mixture}) if step < config.steps]
    phases = []
    for first, last in zip(starts, [*starts[1:], config.steps], strict=True):
        index = context[max(step for step in context if step <= first)]
        mixed = mixture[max(step for step in mixture if step <= first)]
        length = None if index is None else config.context[index]
        phases.append(Phase(first, last, config_at(config, context=length, mixture=mixed), index))
    return tuple(phases)


def _step(config: RunConfig, start: float) -> int:
    return round(start * config.steps)


def has_phases(config: RunConfig) -> bool:
    """Whether anything changes on the way."""
    return bool(config.context) or len(config.data.mixture) > 1


def weights_of(config: RunConfig) -> tuple[int, ...]:
    """Mixture weights of a phase, by source in order of name; one source has weight 1."""
    if not config.data.mixture:
        return (1,)
    weights = dict(config.data.mixture[0].weights)
    return tuple(weights.get(name, 0) for name in source_names(config))


def source_names(config: RunConfig) -> tuple[str, ...]:
    """Sources in the order in which their text lies in the stream."""
    return tuple(sorted(source.name for source in config.data.sources)) or ("text",)


def stretches_of(parts: Iterable[tuple[int, RunConfig]]) -> tuple[Stretch, ...]:
    """How batches are made, from (first step, config) of each part of a run; equal neighbours are one."""
    found: list[Stretch] = []
    for first, config in parts:
        stretch = Stretch(first, config.model.seq_len, config.batch_size, weights_of(config))
        if not found or found[-1][1:] != stretch[1:]:
            found.append(stretch)
    return tuple(found)


def planned_stretches(config: RunConfig) -> tuple[Stretch, ...]:
    """How batches are made if every phase comes as planned."""
    return stretches_of((phase.first_step, phase.config) for phase in plan_phases(config))


def longest_context(config: RunConfig) -> int:
    """The longest sequence a run may come to, in blocks of which its text is laid out; a branch's, as its parent's."""
    if config.start is not None:
        return config.start.longest_context
    return max([config.model.seq_len, *(phase.seq_len for phase in config.context)])


def describe_parts(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """What differs between two phases, a line each."""
    old, new = before.model, after.model
    if old.seq_len != new.seq_len:
        yield (
            f"context {old.seq_len} → {new.seq_len} tokens, {before.sequences_per_rank} → {after.sequences_per_rank}"
            f" sequences a rank, query-key multiplier {old.query_key_multiplier:.4g} → {new.query_key_multiplier:.4g}"
        )
    if before.data.mixture != after.data.mixture:
        mixtures = (describe_mixture(config) for config in (before, after))
        yield "mixture " + " → ".join(str(mixture) for mixture in mixtures)


def describe_context(config: RunConfig) -> str | None:
    """Context lengths with their starts: "64, 128 from 0.5"; None where the length never changes."""
    if not config.context:
        return None
    return ", ".join([str(config.model.seq_len), *(f"{p.seq_len} from {p.start:g}" for p in config.context)])


def describe_mixture(config: RunConfig) -> str | None:
    """Weights with their starts: "books 4, web 1; from 0.8 books 1, web 1"; None without sources."""
    if not config.data.mixture:
        return None
    said = (
        ("" if phase.start == 0 else f"from {phase.start:g} ") + ", ".join(f"{name} {w}" for name, w in phase.weights)
        for phase in config.data.mixture
    )
    return "; ".join(said)
