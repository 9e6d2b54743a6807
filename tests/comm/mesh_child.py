"""Run by `test_ranks.py` with eight CPU devices: the same layers on virtual ranks and on a mesh. Prints JSON."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from conftest import make_layer
from jax.sharding import AxisType

from rungwise.comm.collectives import COLLECTIVE

COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")

CASES = (
    ("dropless", {}),
    ("expert_cell", {"num_waves": 2, "spill": 1}),
    ("expert_cell", {"payload": "mxfp8", "payload_scale": "floor"}),
    ("pooled_wave", {}),
    ("pooled_wave", {"num_waves": 2, "spill": 1}),
    ("pooled_wave", {"num_waves": 2, "payload": "mxfp8"}),
    ("ragged", {}),
    ("ragged", {"payload": "mxfp8"}),
)


def build(name, options):
    """Eight ranks with padding, drops, a rank without tokens and experts without tokens."""
    valid = np.random.default_rng(0).random((8, 16)) < 0.8
    valid[3] = False
    return make_layer(name, num_ranks=8, num_experts=16, skew=2.0, valid=valid, **options)


def compare(layer, mesh):
    """Whether kept sets and counters agree, and the largest relative difference of values and gradients."""
    virtual, real = layer.result(), layer.result(mesh=mesh)
    same = jax.tree.map(np.array_equal, (virtual.counts, virtual.kept), (real.counts, real.kept))
    pairs = zip(
        jax.tree.leaves((virtual.output, layer.gradients())),
        jax.tree.leaves((real.output, layer.gradients(mesh=mesh))),
        strict=True,
    )
    error = max(float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(want).max()) for want, got in pairs)
    return {"exact": all(jax.tree.leaves(same)), "error": error}


def compiled_collectives(layer, mesh, *names):
    """Collectives of a compiled training step whose layer is rematerialised but for the named values."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def loss(tokens, gates, weights):
        wrap = lambda fn: jax.checkpoint(fn, policy=policy)  # noqa: E731
        return jnp.sum(layer.run(tokens, gates, weights, mesh=mesh, wrap=wrap).output ** 2)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(layer.tokens, layer.gates, layer.weights).compile()
    text = compiled.as_text() or ""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}


def main():
    """Every transport with its options; both kinds of mesh axis where nothing else is special."""
    checks = []
    for name, options in CASES:
        layer = build(name, options)
        for axis_type in (AxisType.Auto,) if options else (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((8,), ("expert",), axis_types=(axis_type,))
            print(name, options, axis_type, file=sys.stderr, flush=True)
            checks.append({"transport": name, **options, "axis_type": str(axis_type)} | compare(layer, mesh))
            if axis_type == AxisType.Auto:
                checks[-1]["named"] = compiled_collectives(layer, mesh, COLLECTIVE)
                checks[-1]["nothing_named"] = compiled_collectives(layer, mesh)
    print(json.dumps(checks))


if __name__ == "__main__":
    main()
