"""Runs per-rank code on ranks that are real (a mesh axis) or virtual (one device pretends to be many).

The code in between names an axis and calls `jax.lax` collectives over it; it never learns which of the two
it runs on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Ranks:
    """A named axis of `size` ranks: devices of `mesh`, or virtual ranks on one device when there is no mesh."""

    axis: str = "expert"
    size: int = 1
    mesh: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} of axis {self.axis!r} is below 1; set at least 1")
        if self.mesh is not None and self.mesh.shape.get(self.axis) != self.size:
            raise ValueError(
                f"axis {self.axis!r} of size {self.size} is not in mesh {dict(self.mesh.shape)}; name one of its axes"
            )


def over_ranks(fn: Callable[..., Any], ranks: Ranks, *, shared: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`fn` of one rank's values → the same function of all ranks' values.

    Every array of every argument gains a leading dimension, the rank, and so does every array of the
    result. Arguments whose position is in `shared` are the same on each rank and gain none. Keep
    `value_and_grad` outside: the gradient of a shared argument is then summed over the ranks, once.

    Args:
        fn: may call collectives over `ranks.axis`; arguments and result are pytrees of arrays.
        shared: positions of the arguments that all ranks hold alike.
    """
    mesh = ranks.mesh
    if mesh is None:

        def on_virtual(*args: Any) -> Any:
            in_axes = tuple(None if position in shared else 0 for position in range(len(args)))
            return jax.vmap(fn, in_axes=in_axes, axis_name=ranks.axis, axis_size=ranks.size)(*args)

        return on_virtual

    def on_mesh(*args: Any) -> Any:
        def one_rank(*blocks: Any) -> Any:
            own = [
                block if position in shared else jax.tree.map(lambda leaf: leaf[0], block)
                for position, block in enumerate(blocks)
            ]
            return jax.tree.map(lambda leaf: leaf[None], fn(*own))

        split, whole = PartitionSpec(ranks.axis), PartitionSpec()
        in_specs = tuple(whole if position in shared else split for position in range(len(args)))
        if AxisType.Explicit in mesh.axis_types:  # such a mesh refuses arrays that are laid out otherwise
            args = tuple(jax.reshard(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, in_specs, strict=True))
        return jax.shard_map(one_rank, mesh=mesh, in_specs=in_specs, out_specs=split)(*args)

    return on_mesh
