"""What a family file says of its text and of how context and mixture change over a run. Imports no jax.

Starts of phases are shares of a run's steps, so that rungs and hero go through the same phases at their own size.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rungwise.model.config import Record

LARGEST_CYCLE = 10_000
"""Weights are kept exactly over as many sequences as they add up to, so their sum has a limit."""


class Source(Record):
    """Text of one kind: a corpus, or some of its subsets."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="in metrics: eval/<name>/loss, data/source_fraction")
    path: str | None = Field(default=None, description="as data.path; absent: the shipped corpus")
    subsets: tuple[str, ...] = Field(default=(), description="of that corpus; absent: all of it")


def _pairs(weights: Any) -> Any:
    return tuple(sorted(weights.items())) if isinstance(weights, dict) else weights


Weights = Annotated[tuple[tuple[str, Annotated[int, Field(ge=0)]], ...], BeforeValidator(_pairs)]


class MixturePhase(Record):
    """From here on, sequences are drawn from the sources in these proportions."""

    start: float = Field(default=0.0, ge=0, lt=1, description="share of the run's steps done when it begins")
    weights: Weights = Field(min_length=1, description="whole numbers by source, such as { web = 80, books = 20 }")

    @field_validator("weights")
    @classmethod
    def _check_sum(cls, weights: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        total = sum(weight for _, weight in weights) // max(1, math.gcd(*(weight for _, weight in weights)))
        if not 1 <= total <= LARGEST_CYCLE:
            raise ValueError(
                f"weights {dict(weights)} come to {total} parts, not 1 to {LARGEST_CYCLE:,}; use smaller whole numbers"
            )
        return weights


class DataConfig(Record):
    """Where text comes from."""

    path: str | None = Field(default=None, description="folder of text, JSONL or Parquet; absent: the shipped corpus")
    tokenizer: Literal["bytes", "bpe"]
    max_epochs: float = Field(gt=0, description="more passes over a source than this are refused")
    sources: tuple[Source, ...] = Field(default=(), exclude_if=lambda sources: not sources)
    mixture: tuple[MixturePhase, ...] = Field(default=(), exclude_if=lambda phases: not phases)
    simulate_epochs: bool = Field(
        default=False,
        exclude_if=lambda wanted: not wanted,
        description="a rung repeats a part of each source as often as the hero repeats the whole",
    )

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        names = [source.name for source in self.sources]
        if bool(self.sources) != bool(self.mixture):
            raise ValueError("sources and mixture: give both or neither")
        if self.sources and self.path is not None:
            raise ValueError(f"path {self.path!r} with sources: give each source its own path instead")
        if len(set(names)) < len(names):
            raise ValueError(f"sources {', '.join(names)}: a name comes twice; give each its own")
        _check_starts("mixture", [phase.start for phase in self.mixture], first=0.0)
        for phase in self.mixture:
            for name, _ in phase.weights:
                if name not in names:
                    raise ValueError(f"mixture from {phase.start:g}: {name!r} is no source; known: {', '.join(names)}")
        return self


class ContextPhase(Record):
    """From here on, sequences are longer and correspondingly fewer: a step keeps its number of tokens."""

    start: float = Field(gt=0, lt=1, description="share of the run's steps done when it begins")
    seq_len: int = Field(ge=2)
    window: Literal["kept", "scaled"] = Field(
        default="kept", description="of local layers: as it was, or longer by the same ratio"
    )
    query_key_multiplier: float | None = Field(
        default=None, gt=0, description="absent: the run's own times 1 + 0.1 ln(seq_len over the run's own)"
    )
    max_drop_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="a forward pass at the new length that drops more refuses the phase"
    )


ContextPhases = Annotated[tuple[ContextPhase, ...], Field(exclude_if=lambda phases: not phases)]


def check_context(phases: tuple[ContextPhase, ...], *, seq_len: int, tokens_per_rank: int, run: str) -> None:
    """Refuses lengths that a run's batch cannot be cut into.

    Raises:
        ValueError: starts that do not rise, a length that does not divide a rank's tokens, or lengths of which the
            longest is no multiple.
    """
    _check_starts("context", [phase.start for phase in phases])
    lengths = [seq_len, *(phase.seq_len for phase in phases)]
    for length in lengths:
        if tokens_per_rank % length:
            raise ValueError(
                f"context seq_len {length} does not divide the {tokens_per_rank} tokens of a rank of run {run};"
                " choose a divisor, or other sequences_per_rank"
            )
    for length in lengths:
        if max(lengths) % length:
            raise ValueError(f"context seq_len {length} does not divide the longest, {max(lengths)}; choose a divisor")


def _check_starts(what: str, starts: list[float], *, first: float | None = None) -> None:
    if starts != sorted(set(starts)):
        raise ValueError(f"{what}: starts {starts} must rise from phase to phase")
    if first is not None and starts and starts[0] != first:
        raise ValueError(f"{what}: the first phase starts at {starts[0]:g}; let it start at {first:g}")
