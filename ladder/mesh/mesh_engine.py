"""The engine of a mesh: a run's state on the devices of one or of several processes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungwise.comm.mesh import build_mesh
from rungwise.ladder.family import RunConfig
from rungwise.ladder.mesh.mesh_step import (
    EVERYWHERE,
    HOST,
    SEQUENCES,
    TOKENS,
    MeshPlan,
    jit_mesh_step,
    make_mesh_eval_step,
)
from rungwise.ladder.mesh.processes import meet
from rungwise.ladder.training.schedule import Horizon
from rungwise.ladder.training.step import StepFigures, TrainState, init_state, state_to_tree, tree_to_state

Tree = dict[str, Any]


@dataclass(frozen=True)
class MeshProgram:
    """A compiled training step that takes batches as they come from the host."""

    compiled: Any
    place: Callable[[np.ndarray, Horizon], tuple[jax.Array, Horizon]]

    def __call__(self, state: TrainState, tokens: np.ndarray, horizon: Horizon) -> tuple[TrainState, StepFigures]:
        return self.compiled(state, *self.place(tokens, horizon))


class MeshEngine:
    """A run's state on a mesh. Implements `ladder.engine.Engine`."""

    def __init__(self, config: RunConfig, *, mesh: Mesh | None = None) -> None:
        mesh = build_mesh(config.mesh.sizes) if mesh is None else mesh
        _check_offload(config, mesh)
        self._config, self._mesh, self._plan = config, mesh, MeshPlan(config, mesh)
        self._unpack: Callable[[TrainState], TrainState] | None = None
        self.devices = f"{jax.devices()[0].platform}, mesh {config.mesh}"

    def init_state(self) -> TrainState:
        plan = self._plan
        return _ready(jax.jit(lambda: plan.pack(init_state(self._config)), out_shardings=plan.shardings))()

    def abstract_tree(self) -> Tree:
        places = self._whole_shardings
        like = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), self._plan.like, places
        )
        return state_to_tree(like)

    def to_tree(self, state: TrainState) -> Tree:
        unpack = self._unpack
        if unpack is None:
            unpack = _ready(jax.jit(self._plan.unpack, out_shardings=self._whole_shardings), state)
            self._unpack = unpack
        return state_to_tree(unpack(state))

    def from_tree(self, tree: Tree) -> TrainState:
        whole = tree_to_state(tree, self._plan.like)
        return _ready(jax.jit(self._plan.pack, out_shardings=self._plan.shardings), whole)(whole)

    @cached_property
    def _whole_shardings(self) -> TrainState:
        """Where whole arrays lie that go to a checkpoint or come from one: dealt out along what axes divide."""
        layout, mesh = self._plan.layout, self._mesh

        def place(leaf: Any, array: Any) -> NamedSharding:
            return NamedSharding(mesh, _dividing(array.shape, leaf.spread, mesh))

        everywhere = NamedSharding(mesh, EVERYWHERE)
        like = self._plan.like
        optimizer = layout.map_state(place, like.optimizer, other=lambda _: everywhere)
        params = layout.map(place, like.params)
        return like._replace(params=params, optimizer=optimizer, bias=everywhere, step=everywhere)

    def compile_step(self, config: RunConfig, state: TrainState, tokens: np.ndarray, horizon: Horizon) -> MeshProgram:
        config = config.replace(mesh=self._config.mesh)
        step = jit_mesh_step(config, self._plan)
        compiled = _ready(step, state, self._dealt(config, tokens), self._copied(horizon))
        return MeshProgram(compiled, lambda tokens, horizon: (self._dealt(config, tokens), self._copied(horizon)))

    def eval_step(self, config: RunConfig, *, dropping: bool = False) -> Any:
        config = config.replace(mesh=self._config.mesh)
        step = jax.jit(make_mesh_eval_step(config, self._plan, dropping=dropping))
        share = self._plan.share.devices
        compiled: dict[tuple[int, ...], Any] = {}

        def run(state: TrainState, tokens: np.ndarray) -> np.ndarray:
            rows = np.arange(-(-len(tokens) // share) * share) % len(tokens)  # repeated up to an equal share for all
            placed = self._dealt(config, tokens) if dropping else self._put(tokens[rows], SEQUENCES)
            if placed.shape not in compiled:
                compiled[placed.shape] = _ready(step, state, placed)
            return np.asarray(compiled[placed.shape](state, placed))[: len(tokens)]

        return run

    def _dealt(self, config: RunConfig, tokens: np.ndarray) -> jax.Array:
        """A batch in order, over replicas and ranks."""
        return self._put(tokens.reshape(config.data_replicas, config.transport.num_ranks, -1, tokens.shape[-1]), TOKENS)

    def _copied(self, horizon: Horizon) -> Horizon:
        return jax.tree.map(lambda leaf: self._put(np.asarray(leaf), EVERYWHERE), horizon)

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """An array that every process holds whole, each device its part."""
        array = np.asarray(array, np.int32) if array.dtype.kind in "iu" else array
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda index: array[index])


def _ready(program: Any, *args: Any) -> Any:
    """A program compiled for these arguments, once all processes have compiled it."""
    compiled = program.lower(*args).compile()
    meet("compiled")
    return compiled


def _check_offload(config: RunConfig, mesh: Mesh) -> None:
    device = mesh.devices.flat[0]
    if config.mesh.offload != "nothing" and HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise ValueError(
            f"mesh.offload {config.mesh.offload!r}: devices of kind {device.device_kind!r} reach no memory of kind"
            f" {HOST!r}; set offload = 'nothing'"
        )


def _dividing(shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
    """Axes over the dimensions they divide, the first that does; an axis that divides none is left out."""
    names: list[str | None] = [None] * len(shape)
    for axis in axes:
        size = mesh.shape[axis]
        for dim, length in enumerate(shape):
            if names[dim] is None and length % size == 0:
                names[dim] = axis
                break
    return PartitionSpec(*names)
