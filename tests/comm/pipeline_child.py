"""Pipelines of tanh layers, for `test_pipeline.py`, which also runs this with eight CPU devices. Prints JSON."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from rungwise.comm.pipeline import Pipeline, pipeline_gradient
from rungwise.comm.pipeline_schedules import Schedule

WIDTH, ROWS, VOCAB = 6, 3, 5

CASES = (
    Schedule("gpipe", 4, 6),
    Schedule("gpipe", 4, 2),
    Schedule("1f1b", 4, 6),
    Schedule("1f1b", 4, 2),
    Schedule("1f1b", 2, 4, 3),
)


def pipeline_of(enter, run, leave):
    """A pipeline; `run` None: hands on what it is given."""
    return Pipeline(enter, run or (lambda params, carry, microbatch, chunk: (carry, jnp.float32(0), None)), leave)


def make_pipeline():
    """Embedding by table, one tanh layer a chunk, squared distance to a target through the same table (tied)."""

    def enter(params, microbatch):
        return params["table"][microbatch["ids"]]

    def run(params, carry, microbatch, chunk):
        carry = jnp.tanh(carry @ params["layers"][chunk])
        return carry, 0.1 * jnp.sum(jnp.cos(carry)), {"max": jnp.max(carry), "sum": jnp.sum(carry, axis=0)}

    def leave(params, carry, microbatch):
        distance = carry @ params["table"].T - microbatch["targets"]
        return jnp.sum(distance**2), {"norm": jnp.sum(carry**2)}

    return pipeline_of(enter, run, leave)


def make_case(schedule, *, rows=ROWS, width=WIDTH):
    """Random parameters, layers [stages, chunks, width, width], and microbatches."""
    rng = np.random.default_rng(0)
    count = schedule.num_microbatches
    shape = schedule.num_stages, schedule.num_chunks, width, width
    params = {
        "table": rng.normal(size=(VOCAB, width)).astype(np.float32),
        "layers": rng.normal(size=shape).astype(np.float32) / 3,
    }
    microbatches = {
        "ids": rng.integers(0, VOCAB, (count, rows)),
        "targets": rng.normal(size=(count, rows, VOCAB)).astype(np.float32),
    }
    return params, microbatches


def in_one_piece(params, microbatches):
    """Objective of all layers, and what each position and microbatch reports."""
    stages, chunks = params["layers"].shape[:2]
    carry, total, reports = jnp.asarray(params["table"])[microbatches["ids"]], 0.0, {}
    for chunk in range(chunks):
        for stage in range(stages):
            carry = jnp.tanh(carry @ params["layers"][stage, chunk])
            total += 0.1 * jnp.sum(jnp.cos(carry))
            reports[stage, chunk] = {"max": jnp.max(carry, axis=(1, 2)), "sum": jnp.sum(carry, axis=1)}
    distance = carry @ params["table"].T - microbatches["targets"]
    return total + jnp.sum(distance**2), (reports, jnp.sum(carry**2, axis=(1, 2)))


def one_stage(schedule, microbatches):
    """Code of one stage: (its layers, the table) → gradients and result."""

    def run(layers, table):
        params = {"layers": layers, "table": table}
        return pipeline_gradient(make_pipeline(), params, microbatches, axis="pipe", schedule=schedule)

    return run


def over_virtual_stages(schedule, params, microbatches, *, size=None):
    """Gradients and results of every stage, leading dimension stages."""
    run = one_stage(schedule, microbatches)
    size = size or schedule.num_stages
    over = jax.vmap(run, in_axes=(0, None), axis_name="pipe", axis_size=size)
    return jax.jit(over)(params["layers"][:size], params["table"])


def over_mesh(schedule, microbatches, *, check_vma):
    """The same over devices: a function of (layers, table)."""
    mesh = jax.make_mesh(
        (8 // schedule.num_stages, schedule.num_stages), ("data", "pipe"), axis_types=(AxisType.Auto,) * 2
    )

    def run(layers, table):
        result = one_stage(schedule, microbatches)(layers[0], table)
        if check_vma:  # alike on all ranks of data, which has to be said
            result = jax.tree.map(lambda leaf: jax.lax.pmax(leaf, "data"), result)
        return jax.tree.map(lambda leaf: leaf[None], result)

    split = PartitionSpec("pipe")
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split, check_vma=check_vma)
    )


def check_result(params, microbatches, grads, result):
    """Gradients, objective and every figure of every microbatch against the layers in one piece."""
    (objective, (reports, norms)), expected = jax.value_and_grad(in_one_piece, has_aux=True)(params, microbatches)
    np.testing.assert_allclose(jnp.sum(result.objective), objective, rtol=1e-5)
    np.testing.assert_allclose(grads["layers"], expected["layers"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.sum(grads["table"], axis=0), expected["table"], rtol=1e-4, atol=1e-4)
    for (stage, chunk), report in reports.items():
        for name, values in report.items():
            np.testing.assert_allclose(result.figures[name][stage, chunk], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.ending["norm"][-1], norms, rtol=1e-4)
    assert not np.any(result.ending["norm"][:-1])


def permutes_run(jaxpr):
    """How often a program permutes, loops counted as often as they turn."""
    total = 0
    for equation in jaxpr.eqns:
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            total += turns * permutes_run(inner) if hasattr(inner, "eqns") else 0
        total += equation.primitive.name == "ppermute"
    return total


def temporaries(name, num_microbatches, *, rows, width):
    """Bytes that the compiled gradient of four stages needs besides its arguments and results."""
    schedule = Schedule(name, 4, num_microbatches)
    params, microbatches = make_case(schedule, rows=rows, width=width)
    run = over_mesh(schedule, microbatches, check_vma=False)
    memory = run.lower(params["layers"], params["table"]).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def main():
    compared, permutes = 0, {}
    for index, schedule in enumerate(CASES):
        params, microbatches = make_case(schedule)
        for check_vma in (True, False):
            run = over_mesh(schedule, microbatches, check_vma=check_vma)
            check_result(params, microbatches, *run(params["layers"], params["table"]))
            compared += 1
        traced = run.trace(params["layers"], params["table"])
        permutes[index] = {
            "in_text": len(re.findall(r"stablehlo\.collective_permute", traced.lower().as_text())),
            "run": permutes_run(traced.jaxpr.jaxpr),
        }
    names = ("gpipe", "1f1b")
    grown = {name: [temporaries(name, count, rows=256, width=64) for count in (4, 16)] for name in names}
    wide = {name: temporaries(name, 4, rows=8, width=512) for name in names}
    print(json.dumps({"compared": compared, "permutes": permutes, "temporaries": grown, "wide": wide}))


if __name__ == "__main__":
    main()
