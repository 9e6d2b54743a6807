"""Which devices a run is spread over, and what of it each of them holds. Imports no jax."""

import math
from typing import Literal, Self

from pydantic import Field

from rungwise.comm.pipeline_schedules import Schedule, layers_of_stages
from rungwise.model.config import Record

AXES = ("data", "expert", "pipe")


class MeshConfig(Record):
    """Devices of a run by axis. Nothing here changes a result beyond rounding: a run may be resumed under another."""

    data: int = Field(default=1, ge=1, description="devices among which the data replicas are dealt out")
    expert: int = Field(default=1, ge=1, description="devices among which the ranks that share the experts are")
    pipe: int = Field(default=1, ge=1, description="devices among which the layers are, in order")
    pipe_schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description="order of a stage's work: backward as soon as possible, or all forward before"
    )
    pipe_chunks: int = Field(default=1, ge=1, description="runs of layers a stage holds; above 1: interleaved 1f1b")
    pipe_head_layers: int = Field(
        default=0, ge=0, description="layers the head counts for, by which the last stage holds fewer"
    )
    weights: Literal["replicated", "sharded"] = Field(
        default="replicated", description="dense weights; sharded: sliced over data and gathered layer by layer"
    )
    optimizer: Literal["replicated", "sharded"] = Field(
        default="replicated", description="optimizer state; sharded: dealt out over the ranks that hold a weight alike"
    )
    offload: Literal["nothing", "optimizer"] = Field(
        default="nothing", description="what lies in the host's memory between steps"
    )

    @property
    def num_devices(self) -> int:
        """Devices of all axes together."""
        return self.data * self.expert * self.pipe

    @property
    def sizes(self) -> dict[str, int]:
        """Devices of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def layers(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage of `pipe`, chunk after chunk: position c · pipe + s is chunk c of stage s."""
        chunks, head = self.pipe_chunks, self.pipe_head_layers
        return layers_of_stages(num_layers, num_stages=self.pipe, num_chunks=chunks, head_layers=head)

    def schedule(self, microbatches: int) -> Schedule:
        """Which stage of `pipe` works on which microbatch when."""
        return Schedule(self.pipe_schedule, self.pipe, microbatches, self.pipe_chunks)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one device"

    @property
    def text(self) -> str:
        """All fields as `changed` takes them."""
        return ",".join(f"{field}={value}" for field, value in self)

    def changed(self, text: str) -> Self:
        """This mesh with some fields changed by `data=2,expert=4,optimizer=sharded`.

        Raises:
            ValueError: a field is unknown or its value is not one of its own.
        """
        changes: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if not equals or key not in type(self).model_fields:
                known = ", ".join(type(self).model_fields)
                raise ValueError(f"mesh {text!r}: {part!r} is no field=value; fields: {known}")
            changes[key] = value
        return self.replace(**changes)


def check_mesh(mesh: MeshConfig, *, run: str, data_replicas: int, num_ranks: int) -> None:
    """Refuses axes that do not divide what is dealt out over them.

    Raises:
        ValueError: naming the axis and what it must divide.
    """
    for axis, what, count in (("data", "data_replicas", data_replicas), ("expert", "transport.num_ranks", num_ranks)):
        size = mesh.sizes[axis]
        if count % size:
            raise ValueError(f"mesh.{axis} {size} does not divide {what} {count} of run {run}; choose a divisor")


def check_pipeline(mesh: MeshConfig, *, run: str, num_layers: int, replicas_here: int, microbatches: int) -> None:
    """Refuses stages without a layer, options of a pipeline where there is none, and those its microbatches do not fit.

    Args:
        replicas_here: data replicas of one device.
    Raises:
        ValueError: naming the field and what it must be.
    """
    if mesh.pipe == 1:
        for field in ("pipe_schedule", "pipe_chunks", "pipe_head_layers"):
            if getattr(mesh, field) != type(mesh).model_fields[field].default:
                raise ValueError(
                    f"mesh.{field} {getattr(mesh, field)} of run {run} needs stages; set mesh.pipe above 1"
                )
        return
    try:
        mesh.layers(num_layers)
        mesh.schedule(math.gcd(microbatches, replicas_here))
    except ValueError as error:
        raise ValueError(f"mesh.pipe {mesh.pipe} of run {run}: {error}") from error
