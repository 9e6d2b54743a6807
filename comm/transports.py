"""The one way into a transport: `route` looks the configured name up in a table.

A further transport is one file with the same signature, one line here and one name in `comm/config.py`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxtyping import Array, Bool, Float, Int

from rungwise.comm.config import TransportConfig
from rungwise.comm.dropless import dropless
from rungwise.comm.drops import TransportResult
from rungwise.comm.expert_cell import expert_cell
from rungwise.comm.pooled_wave import pooled_wave
from rungwise.comm.ragged import ragged

TABLE: Mapping[str, Callable[..., TransportResult]] = MappingProxyType(
    {"dropless": dropless, "expert_cell": expert_cell, "pooled_wave": pooled_wave, "ragged": ragged}
)


IN_WAVES = ("expert_cell", "pooled_wave")
"""Transports that send in waves."""


def route(
    tokens: Float[Array, "tokens width"],
    expert_ids: Int[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    expert_fn: Callable[..., Array],
    *,
    axis: str | None,
    config: TransportConfig,
    valid: Bool[Array, " tokens"] | None = None,
    in_turn: bool = False,
) -> TransportResult:
    """Outputs of the chosen experts, weighted by gates and summed per token, through the transport `config` names.

    Code of one rank: call it inside `comm.ranks.over_ranks` (or any function that binds `axis`), with this
    rank's tokens and an `expert_fn` closed over this rank's expert weights.

    Args:
        expert_fn: `(rows, group_expert=None)`; without `group_expert` rows are [local experts, rows,
            width], with it
            [groups, rows, width] and group g is computed by local expert `group_expert[g]`. Gives outputs, or outputs
            and how many values it clipped, which the counts then include.
        axis: name of the rank axis; None only on one rank.
        valid: False marks padding tokens.
        in_turn: waves one after the other, where there are several; else as the compiler likes.
    """
    transport = TABLE[config.name]
    waves = {"in_turn": in_turn} if config.num_waves > 1 and config.name in IN_WAVES else {}
    return transport(tokens, expert_ids, gates, expert_fn, axis=axis, config=config, valid=valid, **waves)
