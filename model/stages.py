"""The model's layers on the stages of a pipeline: which rows of a stack a stage holds, and its part of a forward pass.

Each stage holds equally many rows, in the order `comm.pipeline_schedules.stacked_layers` gives. A row of padding
computes nothing: it hands the residual stream on, its figures are zero, and no gradient reaches it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rungwise.comm.pipeline import varying
from rungwise.comm.pipeline_schedules import stacked_layers
from rungwise.model.config import ModelConfig
from rungwise.model.moe import MoeMethod
from rungwise.model.transformer import LayerFigures, LayerInputs, Params, layer_keys, layer_kinds, run_layers

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Layers dealt out over the ranks of a mesh axis, in one chunk a rank or several."""

    num_layers: int
    num_stages: int
    num_chunks: int = 1
    head_layers: int = 0
    axis: str = "pipe"

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Layer of every row, stage by stage; −1 is padding."""
        return stacked_layers(
            self.num_layers,
            num_stages=self.num_stages,
            num_chunks=self.num_chunks,
            head_layers=self.head_layers,
        )

    @property
    def chunk_rows(self) -> int:
        """Rows of one chunk, padding included."""
        return len(self.rows) // (self.num_stages * self.num_chunks)

    @property
    def sure_rows(self) -> int:
        """Rows of a chunk that are a layer on every stage."""
        by_chunk = np.array(self.rows).reshape(-1, self.chunk_rows)
        return int(np.min(np.sum(by_chunk >= 0, axis=1)))

    def layers_here(self, chunk: Int[Array, ""]) -> Int[Array, " rows"]:
        """Layers of one chunk of this rank; −1 is padding."""
        place = jax.lax.axis_index(self.axis) * self.num_chunks + chunk
        return jnp.asarray(self.rows, jnp.int32).reshape(-1, self.chunk_rows)[place]

    def stacked(self, layers: Float[Array, "layers ..."]) -> Float[Array, "rows ..."]:
        """All layers in the order of rows, zeros where a row is padding."""
        order = np.array(self.rows)
        padding = (order < 0).reshape(-1, *(1,) * (layers.ndim - 1))
        return jnp.where(padding, jnp.zeros((), layers.dtype), layers[np.maximum(order, 0)])

    def unstacked(self, stack: Float[Array, "rows ..."]) -> Float[Array, "layers ..."]:
        """Inverse of `stacked`."""
        return stack[np.argsort(self.rows)[-self.num_layers :]]

    def gather(self, own: Tree, *, dim: int = 0) -> Tree:
        """Values of all layers, in order, from those of this rank's rows."""

        def one(leaf: jax.Array) -> jax.Array:
            rows = jnp.moveaxis(jax.lax.all_gather(leaf, self.axis, axis=dim, tiled=True), dim, 0)
            return jnp.moveaxis(self.unstacked(rows), 0, dim)

        return jax.tree.map(one, own)


def run_stage(
    weights: Params,
    bias: Float[Array, "layers experts"],
    x: Float[Array, "batch seq hidden"],
    chunk: Int[Array, ""],
    *,
    stages: Stages,
    config: ModelConfig,
    method: MoeMethod,
    rematerialize: str = "nothing",
    key: jax.Array | None = None,
    gather: Callable[[Params], Params] = lambda weights: weights,
) -> tuple[Float[Array, "batch seq hidden"], LayerFigures]:
    """One chunk of this rank's layers; figures of its rows.

    Args:
        weights: of this rank's rows, all its chunks.
        bias: of all layers.
        key: of random routing, the same on every stage.
    """
    here = stages.layers_here(chunk)
    if stages.num_chunks > 1:
        first = chunk * stages.chunk_rows
        weights = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, stages.chunk_rows), weights)
    every = bias, layer_kinds(config), layer_keys(config, key)
    layers = LayerInputs(weights, *jax.tree.map(lambda leaf: leaf[here], every))

    def run(layers: LayerInputs, x: jax.Array) -> tuple[jax.Array, LayerFigures]:
        return varying(run_layers(layers, x, config=config, method=method, rematerialize=rematerialize, gather=gather))

    sure, figures = stages.sure_rows, []
    if sure:
        x, given = run(_rows(layers, 0, sure), x)
        figures.append(given)
    for row in range(sure, stages.chunk_rows):
        layer = _rows(layers, row, row + 1)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, layer, x)[1])
        x, given = jax.lax.cond(here[row] >= 0, run, lambda _, x, nothing=nothing: varying((x, nothing)), layer, x)
        figures.append(given)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *figures)


def _rows(layers: LayerInputs, start: int, stop: int) -> LayerInputs:
    return jax.tree.map(lambda leaf: leaf[start:stop], layers)
