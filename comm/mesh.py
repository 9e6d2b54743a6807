"""The mesh of a run: which axes there are, the devices on them, and sums over them.

`data` ranks hold replicas of everything and read text of their own; `expert` ranks share the experts, and read text of
their own too; `pipe` ranks hold consecutive layers. Sums over no axis leave a value as it is, so that the same code
runs on one device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

DATA, EXPERT, PIPE = "data", "expert", "pipe"
AXES = (DATA, EXPERT, PIPE)

BATCH_AXES = (DATA, EXPERT)
"""Axes over which a batch is dealt out."""

Axes = tuple[str, ...]


def build_mesh(
    sizes: Mapping[str, int], *, devices: Sequence[Any] | None = None, axis_type: AxisType = AxisType.Auto
) -> Mesh:
    """Devices in the order in which jax counts them, the last axis fastest.

    Args:
        sizes: of `AXES`; 1 where absent.
        devices: of all processes; all there are when absent.
    Raises:
        ValueError: there are fewer devices than the axes need, or more in a run of several processes, which would
            leave a process without work.
    """
    shape = [sizes.get(axis, 1) for axis in AXES]
    found = list(jax.devices() if devices is None else devices)
    needed = math.prod(shape)
    if needed > len(found) or (needed < len(found) and jax.process_count() > 1):
        remedy = "choose smaller axes" if needed > len(found) else "choose axes that use all, or fewer processes"
        if needed > len(found) and found[0].platform == "cpu":
            remedy += f", or pretend with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        wanted = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {wanted} needs {needed} devices, {len(found)} present; {remedy}")
    return Mesh(np.asarray(found[:needed], dtype=object).reshape(shape), AXES, axis_types=(axis_type,) * len(AXES))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """The same axes without devices: to lower a program for a machine that is not here."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def add_over(values: Any, axes: Axes) -> Any:
    """Sum over the ranks of the axes, alike on every rank."""
    return jax.lax.psum(values, axes) if axes else values


def max_over(values: Any, axes: Axes) -> Any:
    """Maximum over the ranks of the axes."""
    return jax.lax.pmax(values, axes) if axes else values


def min_over(values: Any, axes: Axes) -> Any:
    """Minimum over the ranks of the axes."""
    return jax.lax.pmin(values, axes) if axes else values


def ranks_of(axes: Axes) -> int:
    """Ranks of the axes together; call where they are bound."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)
