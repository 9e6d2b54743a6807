"""Pipeline parallelism: one stage's side of a forward and backward pass over microbatches.

For code that runs once a rank of the axis `pipe`, inside a `shard_map` manual over it. What a stage computes stands in
a `Pipeline`; what it does when, in `comm/pipeline_schedules.py`. A stage without work in a tick computes nothing: its
work is a branch of a conditional, taken alike by all ranks that share the stage, so a branch may hold collectives
over other axes. Between ticks every stage passes one carry on and one gradient back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rungwise.comm.pipeline_schedules import Schedule, Step, program_of

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages. Every rank holds all three functions and parameters for them.

    Attributes:
        enter: (params, microbatch) → carry of the first position: an array of a shape and type of its own.
        run: (params, carry, microbatch, chunk) → (carry, objective, figures), at every position; an objective is the
            scalar that this position adds to what is minimised.
        leave: (params, carry, microbatch) → (objective, figures), at the last position.
    """

    enter: Callable[[Tree, Tree], jax.Array]
    run: Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, jax.Array, Tree]]
    leave: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]


class PipelineResult(NamedTuple):
    """What a stage knows after all microbatches. Nothing is summed over stages."""

    objective: jax.Array
    """Added over microbatches and chunks."""
    figures: Tree
    """Of `run`, leading dimensions [chunks, microbatches]; each is what its own forward pass gave."""
    ending: Tree
    """Of `leave`, leading dimension microbatches; zeros but on the last stage."""


def pipeline_gradient(
    pipeline: Pipeline, params: Tree, microbatches: Tree, *, axis: str, schedule: Schedule
) -> tuple[Tree, PipelineResult]:
    """Gradient, float32, of the sum of all stages' objectives by this stage's parameters, added over microbatches.

    A parameter that several stages hold alike has its whole gradient in the sum over stages.

    Args:
        microbatches: leading dimension microbatches; the same on every stage.
        schedule: of as many stages as the axis has ranks.
    Raises:
        ValueError: the axis has another size, or the microbatches are another number.
    """
    _check(microbatches, axis, schedule)
    params, microbatches = varying((params, microbatches))
    if schedule.name == "1f1b":
        return _one_forward_one_backward(pipeline, params, microbatches, axis, schedule)

    def objective(wide: Tree) -> tuple[jax.Array, PipelineResult]:
        own = _narrowing(pipeline, params)
        result = gpipe(own, wide, microbatches, axis=axis, num_chunks=schedule.num_chunks)
        return result.objective, result

    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)  # so that microbatches add up in float32
    (_, result), grads = jax.value_and_grad(objective, has_aux=True)(wide)
    return grads, result


def gpipe(pipeline: Pipeline, params: Tree, microbatches: Tree, *, axis: str, num_chunks: int = 1) -> PipelineResult:
    """All microbatches forward through this stage; differentiable, and its transpose runs them backward.

    A stage keeps what it is given of every microbatch and computes itself again in its backward. With several chunks as
    many microbatches as there are stages pass one chunk after another.

    Source: Huang et al. 2019, GPipe.
    """
    stage, num_stages = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    (count,) = {len(leaf) for leaf in jax.tree.leaves(microbatches)}
    group = num_stages if num_chunks > 1 else 1
    units = -(-count // group) * group * num_chunks
    like = _shapes(pipeline, params, microbatches)
    nothing = (jnp.zeros((), jnp.float32), _zeros(like.figures), _zeros(like.ending))

    def work(params: Tree, arrived: jax.Array, number: jax.Array) -> tuple[jax.Array, ...]:
        unit = number - stage
        chunk = unit // group % num_chunks
        microbatch = unit // (group * num_chunks) * group + unit % group
        here = _Position((stage == 0) & (chunk == 0), (stage == num_stages - 1) & (chunk == num_chunks - 1), chunk)
        return jax.lax.cond(
            (unit >= 0) & (unit < units) & (microbatch < count),
            lambda: varying(_through(pipeline, params, arrived, _at(microbatches, microbatch), here, like)),
            lambda: varying((arrived, *nothing)),
        )

    def tick(arrived: jax.Array, number: jax.Array) -> tuple[jax.Array, Tree]:
        # Without it the conditional would hand out the weights for its transpose, and the scan keep them once a tick.
        carry, *given = jax.checkpoint(work, prevent_cse=False)(params, arrived, number)
        return _pass_on(carry, axis, 1), given

    def by_chunk(leaf: jax.Array) -> jax.Array:  # [ticks, …] → [chunks, microbatches, …]
        own = jax.lax.dynamic_slice_in_dim(leaf, stage, units)
        own = jnp.moveaxis(own.reshape(-1, num_chunks, group, *own.shape[1:]), 1, 0)
        return own.reshape(num_chunks, -1, *own.shape[3:])[:, :count]

    ticks = jnp.arange(units + num_stages - 1, dtype=jnp.int32)
    _, given = jax.lax.scan(tick, varying(_zeros(like.carry)), varying(ticks))
    objectives, figures, ending = jax.tree.map(by_chunk, given)
    return PipelineResult(jnp.sum(objectives), figures, jax.tree.map(lambda leaf: leaf[-1], ending))


class _Position(NamedTuple):
    """Where in the model a stage works."""

    first: jax.Array
    last: jax.Array
    chunk: jax.Array


class _Shapes(NamedTuple):
    carry: jax.ShapeDtypeStruct
    figures: Tree
    ending: Tree


def _shapes(pipeline: Pipeline, params: Tree, microbatches: Tree) -> _Shapes:
    def trace(params: Tree, microbatch: Tree) -> tuple[jax.Array, Tree, Tree]:
        carry = pipeline.enter(params, microbatch)
        _, _, figures = pipeline.run(params, carry, microbatch, jnp.zeros((), jnp.int32))
        return carry, figures, pipeline.leave(params, carry, microbatch)[1]

    return _Shapes(*jax.eval_shape(trace, params, _at(microbatches, 0)))


def _through(
    pipeline: Pipeline, params: Tree, carry: jax.Array, microbatch: Tree, here: _Position, like: _Shapes
) -> tuple[jax.Array, jax.Array, Tree, Tree]:
    """One microbatch through one position: carry, objective, and what `run` and `leave` report."""
    carry = _entered(pipeline, params, carry, microbatch, here)
    carry, objective, figures = pipeline.run(params, carry, microbatch, here.chunk)
    added, ending = jax.lax.cond(
        here.last,
        lambda: varying(pipeline.leave(params, carry, microbatch)),
        lambda: varying((jnp.zeros((), jnp.float32), _zeros(like.ending))),
    )
    return carry, objective + added, figures, ending


def _entered(pipeline: Pipeline, params: Tree, carry: jax.Array, microbatch: Tree, here: _Position) -> jax.Array:
    return jax.lax.cond(here.first, lambda: varying(pipeline.enter(params, microbatch)), lambda: varying(carry))


class _Kept(NamedTuple):
    """What a stage carries from tick to tick."""

    inputs: jax.Array
    """Carries that wait for their forward or backward, [slots, …]."""
    cotangents: jax.Array
    """Gradients that wait for their backward, [slots, …]."""
    grads: Tree
    result: PipelineResult


def _one_forward_one_backward(
    pipeline: Pipeline, params: Tree, microbatches: Tree, axis: str, schedule: Schedule
) -> tuple[Tree, PipelineResult]:
    """The schedule's table, tick by tick. A stage keeps its inputs alone and computes itself again in its backward.

    A backward gives the figures, so that each is reported once; the last position's forward has nothing to compute.

    Source: Narayanan et al. 2019 (PipeDream) and 2021 (interleaved).
    """
    stage, like = jax.lax.axis_index(axis), _shapes(pipeline, params, microbatches)
    program = program_of(schedule)

    def tick(kept: _Kept, row: jax.Array) -> tuple[_Kept, None]:
        step = Step(*row[stage])
        here = _Position(
            (stage == 0) & (step.chunk == 0),
            (stage == schedule.num_stages - 1) & (step.chunk == schedule.num_chunks - 1),
            step.chunk,
        )
        microbatch = _at(microbatches, step.microbatch)
        carry, cotangent = _at(kept.inputs, step.input_slot), _at(kept.cotangents, step.cotangent_slot)
        idle = jnp.zeros_like(carry)

        def rest() -> Tree:
            return idle, idle, kept.grads, kept.result

        def forward() -> Tree:
            def compute() -> jax.Array:
                entered = _entered(pipeline, params, carry, microbatch, here)
                return varying(pipeline.run(params, entered, microbatch, here.chunk)[0])

            return jax.lax.cond(here.last, lambda: varying(idle), compute), idle, kept.grads, kept.result

        def backward() -> Tree:
            grads, behind, *report = _pulled(pipeline, params, carry, cotangent, microbatch, here, like)
            total = jax.tree.map(lambda sum_, leaf: sum_ + leaf.astype(jnp.float32), kept.grads, grads)
            return idle, behind, total, _with(kept.result, step, here.last, *report)

        ahead, behind, grads, result = jax.lax.switch(
            step.action, [lambda work=work: varying(work()) for work in (rest, forward, backward)]
        )
        inputs = kept.inputs.at[step.arriving_input].set(_pass_on(ahead, axis, 1), mode="drop")
        cotangents = kept.cotangents.at[step.arriving_cotangent].set(_pass_on(behind, axis, -1), mode="drop")
        return _Kept(inputs, cotangents, grads, result), None

    counts = schedule.num_chunks, schedule.num_microbatches
    nothing = _Kept(
        inputs=_zeros(like.carry, program.num_inputs),
        cotangents=_zeros(like.carry, program.num_cotangents),
        grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
        result=PipelineResult(
            jnp.zeros((), jnp.float32), _zeros(like.figures, *counts), _zeros(like.ending, counts[1])
        ),
    )
    kept, _ = jax.lax.scan(tick, varying(nothing), varying(jnp.asarray(program.steps, jnp.int32)))
    return kept.grads, kept.result


def _pulled(
    pipeline: Pipeline,
    params: Tree,
    carry: jax.Array,
    cotangent: jax.Array,
    microbatch: Tree,
    here: _Position,
    like: _Shapes,
) -> tuple[Tree, jax.Array, jax.Array, Tree, Tree]:
    """One microbatch through one position and back: gradients by parameters and carry, objective, figures, ending."""

    def objective(params: Tree, carry: jax.Array) -> Tree:
        carry, objective, figures, ending = _through(pipeline, params, carry, microbatch, here, like)
        return varying((carry, objective)), (figures, ending)

    (_, value), pull, report = jax.vjp(objective, params, carry, has_aux=True)
    ahead = jnp.where(here.last, jnp.zeros_like(cotangent), cotangent)
    return *pull((ahead, jnp.ones_like(value))), value, *report


def _with(
    result: PipelineResult, step: Step, last: jax.Array, objective: jax.Array, figures: Tree, ending: Tree
) -> PipelineResult:
    """The result with what one backward reported."""
    return PipelineResult(
        result.objective + objective,
        jax.tree.map(lambda all_, own: all_.at[step.chunk, step.microbatch].set(own), result.figures, figures),
        jax.tree.map(
            lambda all_, own: all_.at[step.microbatch].set(jnp.where(last, own, all_[step.microbatch])),
            result.ending,
            ending,
        ),
    )


def _pass_on(values: jax.Array, axis: str, direction: int) -> jax.Array:
    """Each stage's values to the next one (1) or the one before (−1), around the end, which chunks alone read."""
    stages = range(jax.lax.axis_size(axis))
    return jax.lax.ppermute(values, axis, [(stage, (stage + direction) % len(stages)) for stage in stages])


def _at(tree: Tree, index: jax.Array | int) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _zeros(like: Tree, *leading: int) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), like)


def _narrowing(pipeline: Pipeline, params: Tree) -> Pipeline:
    """The pipeline for float32 copies of its parameters: each use casts them back to their own type."""

    def own(wide: Tree) -> Tree:
        return jax.tree.map(lambda leaf, narrow: leaf.astype(narrow.dtype), wide, params)

    return Pipeline(
        lambda wide, *rest: pipeline.enter(own(wide), *rest),
        lambda wide, *rest: pipeline.run(own(wide), *rest),
        lambda wide, *rest: pipeline.leave(own(wide), *rest),
    )


def varying(tree: Tree) -> Tree:
    """The same values, of the type that may differ on every rank of every manual axis, as branches must agree in it.

    Without such types (`check_vma=False`, or virtual ranks) it changes nothing.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(leaf).mat.varying)
        return jax.lax.pcast(leaf, missing, to="varying")

    return jax.tree.map(cast, tree)


def _check(microbatches: Tree, axis: str, schedule: Schedule) -> None:
    size = jax.lax.axis_size(axis)
    if size != schedule.num_stages:
        raise ValueError(f"num_stages {schedule.num_stages} does not match axis {axis!r} of size {size}; change one")
    given = {len(leaf) for leaf in jax.tree.leaves(microbatches)}
    if given != {schedule.num_microbatches}:
        raise ValueError(
            f"num_microbatches {schedule.num_microbatches} does not match the {sorted(given)} given; change one"
        )
