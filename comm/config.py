"""Which transport carries routed tokens, and how much room it reserves. Imports no jax: planning stays instant."""

import difflib
from dataclasses import dataclass

from rungwise.comm.capacity import exact_factor

TRANSPORTS = ("dropless", "expert_cell", "pooled_wave", "ragged")
"""Names `TransportConfig` accepts; `comm/transports.py` holds the function behind each."""

SPILLING = ("expert_cell", "pooled_wave")
"""Transports that can place an assignment at another of its token's experts."""

_CHOICES = {
    "name": TRANSPORTS,
    "payload": ("compute", "mxfp8"),
    "payload_scale": ("rceil", "floor"),
    "ragged_exchange": ("by_backend", "native", "emulated"),
}


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """One transport of one model on a number of ranks. Expert e is owned by rank e // experts_per_rank.

    A plain dataclass rather than a pydantic record, so that a bad value is a one-line `ValueError`.

    Attributes:
        num_ranks: ranks that share the experts (1: nothing crosses a rank).
        sender_capacity_factor: slots a sender reserves over their fair share of assignments: per destination
            (`pooled_wave`) or per expert (`expert_cell`).
        receiver_capacity_factor: rows a receiver reserves over their fair share: per expert (`pooled_wave`) or
            for all its experts together (`ragged`).
        num_waves: equal parts in which rows are sent: of every pool (`pooled_wave`), of a rank's experts
            (`expert_cell`). `ragged` sends once.
        spill: how many other experts of its own token an assignment without a slot is offered to.
        payload: number format of rows between ranks; `mxfp8` is `comm/mxfp8.py`.
        payload_scale: rule of its scales.
        ragged_exchange: `jax.lax.ragged_all_to_all` or its emulation; by_backend: native on a mesh of
            accelerators. Virtual ranks emulate always.
    """

    name: str
    num_experts: int
    top_k: int
    num_ranks: int = 1
    sender_capacity_factor: float = 1.15
    receiver_capacity_factor: float = 1.15
    num_waves: int = 1
    spill: int = 0
    payload: str = "compute"
    payload_scale: str = "rceil"
    ragged_exchange: str = "by_backend"

    def __post_init__(self) -> None:
        for field, known in _CHOICES.items():
            _check_choice("transport" if field == "name" else field, getattr(self, field), known)
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
        if not 0 <= self.spill < self.top_k:
            raise ValueError(f"spill {self.spill} is not within 0..{self.top_k - 1}, a token's other choices; lower it")
        if self.spill and self.name not in SPILLING:
            raise ValueError(f"spill {self.spill} has no meaning for transport {self.name!r}; set 0")
        if self.payload != "compute" and self.name == "dropless":
            raise ValueError(f"payload {self.payload!r} has no meaning for transport 'dropless'; set 'compute'")
        exact_factor(self.sender_capacity_factor)
        exact_factor(self.receiver_capacity_factor)

    @property
    def experts_per_rank(self) -> int:
        """Experts one rank owns."""
        return self.num_experts // self.num_ranks


def _check_choice(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{what} {value!r} is unknown; did you mean {near!r}? Known: {', '.join(known)}")
