"""Collectives of whole training steps lowered for CUDA on meshes without devices, against what the design says."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from rungwise.comm.buffers import pool_room
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.mesh.lowered import Collective, collectives_of, count_collectives
from rungwise.ladder.mesh.mesh_step import lower_step
from rungwise.ladder.planning.memory_weights import EXPERTS, is_matrix, parameter_shapes

SIZES = {"data": 2, "expert": 4, "pipe": 1}

COLUMN = 2**20
"""Bytes above which an operand is a gradient, a weight or rows, no figure of the step."""


def _mesh(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_every_kind_is_counted_with_its_axes_and_the_trips_of_its_loop():
    def of_one_rank(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            added = jax.lax.psum(carry, "expert")
            return added + jax.lax.all_to_all(carry, "expert", 0, 0, tiled=True), None

        x, _ = jax.lax.scan(lambda carry, _: jax.lax.scan(body, carry, None, length=3), x, None, length=5)
        x = jax.lax.psum_scatter(x, ("data", "expert"), tiled=True)
        x = jax.lax.all_gather(x, ("data", "expert"), tiled=True)
        x = jax.lax.ppermute(x, "data", [(0, 1)])
        first, rows = jnp.zeros(4, jnp.int32), jnp.full(4, 2, jnp.int32)
        return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), first, rows, first, rows, axis_name="expert")

    spec = PartitionSpec(("data", "expert"))
    step = jax.jit(jax.shard_map(of_one_rank, mesh=_mesh(SIZES), in_specs=spec, out_specs=spec, check_vma=False))
    lowered = step.trace(jax.ShapeDtypeStruct((64, 4), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    both, rows = ("data", "expert"), (8, 4)
    assert collectives_of(lowered, SIZES) == [
        Collective("all_reduce", ("expert",), 15, rows, 2),
        Collective("all_to_all", ("expert",), 15, rows, 2),
        Collective("reduce_scatter", both, 1, rows, 2),
        Collective("all_gather", both, 1, (1, 4), 2),
        Collective("collective_permute", ("data",), 1, rows, 2),
        Collective("ragged_all_to_all", ("expert",), 1, rows, 2),
    ]


def _hero(**transport: Any) -> RunConfig:
    """The reference's hero on 11 racks of 64, bfloat16, blocks computed again, optimizer state dealt out."""
    hero = load_family("marin").hero_run
    execution = hero.execution.replace(compute_dtype="bfloat16", rematerialize="blocks")
    return hero.replace(
        transport={**vars(hero.transport), **transport},
        execution=execution.model_dump(),
        mesh=hero.mesh.changed("data=11,expert=64,optimizer=sharded").model_dump(),
    )


def _counts(config: RunConfig, *, floor: int = 0) -> dict[tuple[str, tuple[str, ...]], int]:
    found = collectives_of(lower_step(config, _mesh(config.mesh.sizes), platform="cuda"), config.mesh.sizes)
    return count_collectives(found, floor=floor)


def _groups(config: RunConfig) -> tuple[int, int, int]:
    """Parameters dealt out as whole matrices of layers, element by element, and not at all (gates outside layers)."""
    shapes = {name: shape for name, shape in parameter_shapes(config.model).items() if not name.startswith(EXPERTS)}
    matrices = [name for name, shape in shapes.items() if is_matrix(name, shape)]
    stacked = [name for name in matrices if name.startswith("layers.")]
    return len(stacked), len(shapes) - len(matrices), len(matrices) - len(stacked)


def test_step_of_the_reference_hero_holds_the_collectives_of_its_design():
    hero = _hero()
    layers, waves = hero.model.num_layers, hero.transport.num_waves
    stacked, single, whole = _groups(hero)
    data, expert, both = ("data",), ("expert",), ("data", "expert")
    lowered = lower_step(hero, _mesh(hero.mesh.sizes), platform="cuda")
    found = collectives_of(lowered, hero.mesh.sizes)
    counts = count_collectives(found)
    assert (layers, waves, stacked, single, whole) == (48, 3, 12, 12, 4)
    # rows: out and back a wave, forward, computed again and backward
    assert counts["all_to_all", expert] == 6 * waves * layers
    # gradients: matrices and experts over data, what Adam moves over all; the weights come back the same way
    assert counts["reduce_scatter", data] == stacked + 2
    assert counts["reduce_scatter", both] == single
    assert counts["all_gather", both] == single
    assert counts["all_gather", data] == stacked + 2 + 1  # and the loads of the ranks
    large = count_collectives(found, floor=COLUMN)
    assert large["all_reduce", expert] == stacked  # the rest of the sum of what went over data
    assert large["all_reduce", both] == whole + 1  # gates outside layers, and the histogram of the margins
    assert {kind for kind, _ in counts} == {"all_to_all", "reduce_scatter", "all_gather", "all_reduce"}
    room = pool_room(hero.transport, num_tokens=65_536, width=hero.model.routed_dim)
    (shape,) = {item.shape for item in found if item.kind == "all_to_all"}
    assert shape[-3:] == (64, room.header + room.pool, hero.model.routed_dim)


@pytest.mark.slow
def test_step_of_the_reference_hero_over_native_ragged_exchanges():
    hero = _hero(name="ragged", num_waves=1, ragged_exchange="native")
    layers, (stacked, single, _) = hero.model.num_layers, _groups(hero)
    counts = _counts(hero)
    assert counts["ragged_all_to_all", ("expert",)] == 6 * layers
    assert counts["all_gather", ("expert",)] == 2 * layers  # of counts, forward and computed again
    assert counts["all_to_all", ("expert",)] == 4 * layers  # tables of the backward exchanges
    assert counts["reduce_scatter", ("data",)] == stacked + 2
    assert counts["reduce_scatter", ("data", "expert")] == single


@pytest.mark.slow
def test_step_of_gpu_lowers_for_cuda_and_sends_nothing():
    assert _counts(load_family("gpu").hero_run) == {}
