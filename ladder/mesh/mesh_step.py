"""The whole training step on a mesh: one `shard_map` over all axes around gradient, sums, update and gathering.

Every collective therefore stands in the lowered text, none is left to the partitioner. `lower_step` gives that text for
any machine, without devices. A run's config says how large each axis is; a step made for one mesh takes any variant of
the config that has the same parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rungwise.comm.mesh import BATCH_AXES, DATA, EXPERT, PIPE, abstract_mesh
from rungwise.ladder.family import RunConfig
from rungwise.ladder.mesh.mesh_layout import Leaf, MeshLayout, build_layout
from rungwise.ladder.training.gradients import Gradient, Share, stages_of
from rungwise.ladder.training.schedule import Horizon, horizon_of
from rungwise.ladder.training.step import (
    StepFigures,
    TrainState,
    compute_dtype,
    init_state,
    make_eval_step,
    make_train_step,
)

HOST = "pinned_host"
"""Memory kind of what waits in the host's memory; on CPU there is no other memory, so nothing is saved there."""

EVERYWHERE = PartitionSpec()
TOKENS = PartitionSpec(DATA, EXPERT)
"""Of a training batch [replicas, ranks, sequences, tokens]."""
SEQUENCES = PartitionSpec(BATCH_AXES)
"""Of an evaluation batch [sequences, tokens]."""


@dataclass(frozen=True)
class MeshPlan:
    """A run's state on a mesh: what lies where."""

    config: RunConfig
    mesh: Mesh | AbstractMesh

    @cached_property
    def like(self) -> TrainState:
        """Shapes of the whole state, as on one device and in checkpoints."""
        return jax.eval_shape(lambda: init_state(self.config))

    @cached_property
    def layout(self) -> MeshLayout:
        config = self.config
        return build_layout(
            self.like.params,
            dict(self.mesh.shape),
            optimizer=config.optimizer.name,
            weights=config.mesh.weights,
            optimizer_state=config.mesh.optimizer,
            stages=stages_of(config),
        )

    @property
    def share(self) -> Share:
        return Share(**self.mesh.shape)

    @cached_property
    def specs(self) -> TrainState:
        """How the state lies on the axes."""
        layout = self.layout
        params = layout.map(lambda leaf, _: leaf.rest_spec, self.like.params)
        state = layout.map_state(lambda leaf, _: leaf.part_spec, self.like.optimizer, other=lambda _: EVERYWHERE)
        return self.like._replace(params=params, optimizer=state, bias=EVERYWHERE, step=EVERYWHERE)

    @property
    def shardings(self) -> TrainState:
        """Where the state lies between steps."""
        placed = self.placed(self.specs)
        if self.config.mesh.offload != "optimizer":
            return placed
        host = self.layout.map_state(
            lambda _, sharding: sharding.with_memory_kind(HOST), placed.optimizer, other=lambda place: place
        )
        return placed._replace(optimizer=host)

    def placed(self, specs: Any) -> Any:
        """Shardings of a tree of specs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def pack(self, whole: TrainState) -> TrainState:
        """The whole state as it lies on all ranks together; under `jax.jit` with `shardings`."""

        def params(leaf: Leaf, array: jax.Array) -> jax.Array:
            return leaf.to_rest(self._at(array, leaf.whole_spec))

        def parts(leaf: Leaf, array: jax.Array) -> jax.Array:
            return leaf.to_parts(self._at(array, leaf.whole_spec))

        return self._mapped(whole, params, parts)

    def unpack(self, state: TrainState) -> TrainState:
        """Inverse of `pack`."""

        def params(leaf: Leaf, array: jax.Array) -> jax.Array:
            return leaf.from_rest(self._at(array, leaf.gathered_rest_spec))

        def parts(leaf: Leaf, array: jax.Array) -> jax.Array:
            return leaf.from_parts(self._at(array, leaf.gathered_part_spec))

        return self._mapped(state, params, parts)

    def _mapped(self, state: TrainState, params: Any, parts: Any) -> TrainState:
        optimizer = self.layout.map_state(parts, state.optimizer, other=lambda array: array)
        return state._replace(params=self.layout.map(params, state.params), optimizer=optimizer)

    def _at(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array gathered to where it can be cut and joined in place: one at a time, and no more than that."""
        if isinstance(self.mesh, AbstractMesh) or AxisType.Explicit in self.mesh.axis_types:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def abstract_state(self) -> TrainState:
        """Shapes and places of the state, nothing allocated."""
        shapes = jax.eval_shape(lambda: self.pack(init_state(self.config)))
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, self.shardings
        )


def mesh_gradient(config: RunConfig, plan: MeshPlan) -> Gradient | None:
    """A device's gradient function where layers lie on several stages; None for that of `training/gradients.py`."""
    if plan.mesh.shape[PIPE] == 1:
        return None
    from rungwise.ladder.mesh.pipeline_step import make_pipeline_gradient

    gather = plan.layout.gather_weights
    return make_pipeline_gradient(config, compute_dtype(config.execution), share=plan.share, gather=gather)


def make_mesh_step(
    config: RunConfig, plan: MeshPlan
) -> Callable[[TrainState, jax.Array, Horizon], tuple[TrainState, StepFigures]]:
    """One optimizer step on all devices: (state, tokens [replicas, ranks, sequences, seq + 1], horizon) → as on one.

    Args:
        config: the run's, or a variant with the same parameters.
    """
    gradient = mesh_gradient(config, plan)
    step = make_train_step(config, share=plan.share, layout=plan.layout, gradient=gradient)

    def one_device(state: TrainState, tokens: jax.Array, horizon: Horizon) -> tuple[TrainState, StepFigures]:
        return step(state, tokens.reshape(-1, tokens.shape[-1]), horizon)

    everywhere = jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(plan.specs, TOKENS, EVERYWHERE),
        out_specs=(plan.specs, EVERYWHERE),
        check_vma=False,
    )
    if config.mesh.offload != "optimizer":
        return everywhere

    def with_host(state: TrainState, tokens: jax.Array, horizon: Horizon) -> tuple[TrainState, StepFigures]:
        here = jax.device_put(state.optimizer, plan.placed(plan.specs.optimizer))
        return everywhere(state._replace(optimizer=here), tokens, horizon)

    return with_host


def jit_mesh_step(config: RunConfig, plan: MeshPlan) -> Any:
    """`make_mesh_step` as a program that uses its state up and leaves the next where it lay."""
    return jax.jit(make_mesh_step(config, plan), donate_argnums=0, out_shardings=(plan.shardings, None))


def make_mesh_eval_step(
    config: RunConfig, plan: MeshPlan, *, dropping: bool = False
) -> Callable[[TrainState, jax.Array], jax.Array]:
    """Mean loss of each sequence, alike on all devices: (state, tokens) → [batch].

    Tokens are [sequences, seq + 1] without drops, [replicas, ranks, sequences, seq + 1] with them.
    """
    step = make_eval_step(config, dropping=dropping, share=plan.share, layout=plan.layout)
    axes = plan.share.axes

    def one_device(state: TrainState, tokens: jax.Array) -> jax.Array:
        losses = step(state, tokens.reshape(-1, tokens.shape[-1])).reshape(tokens.shape[:-1])
        if not dropping:
            return jax.lax.all_gather(losses, axes, tiled=True) if axes else losses
        for dim, axis in enumerate(BATCH_AXES):
            if axis in axes:
                losses = jax.lax.all_gather(losses, axis, axis=dim, tiled=True)
        return losses.reshape(-1)

    return jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(plan.specs, TOKENS if dropping else SEQUENCES),
        out_specs=EVERYWHERE,
        check_vma=False,
    )


def batch_shape(config: RunConfig) -> tuple[int, ...]:
    """Of a training batch as it is dealt out: [replicas, ranks, sequences, seq + 1]."""
    return config.data_replicas, config.transport.num_ranks, config.sequences_per_rank, config.model.seq_len + 1


def lower_step(config: RunConfig, mesh: Mesh | AbstractMesh | None = None, *, platform: str | None = None) -> Any:
    """A run's whole training step, lowered; neither devices nor memory are needed on an abstract mesh.

    Args:
        mesh: an abstract one of the axes that `config.mesh` says when absent.
        platform: `cuda`, `tpu` or `cpu` to lower for; that of this process when absent.
    Returns:
        A `jax.stages.Lowered`: `as_text()` is the StableHLO.
    """
    plan = MeshPlan(config, abstract_mesh(config.mesh.sizes) if mesh is None else mesh)
    horizon = jax.eval_shape(lambda: horizon_of(config))
    places = plan.placed((TOKENS, EVERYWHERE))
    tokens = jax.ShapeDtypeStruct(batch_shape(config), jnp.int32, sharding=places[0])
    horizon = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[1]), horizon)
    traced = jit_mesh_step(config, plan).trace(plan.abstract_state(), tokens, horizon)
    return traced.lower(lowering_platforms=(platform or jax.default_backend(),))
