"""Which transport carries routed tokens, and how much room it reserves. Imports no jax: planning stays instant."""

import difflib
from dataclasses import dataclass

from rungwise.comm.capacity import exact_factor

TRANSPORTS = ("dropless", "pooled_wave")
"""Names `TransportConfig` accepts; `comm/transports.py` holds the function behind each."""


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """One transport of one model on a number of ranks. Expert e is owned by rank e // experts_per_rank.

    A plain dataclass rather than a pydantic record, so that a bad value is a one-line `ValueError`.

    Attributes:
        num_ranks: ranks that share the experts (1: nothing crosses a rank).
        sender_capacity_factor: slots of a sending pool over its fair share of assignments.
        receiver_capacity_factor: slots of an expert over its fair share of assignments.
        num_waves: equal parts in which a pool is sent, so that transport and experts can overlap.
    """

    name: str
    num_experts: int
    top_k: int
    num_ranks: int = 1
    sender_capacity_factor: float = 1.15
    receiver_capacity_factor: float = 1.15
    num_waves: int = 1

    def __post_init__(self) -> None:
        if self.name not in TRANSPORTS:
            near = difflib.get_close_matches(str(self.name), TRANSPORTS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"transport {self.name!r} is unknown; did you mean {near!r}? Known: {', '.join(TRANSPORTS)}"
            )
        for field in ("num_experts", "top_k", "num_ranks", "num_waves"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is below 1; set at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}; lower top_k")
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts {self.num_experts} does not divide by num_ranks {self.num_ranks}; choose a divisor"
            )
        if self.experts_per_rank % self.num_waves:
            raise ValueError(
                f"num_waves {self.num_waves} does not divide {self.experts_per_rank} experts per rank; choose a divisor"
            )
        exact_factor(self.sender_capacity_factor)
        exact_factor(self.receiver_capacity_factor)

    @property
    def experts_per_rank(self) -> int:
        """Experts one rank owns."""
        return self.num_experts // self.num_ranks
