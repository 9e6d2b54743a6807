"""How routed tokens reach their experts: a `comm` transport over ranks, around the model's expert weights.

On one device the ranks are virtual: the batch is cut into data replicas × ranks, and each rank runs the same per-rank
code with its own experts. On a mesh, inside a `shard_map` over all of its axes, the ranks are dealt out over the
devices of the axis `expert`, several virtual ones on each where there are more ranks than devices. Evaluation uses the
same function with the `dropless` transport.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rungwise.comm.config import TransportConfig
from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.mesh import EXPERT, Axes
from rungwise.comm.mxfp8 import clipped_by_row
from rungwise.comm.mxfp8_product import SCALE, mxfp8_matmul
from rungwise.comm.ranks import Ranks, over_ranks
from rungwise.comm.transports import route
from rungwise.model.linear import activation, side_by_side, swiglu
from rungwise.model.moe import MoeMethod, RoutedOutput

AXIS = "rank"
"""Axis of the virtual ranks of one device; real ones are those of the mesh axis `expert`."""


def dropless_config(num_experts: int, top_k: int, *, num_ranks: int = 1) -> TransportConfig:
    """Every assignment computed: what evaluation uses."""
    return TransportConfig(name="dropless", num_experts=num_experts, top_k=top_k, num_ranks=num_ranks, num_waves=1)


def run_experts(weights: dict[str, jax.Array], rows: jax.Array, group_expert: jax.Array | None = None) -> jax.Array:
    """Each group of rows through its expert's SwiGLU: [groups, rows, width] → the same shape.

    Args:
        weights: `gate_up` [experts, width, 2, inner], `down` [experts, inner, width].
        group_expert: expert of each group; absent where group g belongs to expert g.
    """
    if group_expert is None:
        return swiglu(weights["gate_up"], weights["down"], rows)
    gate_up = weights["gate_up"]
    hidden = grouped_matmul(rows, gate_up.reshape(*gate_up.shape[:2], -1), group_expert)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return grouped_matmul(jax.nn.silu(gate) * up, weights["down"], group_expert)


def run_experts_mxfp8(
    weights: dict[str, jax.Array], rows: jax.Array, group_expert: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`run_experts` in MXFP8 products, and how many values of each row and of its inner values were clipped.

    Equal groups may have several leading dimensions, as many as the weights.
    """
    lead, width = rows.shape[:-2], rows.shape[-1]
    rows = rows.reshape(-1, rows.shape[-2], width)
    gate_up, down = side_by_side(weights["gate_up"]), weights["down"]
    if group_expert is None:
        gate_up, down = (leaf.reshape(-1, *leaf.shape[-2:]) for leaf in (gate_up, down))
    inner = activation(mxfp8_matmul(rows, gate_up, group_expert))
    outputs = mxfp8_matmul(inner, down, group_expert)
    clipped = clipped_by_row(rows, scale=SCALE) + clipped_by_row(inner, scale=SCALE)
    return outputs.reshape(*lead, -1, width), clipped.reshape(*lead, -1)


def _of_ranks(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` that, mapped over data replicas, lays their rows end to end: weights are read and their gradient
    is summed once, in one matrix product, instead of once a replica."""

    @jax.custom_batching.custom_vmap
    def of_ranks(weights: dict[str, jax.Array], rows: jax.Array) -> Any:
        return run(weights, rows)

    @of_ranks.def_vmap
    def _(size: int, mapped: list[Any], weights: dict[str, jax.Array], rows: jax.Array) -> tuple[Any, Any]:
        if all(jax.tree.leaves(mapped)):  # over ranks, each with experts of its own
            results = of_ranks(weights, rows)
        else:
            together = jnp.moveaxis(rows, 0, -3)
            *lead, _, num_rows, width = together.shape
            merged = run(weights, together.reshape(*lead, size * num_rows, width))

            def apart(leaf: jax.Array) -> jax.Array:  # [*lead, size × rows, …] → [size, *lead, rows, …]
                own = leaf.reshape(*lead, size, num_rows, *leaf.shape[len(lead) + 1 :])
                return jnp.moveaxis(own, len(lead), 0)

            results = jax.tree.map(apart, merged)
        return results, jax.tree.map(lambda _: True, results)

    return of_ranks


_equal_groups = {"compute": _of_ranks(run_experts), "mxfp8": _of_ranks(run_experts_mxfp8)}
_named_groups = {"compute": run_experts, "mxfp8": run_experts_mxfp8}


def build_method(
    transport: TransportConfig,
    *,
    data_replicas: int = 1,
    axes: Axes = (),
    expert_devices: int = 1,
    rematerialize_experts: bool = False,
    expert_matmul: str = "compute",
) -> MoeMethod:
    """Routed experts over `data_replicas` groups of `transport.num_ranks` ranks.

    The batch's sequences are dealt out in order: replica by replica, rank by rank.

    Args:
        data_replicas: of this device.
        axes: of the mesh over which the batch is dealt out; none on one device.
        expert_devices: devices that share the ranks of a replica.
        rematerialize_experts: the backward pass computes an expert's inner values again from the rows that reached it,
            which it keeps. Nothing inside crosses a rank. Waves go in turn, so that one's are there at a time.
        expert_matmul: type of the experts' products: `compute`, that of the rows, or `mxfp8`.
    """
    num_ranks = _ranks_here(transport, expert_devices)
    axis, over_own = _over_own_ranks(num_ranks, expert_devices)
    loop = transport.name == "ragged" and axis == EXPERT  # the native exchange knows no vmap

    def one_rank(weights: dict[str, jax.Array], tokens: jax.Array, experts: jax.Array, gates: jax.Array) -> Any:
        def products(rows: jax.Array, group_expert: jax.Array | None = None) -> Any:
            if group_expert is None:
                return _equal_groups[expert_matmul](weights, rows)
            return _named_groups[expert_matmul](weights, rows, group_expert)

        def expert_fn(rows: jax.Array, group_expert: jax.Array | None = None) -> Any:
            given = (jax.checkpoint(products) if rematerialize_experts else products)(rows, group_expert)
            return given if expert_matmul == "compute" else (given[0], jnp.sum(given[1], dtype=jnp.int32))

        in_turn = rematerialize_experts
        return route(tokens, experts, gates, expert_fn, axis=axis, config=transport, in_turn=in_turn)

    def run(latent: jax.Array, experts: jax.Array, gates: jax.Array, weights: dict[str, Any]) -> RoutedOutput:
        batch, seq_len, width = latent.shape
        group = (data_replicas, num_ranks, batch * seq_len // (data_replicas * num_ranks))
        if batch % (data_replicas * num_ranks):
            raise ValueError(
                f"batch {batch} does not divide over {data_replicas} replicas × {num_ranks} ranks; change one"
            )
        owned = jax.tree.map(lambda leaf: leaf.reshape(num_ranks, -1, *leaf.shape[1:]), weights)
        parts = (latent.reshape(*group, width), experts.reshape(*group, -1), gates.reshape(*group, -1))
        every_replica = _in_turn(over_own(one_rank)) if loop else jax.vmap(over_own(one_rank), in_axes=(None, 0, 0, 0))
        result = every_replica(owned, *parts)
        counts = result.counts
        clips = expert_matmul == "mxfp8" or transport.payload == "mxfp8"
        return RoutedOutput(
            output=result.output.reshape(batch, seq_len, width),
            valid=jnp.sum(counts.valid),
            sender_dropped=jnp.sum(counts.sender_dropped),
            receiver_dropped=jnp.sum(counts.receiver_dropped),
            tokens_lost_all_routes=jnp.sum(counts.tokens_lost_all_routes),
            expert_load=jnp.sum(counts.expert_load, axis=(0, 1)),
            rank_load=jnp.sum(counts.rank_load, axis=1),
            # in float32: a whole batch's are more than an int32 can count
            clipped_values=jnp.sum(counts.clipped_values.astype(jnp.float32)) if clips else None,
        )

    return MoeMethod(run=run, data_replicas=data_replicas, num_ranks=num_ranks, axes=axes)


def _ranks_here(transport: TransportConfig, expert_devices: int) -> int:
    if transport.num_ranks % expert_devices:
        raise ValueError(
            f"mesh axis expert {expert_devices} does not divide transport.num_ranks {transport.num_ranks};"
            " choose a divisor"
        )
    return transport.num_ranks // expert_devices


def _over_own_ranks(num_ranks: int, expert_devices: int) -> tuple[Any, Callable[..., Any]]:
    """Name of the axis of all ranks, and what runs a rank's code on those of this device, leading dimension rank."""
    if expert_devices > 1 and num_ranks == 1:
        return EXPERT, _alone
    axis = AXIS if expert_devices == 1 else (EXPERT, AXIS)
    return axis, lambda code: over_ranks(code, Ranks(AXIS, num_ranks))


def _alone(code: Callable[..., Any]) -> Callable[..., Any]:
    """Code of one rank with a leading dimension of one rank, which is real."""

    def run(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], code(*jax.tree.map(lambda leaf: leaf[0], args)))

    return run


def _in_turn(group: Callable[..., Any]) -> Callable[..., Any]:
    """A function of weights and one replica's arrays → the same of all replicas', one after the other."""

    def run(weights: Any, *parts: jax.Array) -> Any:
        results = [group(weights, *(part[index] for part in parts)) for index in range(len(parts[0]))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    return run
