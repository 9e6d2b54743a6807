"""The ragged exchange in both forms, and that nothing which crossed a rank is sent again in a backward pass."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType

from rungwise.comm.collectives import COLLECTIVE, emulated_ragged_all_to_all

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "ragged_all_to_all")


def random_tables(seed, *, ranks, slices, num_rows, num_out):
    """Slices that do not overlap in an output, in any order and with gaps; overlapping in an operand across ranks."""
    random = np.random.default_rng(seed)
    size = random.integers(0, num_out // (ranks * slices) + 1, size=(ranks, ranks, slices))  # [source, receiver, slice]
    source = random.integers(0, num_rows - size.max(), size=size.shape)
    for sender, receiver in np.ndindex(ranks, ranks):  # no row twice to one receiver
        taken = np.cumsum(size[sender, receiver]) - size[sender, receiver]
        source[sender, receiver] = taken + random.integers(0, num_rows - size[sender, receiver].sum() + 1)
    target = np.zeros_like(size)
    for receiver in range(ranks):
        order = random.permutation(ranks * slices)
        lengths = size[:, receiver].reshape(-1)[order] + random.integers(0, 2, ranks * slices)
        first = np.zeros(ranks * slices, int)
        first[order] = np.cumsum(lengths) - lengths
        target[:, receiver] = first.reshape(ranks, slices)
    received = np.swapaxes(size, 0, 1)
    return [table.reshape(ranks, -1).astype(np.int32) for table in (source, size, target, received)]


def test_collectives_emulated_ragged_exchange_equals_a_loop_with_its_gradient():
    ranks, slices, num_rows, num_out = 3, 2, 20, 40
    tables = random_tables(0, ranks=ranks, slices=slices, num_rows=num_rows, num_out=num_out)
    random = np.random.default_rng(1)
    operand, output, weight = (random.normal(size=(ranks, rows, 4)) for rows in (num_rows, num_out, num_out))
    want, want_gradient = output.copy(), np.zeros_like(operand)
    source, size, target, _ = (table.reshape(ranks, ranks, slices) for table in tables)
    for sender, receiver, part in np.ndindex(ranks, ranks, slices):
        for step in range(size[sender, receiver, part]):
            row, place = source[sender, receiver, part] + step, target[sender, receiver, part] + step
            want[receiver, place] = operand[sender, row]
            want_gradient[sender, row] += weight[receiver, place]
    assert (want != output).any(-1).sum() > 10

    @jax.jit
    def exchange(operand):
        one_rank = lambda *args: emulated_ragged_all_to_all(*args, axis_name="expert")  # noqa: E731
        return jax.vmap(one_rank, axis_name="expert")(operand, jnp.asarray(output), *tables)

    got, pull = jax.vjp(exchange, jnp.asarray(operand))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.asarray(weight, got.dtype))[0], want_gradient, rtol=1e-5, atol=1e-6)


def text_of(layer, fn, platform="cpu"):
    """StableHLO of a function of (tokens, gates, weights) on a mesh of no devices."""
    mesh = AbstractMesh((layer.config.num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (layer.tokens, layer.gates, layer.weights)
    )
    exported = export.export(
        jax.jit(lambda *args: fn(*args, mesh=mesh)),
        platforms=[platform],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("ragged_all_to_all")],
    )
    return exported(*shapes).mlir_module()


def count(text):
    ragged = text.count("stablehlo.custom_call @ragged_all_to_all(")
    return Counter({kind: text.count(f'"stablehlo.{kind}"(') for kind in KINDS[:-1]}) + Counter(
        ragged_all_to_all=ragged
    )


def step(layer, policy):
    """Loss and gradients with the whole layer rematerialised under a policy."""

    def loss(*args, mesh):
        return jnp.sum(layer.run(*args, mesh=mesh, wrap=lambda fn: jax.checkpoint(fn, policy=policy)).output ** 2)

    return lambda *args, mesh: jax.value_and_grad(lambda *a: loss(*a, mesh=mesh), (0, 1, 2))(*args)


POOL = {"all_to_all": 2, "all_reduce": 1}
CASES = [
    # transport, options, collectives forward, those the backward pass adds
    ("dropless", {}, {"all_gather": 3, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 2}),
    ("expert_cell", {"num_waves": 2}, {"all_to_all": 4}, {"all_to_all": 4}),
    ("pooled_wave", {"num_waves": 2}, {"all_to_all": 4, "all_reduce": 1}, {"all_to_all": 4}),
    ("pooled_wave", {"spill": 1}, POOL, {"all_to_all": 2}),
    ("pooled_wave", {"payload": "mxfp8"}, POOL, {"all_to_all": 2}),
    ("ragged", {}, {"all_gather": 5}, {"reduce_scatter": 2}),
    # The transposed native exchange sends its offsets, two small vectors, once more.
    (
        "ragged",
        {"ragged_exchange": "native"},
        {"all_gather": 1, "ragged_all_to_all": 2},
        {"ragged_all_to_all": 2, "all_to_all": 4},
    ),
]


@pytest.mark.parametrize(("name", "options", "forward", "backward"), CASES)
def test_collectives_nothing_is_sent_twice_under_rematerialisation(moe, name, options, forward, backward):
    layer = moe.layer(name, num_ranks=4, **options)
    platform = "cuda" if options.get("ragged_exchange") == "native" else "cpu"
    both = Counter(forward) + Counter(backward)
    policies = jax.checkpoint_policies
    assert count(text_of(layer, layer.run, platform)) == forward
    assert count(text_of(layer, step(layer, policies.save_only_these_names(COLLECTIVE)), platform)) == both
    control = count(text_of(layer, step(layer, policies.nothing_saveable), platform))
    assert control.total() > both.total()  # the tags matter


def test_collectives_native_ragged_exchange_is_exported_for_cuda_with_mxfp8_bytes(moe):
    layer = moe.layer("ragged", num_ranks=4, ragged_exchange="native", payload="mxfp8")
    text = text_of(layer, layer.run, "cuda")
    moved = [line for line in text.splitlines() if "@ragged_all_to_all(" in line]
    assert len(moved) == 2
    assert all("xui8>" in line.split("->")[-1] for line in moved)
    both = count(text_of(layer, step(layer, jax.checkpoint_policies.save_only_these_names(COLLECTIVE)), "cuda"))
    assert both["ragged_all_to_all"] == 4


def test_collectives_virtual_ranks_emulate_whatever_is_configured(moe):
    layer = moe.layer("ragged", num_ranks=4, ragged_exchange="native")
    plain = dataclasses.replace(layer, config=dataclasses.replace(layer.config, ragged_exchange="emulated"))
    np.testing.assert_array_equal(layer.result().output, plain.result().output)
