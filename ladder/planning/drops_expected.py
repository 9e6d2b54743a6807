"""What a run's drop figures depend on, and the drop that sampling alone explains. Imports neither jax nor numpy.

A perfectly balanced router still drops: the number of assignments that meet at a bin varies. Its expected excess over
the bin's room, per bin, is

    E[(N − C)₊] ≈ σ (φ(z) − z (1 − Φ(z))),  z = (C − μ) / σ,

with μ and σ² of the counts a token's distinct, equally likely choices give. `comm/drop_study.py` draws the same routes
one by one; the tests compare.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rungwise.comm.buffers import cell_slots, pool_room, ragged_room
from rungwise.comm.config import TransportConfig
from rungwise.ladder.family import RunConfig

MEAN_DOCUMENT_BYTES = 23_626
"""Of the shipped corpus: 10,419,228 bytes of 441 pages (`docs/data.md`)."""

_ANY_WIDTH = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DropConditions:
    """What one run's drop figures rest on. Two runs' figures compare where all of it but the expectations is equal."""

    run: str
    transport: str
    num_ranks: int
    num_experts: int
    top_k: int
    tokens_per_rank: int
    sequences_per_rank: int
    """Those of one sequence resemble one another more than those of two."""
    documents_per_rank: float | None
    """None where the text is not the shipped corpus, read byte by byte."""
    rows_per_pool: int
    """What fills up on its own: a pool per destination and wave, a cell, or a destination's pool; 0: nothing does."""
    rows_per_expert: int
    """Of one wave at the receiver; 0 where experts share."""
    expected_sender: float
    """Share of assignments that a balanced router would lose at the sender."""
    expected_receiver: float
    not_comparable: tuple[str, ...] = ()
    """What differs from the hero's."""

    @property
    def expected(self) -> float:
        return self.expected_sender + self.expected_receiver


_COMPARED = (
    "transport",
    "num_ranks",
    "num_experts",
    "top_k",
    "tokens_per_rank",
    "sequences_per_rank",
    "rows_per_pool",
    "rows_per_expert",
)


def drop_conditions(config: RunConfig) -> DropConditions:
    """Conditions of one run's drop figures."""
    transport, model = config.transport, config.model
    tokens = config.sequences_per_rank * model.seq_len
    pool, expert = _room(transport, tokens)
    sender, receiver = expected_drops(transport, num_tokens=tokens)
    documents = None
    if config.data.path is None and not config.data.sources and config.data.tokenizer == "bytes":
        documents = config.sequences_per_rank * (1 + model.seq_len / MEAN_DOCUMENT_BYTES)
    return DropConditions(
        run=config.run,
        transport=transport.name,
        num_ranks=transport.num_ranks,
        num_experts=transport.num_experts,
        top_k=transport.top_k,
        tokens_per_rank=tokens,
        sequences_per_rank=config.sequences_per_rank,
        documents_per_rank=documents,
        rows_per_pool=pool,
        rows_per_expert=expert,
        expected_sender=sender,
        expected_receiver=receiver,
    )


def compare_with_hero(runs: Iterable[DropConditions], hero: DropConditions) -> dict[str, DropConditions]:
    """Conditions by run, each marked with what differs from the hero's."""
    marked = {}
    for own in (*runs, hero):
        differs = [name for name in _COMPARED if getattr(own, name) != getattr(hero, name)]
        reasons = tuple(f"{name} {getattr(own, name)}, hero {getattr(hero, name)}" for name in differs)
        marked[own.run] = DropConditions(**{**vars(own), "not_comparable": reasons})
    return marked


def _room(config: TransportConfig, tokens: int) -> tuple[int, int]:
    """Rows of the bin that fills up at the sender's table, and of an expert at the receiver."""
    if config.name == "pooled_wave":
        room = pool_room(config, num_tokens=tokens, width=_ANY_WIDTH)
        return room.pool, room.expert
    if config.name == "expert_cell":
        return cell_slots(config, num_tokens=tokens), 0
    return (ragged_room(config, num_tokens=tokens).pool, 0) if config.name == "ragged" else (0, 0)


def expected_drops(config: TransportConfig, *, num_tokens: int) -> tuple[float, float]:
    """Shares of assignments lost at sender and receiver if all experts were equally likely; without spill.

    Args:
        num_tokens: of one rank, all valid.
    """
    ranks, waves, items = config.num_ranks, config.num_waves, num_tokens * config.top_k
    pool, expert = _room(config, num_tokens)
    if config.name == "expert_cell":
        return _excess(num_tokens, 1, config, room=pool), 0.0
    if config.name == "ragged":
        return _excess(ranks * num_tokens, config.experts_per_rank, config, room=pool), 0.0
    if config.name != "pooled_wave":
        return 0.0, 0.0
    sender = _excess(num_tokens, config.experts_per_rank, config, room=pool * waves)
    mean = items * (1 - sender) / waves  # arriving at a rank in one wave
    spread = ranks * _variance(num_tokens, config.experts_per_rank, config) / waves**2
    share = 1 / config.experts_per_rank
    deviation = math.sqrt(mean * share * (1 - share) + spread * share**2)
    receiver = _overflow(mean * share, deviation, expert) / (items / waves * share)
    return sender, receiver


def _variance(tokens: int, experts: int, config: TransportConfig) -> float:
    """Of the number of assignments that `tokens` tokens send to `experts` of all experts: hypergeometric a token."""
    total, chosen, share = config.num_experts, config.top_k, experts / config.num_experts
    return tokens * chosen * share * (1 - share) * (total - chosen) / max(1, total - 1)


def _excess(tokens: int, experts: int, config: TransportConfig, *, room: int) -> float:
    """Expected excess of a bin over its expected count."""
    mean = tokens * config.top_k * experts / config.num_experts
    return _overflow(mean, math.sqrt(_variance(tokens, experts, config)), room) / mean


def _overflow(mean: float, deviation: float, room: float) -> float:
    """E[(N − room)₊] of a normal count."""
    if deviation == 0:
        return max(0.0, mean - room)
    z = (room - mean) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * max(0.0, density - z * math.erfc(z / math.sqrt(2)) / 2)
