"""Run by `test_ranks.py` with eight CPU devices: the same layers on virtual ranks and on a mesh. Prints JSON."""

import json

import jax
import numpy as np
from conftest import make_layer
from jax.sharding import AxisType


def compare(layer, axis_type):
    """Whether kept sets and counters agree, and the largest relative difference of values and gradients."""
    mesh = jax.make_mesh((layer.config.num_ranks,), ("expert",), axis_types=(axis_type,))
    virtual, real = layer.result(), layer.result(mesh=mesh)
    same = jax.tree.map(np.array_equal, (virtual.counts, virtual.kept), (real.counts, real.kept))
    pairs = zip(
        jax.tree.leaves((virtual.output, layer.gradients())),
        jax.tree.leaves((real.output, layer.gradients(mesh=mesh))),
        strict=True,
    )
    error = max(float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(want).max()) for want, got in pairs)
    return {"exact": all(jax.tree.leaves(same)), "error": error}


def main():
    """Every transport, with one and two waves, padding and drops, under both kinds of mesh axis."""
    valid = np.random.default_rng(0).random((8, 16)) < 0.8
    valid[3] = False  # a rank without tokens
    checks = [
        {"transport": name, "axis_type": str(axis_type), "num_waves": num_waves}
        | compare(
            make_layer(name, num_ranks=8, num_experts=16, num_waves=num_waves, skew=2.0, valid=valid),
            axis_type,
        )
        for name in ("dropless", "pooled_wave")
        for axis_type in (AxisType.Auto, AxisType.Explicit)
        for num_waves in (1, 2)
    ]
    print(json.dumps(checks))


if __name__ == "__main__":
    main()
