"""What one layer leaves for its backward pass, in bytes of one device, part by part. Imports no jax.

Read off what JAX keeps: every term below is an array among the residuals of the scan over layers, and a test counts
them. Tables of a value a row (norms, softmax sums) are counted, single figures are not.
"""

from dataclasses import dataclass

from rungwise.comm.buffers import BLOCK, BufferRows, buffer_rows, mxfp8_bytes, num_blocks, ragged_room, row_bytes
from rungwise.comm.config import TransportConfig
from rungwise.model.config import ModelConfig

QUERY_BLOCK = 128
"""Queries handled together by `model/attention.py`."""

WIDE = 4
"""Bytes of float32 and int32: norms, softmax, router and tables, whatever the type of products."""

Parts = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What one device has of one microbatch, and how it computes."""

    tokens: int
    ranks: int
    """Ranks of the transport on it, over all its data replicas."""
    experts: int
    """Experts whose weights it holds."""
    itemsize: int
    """Bytes of a value in matrix products."""
    copied: bool
    """Weights have another type, so that products read copies of them."""
    accelerator: bool
    """Grouped products do without a copy of weights for each block of rows; ragged rows travel natively."""
    on_mesh: bool
    """Ranks of a group lie on several devices."""
    fused: bool = False
    """As if attention scores never left the chip."""
    experts_again: bool = False
    """The backward pass computes experts again from the rows that reached them, a wave at a time."""
    mxfp8: bool = False
    """Experts multiply in MXFP8, and the backward pass keeps what they multiplied so."""


def saved_activations(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> Parts:
    """Bytes of one layer by part where nothing is computed again."""
    parts = _attention(model, share) | _moe_around(model, share)
    return parts | _transport(model, transport, share) | {"weight_copies": _weight_copies(model, transport, share)}


def kept_activations(model: ModelConfig, transport: TransportConfig, share: DeviceShare, rematerialize: str) -> Parts:
    """Bytes of one layer that wait for the backward pass, under the run's choice of what is computed again."""
    margins = {"margins": margin_bytes(model, share)}
    if rematerialize == "nothing":
        return saved_activations(model, transport, share) | margins
    block_inputs = share.tokens * model.hidden_dim * share.itemsize
    kept = {"block_inputs": 0 if rematerialize == "blocks_offload" else block_inputs} | margins  # else on the host
    if rematerialize in ("blocks_keep_communication", "blocks_offload"):
        kept["transport"] = _crossed(model, transport, share)
    return kept


def margin_bytes(model: ModelConfig, share: DeviceShare) -> int:
    """Of every token's margins over all experts, from which quantile balancing computes the next bias."""
    return share.tokens * model.num_experts * WIDE if model.balance == "quantile" else 0


def scores(model: ModelConfig, share: DeviceShare) -> int:
    """Unnormalised softmax weights, float32: each block of queries against the keys up to its end."""
    if share.fused:
        return 0
    ends = [min(start + QUERY_BLOCK, model.seq_len) for start in range(0, model.seq_len, QUERY_BLOCK)]
    pairs = sum((end - start) * end for start, end in zip(range(0, model.seq_len, QUERY_BLOCK), ends, strict=True))
    return share.tokens // model.seq_len * model.num_heads * pairs * WIDE


def _norm(rows: int, dim: int, *, gain: bool = True) -> int:
    return rows * WIDE * (dim * (1 + gain) + 2)


def _norm_gate(model: ModelConfig, share: DeviceShare) -> int:
    rank = model.gated_norm_rank
    return share.tokens * (model.hidden_dim * (3 * share.itemsize + WIDE) + 4 * rank * share.itemsize) if rank else 0


def _attention(model: ModelConfig, share: DeviceShare) -> Parts:
    tokens, heads, kv_heads = share.tokens, model.num_heads, model.num_kv_heads
    width, query, key = model.hidden_dim, heads * model.head_dim, kv_heads * model.head_dim
    saved = _norm(tokens, width) + _norm_gate(model, share)
    saved += tokens * share.itemsize * (width + 2 * query + 2 * key)  # inputs of products; query, key, value
    for rows in (tokens * heads, tokens * kv_heads):
        saved += _norm(rows, model.head_dim, gain=model.learned_query_key_norm)
    saved += tokens * WIDE * (query + heads)  # mixed values before they are cast, softmax sums
    if model.exclusive_attention:
        saved += tokens * WIDE * (query + key + 2 * heads + 2 * kv_heads)
    if model.attention_gate:
        saved += tokens * (width * share.itemsize + WIDE * (query + 2 * heads))
    channels = {"key": key, "value": key, "attention": width}
    saved += _convolutions(model, share, [channels[site] for site in model.short_conv_sites if site in channels])
    return {"attention": saved, "attention_scores": scores(model, share)}


def _convolutions(model: ModelConfig, share: DeviceShare, channels: list[int]) -> int:
    return share.tokens * WIDE * model.short_conv_kernel * sum(channels)


def _moe_around(model: ModelConfig, share: DeviceShare) -> Parts:
    """Norms, router, latent projections and shared experts: all of the MoE branch that never crosses a rank."""
    tokens, width, experts, chosen = share.tokens, model.hidden_dim, model.num_experts, model.top_k
    router = tokens * (width * WIDE + experts * chosen + 3 * chosen * WIDE + 2 * WIDE)
    if model.gate == "softmax" or model.balance == "auxiliary_loss":
        router += tokens * experts * WIDE
    dense = _norm(tokens, width) + _norm_gate(model, share)
    has_product = model.latent_dim is not None or model.num_shared_experts > 0
    if share.itemsize < WIDE and has_product:
        dense += tokens * width * share.itemsize  # beside the router's float32 rows
    if model.latent_dim is not None:
        dense += _norm(tokens, model.latent_dim) + tokens * model.latent_dim * share.itemsize
    dense += tokens * 2 * model.num_shared_experts * model.expert_dim * share.itemsize
    dense += _convolutions(model, share, [width] if "moe" in model.short_conv_sites else [])
    return {"router": router, "moe_dense": dense}


def rows_of(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> BufferRows:
    """Static rows of one rank."""
    return buffer_rows(transport, num_tokens=share.tokens // share.ranks, width=model.routed_dim)


def _transport(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> Parts:
    """Rows that came back, tables, and what the experts keep."""
    rows, tokens = rows_of(model, transport, share), share.tokens // share.ranks
    row, items = model.routed_dim * share.itemsize, tokens * model.top_k
    experts = rows.computed * row
    if not share.experts_again:
        entering = mxfp8_bytes(model.routed_dim) if share.mxfp8 else row
        experts = rows.computed * (entering + _inner_row(model, transport, share))
    returned, tables = _returned(transport, rows, items, tokens), items * (WIDE + 2)
    if transport.name == "pooled_wave":
        tables += WIDE * (rows.sent + rows.sent + rows.computed if rows.sent else rows.computed)
    elif transport.name == "expert_cell":
        tables += WIDE * rows.computed
    elif transport.name == "ragged":
        native = _native(transport, share)
        tables += WIDE * 2 * items if native else _emulation(model, transport, rows, items)
    else:
        tables = WIDE * (transport.num_ranks * items + rows.computed)
    gates = items * (transport.num_ranks if transport.name == "dropless" else 1) * share.itemsize
    return {"transport": share.ranks * (returned * row + tables + gates), "experts": share.ranks * experts}


def experts_at_once(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> int:
    """Bytes between the products of the experts of one wave: what is there while they are computed again."""
    return share.ranks * rows_of(model, transport, share).computed_at_once * _inner_row(model, transport, share)


def _inner_row(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> int:
    """Bytes of a row between the products of its expert, as the backward pass wants them."""
    if share.mxfp8:
        return 2 * model.expert_dim * share.itemsize + mxfp8_bytes(model.expert_dim)
    return (6 if uses_named_groups(transport) else 2) * model.expert_dim * share.itemsize


def _returned(transport: TransportConfig, rows: BufferRows, items: int, tokens: int) -> int:
    """Rows that wait for the gates to be multiplied with."""
    if transport.num_ranks == 1 or transport.name == "dropless":
        return rows.computed
    return items if transport.name == "ragged" else rows.sent


def _native(transport: TransportConfig, share: DeviceShare) -> bool:
    if transport.ragged_exchange == "by_backend":
        return share.on_mesh and share.accelerator
    return share.on_mesh and transport.ragged_exchange == "native"


def _emulation(model: ModelConfig, transport: TransportConfig, rows: BufferRows, items: int) -> int:
    """Tables of the gathered rows and, of every row and value, whether it came."""
    if transport.num_ranks == 1:
        return WIDE * rows.computed
    ranks = transport.num_ranks
    tables = WIDE * (items + ranks * items + rows.received + ranks * rows.received + items)
    return tables + (rows.received + items) * model.routed_dim


def uses_named_groups(transport: TransportConfig) -> bool:
    """Whether rows come in groups that name their expert, whose products keep more."""
    waves = transport.num_waves if transport.num_ranks > 1 else 1
    return transport.name in ("ragged", "dropless") or (transport.name == "expert_cell" and waves > 1)


def _crossed(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> int:
    """Bytes that arrived from other ranks, out and back, all waves."""
    if transport.num_ranks == 1:
        return 0
    rows, row = rows_of(model, transport, share), model.routed_dim * share.itemsize
    travelling = row_bytes(transport, width=model.routed_dim, itemsize=share.itemsize) if share.on_mesh else row
    if transport.name == "dropless":
        copies = share.ranks if share.on_mesh else share.ranks // transport.num_ranks  # virtual ranks share one
        gathered = rows.received * (row + model.top_k * (WIDE + share.itemsize))
        return copies * gathered + share.tokens * row
    return share.ranks * (rows.received + rows.sent) * travelling


def _weight_copies(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> int:
    """Weights laid side by side, reshaped or cast for a product, which keeps them."""
    width, query = model.hidden_dim, model.num_heads * model.head_dim
    key, shared = model.num_kv_heads * model.head_dim, model.num_shared_experts * model.expert_dim
    values = width * (query + 2 * key) + query * width + width * ((model.latent_dim or 0) + 2 * shared)
    if share.copied:
        values += width * (model.latent_dim or 0) + shared * width
        values += width * model.num_heads * model.attention_gate + 4 * width * model.gated_norm_rank
    return share.itemsize * (values + _expert_copies(model, transport, share))


def _expert_copies(model: ModelConfig, transport: TransportConfig, share: DeviceShare) -> int:
    routed, inner = model.routed_dim, model.expert_dim
    waves = transport.num_waves if transport.num_ranks > 1 else 1
    if share.experts_again:
        return share.experts * routed * inner * 3
    copies = waves if transport.name in ("pooled_wave", "expert_cell") else 1
    if share.mxfp8:
        return share.experts * routed * inner * (2 * copies + (1 if uses_named_groups(transport) else copies))
    if not uses_named_groups(transport):
        return share.experts * routed * inner * (2 * copies + 1)
    if transport.name == "expert_cell" or share.accelerator:
        return share.experts * routed * inner * 3
    tokens = share.tokens // share.ranks
    if transport.name == "ragged":
        blocks = ragged_room(transport, num_tokens=tokens).num_blocks
    else:
        items = transport.num_ranks * tokens * transport.top_k
        blocks = num_blocks(items, block=BLOCK, num_experts=transport.experts_per_rank)
    return share.ranks * blocks * routed * inner * 3
