"""Training on a mesh: what lies where, what is sent, and that nothing of it changes a result."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.mesh import build_mesh
from rungwise.comm.sharded import Shards, shard_over, to_row_slices, to_whole_rows
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.ladder.mesh.mesh_layout import build_layout
from rungwise.ladder.mesh.mesh_step import lower_step
from rungwise.model import transformer
from rungwise.model.transformer import abstract_params

CHILD = Path(__file__).with_name("mesh_child.py")


@pytest.fixture(scope="module")
def trained(on_eight_devices: Callable[..., str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Everything `mesh_child.py` found, by variant and mesh."""
    found = json.loads(on_eight_devices(CHILD, flags="--xla_backend_optimization_level=0"))
    return {(result["variant"], result["mesh"]): result for result in found}


@pytest.mark.slow
def test_training_on_a_mesh_keeps_the_assignments_and_the_values_of_one_device(trained):
    for case, result in trained.items():
        assert result["dropped"] > 0.05, f"{case}: nothing dropped, so nothing shown"
        assert result["same_counters"], case
        assert result["error"] < 1e-5, f"{case}: {result['leaf']} differs by {result['error']:.1e}"


@pytest.mark.slow
def test_sharded_optimizer_reduces_by_reduce_scatter_in_the_compiled_text(trained):
    assert trained["pooled", "data=4,expert=2,optimizer=sharded"]["reduce_scatters"] > 0


@pytest.mark.slow
def test_checkpoint_of_one_mesh_is_restored_on_another_and_on_one_device_bit_for_bit(trained):
    assert trained["pooled", "data=4,expert=2,optimizer=sharded"]["restored"]


@pytest.mark.slow
def test_dropless_evaluation_on_a_mesh_is_that_of_one_device(trained):
    assert trained["pooled", "data=4,expert=2,optimizer=sharded"]["evaluation"] < 1e-5


@pytest.mark.slow
def test_evaluation_with_drops_on_a_mesh_in_microbatches_is_that_of_one_device(trained):
    assert trained["waves", "expert=8"]["dropping"] < 1e-5


@pytest.mark.slow
def test_experts_computed_again_send_nothing_again_in_the_compiled_text(trained):
    """Out and back, forward and backward, each in a loop over the waves."""
    assert trained["waves", "expert=8"]["all_to_alls"] == 2 * 2


@pytest.fixture
def rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer to trace instead of all."""
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)


def _config(mesh: str, **changes: Any) -> RunConfig:
    """Four layers of `tiny`, one sequence a rank."""
    rung = load_family("tiny").rung_runs[0]
    model = rung.model.replace(num_layers=4, seq_len=16, window=8)
    return rung.replace(model=model, data_replicas=4, mesh=MeshConfig().changed(mesh), **changes)


def _collectives(config: RunConfig) -> Counter[str]:
    """Collectives of the lowered step by kind; those of a scanned layer count once."""
    return Counter(
        re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all)", lower_step(config).as_text())
    )


def test_sharded_optimizer_reduces_by_reduce_scatter_and_gathers_weights_in_the_lowered_text(rolled):
    replicated, sharded = (
        _collectives(_config(f"data=4,expert=2,optimizer={kind}")) for kind in ("replicated", "sharded")
    )
    parameters = len(jax.tree.leaves(abstract_params(_config("").model)))
    assert (replicated["reduce_scatter"], sharded["reduce_scatter"]) == (0, parameters)
    assert sharded["all_gather"] - replicated["all_gather"] == parameters
    assert sharded["all_to_all"] == replicated["all_to_all"] > 0


def test_every_axis_sums_what_does_not_lie_on_it(rolled):
    layout = _layout("data=4,expert=2")
    experts, head = layout.leaves["layers.moe.experts.down"], layout.leaves["head"]
    assert experts.reduced == ("data",), "the gradient of an expert is not as many times too large as there are ranks"
    assert head.reduced == ("data", "expert")
    assert (experts.spread, head.spread) == (("expert",), ())


def _layout(mesh: str) -> Any:
    config = MeshConfig().changed(mesh)
    return build_layout(
        abstract_params(_config("").model),
        config.sizes,
        optimizer="muonh",
        weights=config.weights,
        optimizer_state=config.optimizer,
    )


@pytest.mark.parametrize("kept", ["", ",optimizer=sharded", ",weights=sharded", ",weights=sharded,pipe=3"])
def test_what_lies_on_the_ranks_is_all_of_a_parameter_and_zeros(kept: str):
    layout = _layout("data=3,expert=4" + kept)
    for name, leaf in layout.leaves.items():
        whole = np.arange(1.0, 1 + np.prod(leaf.shape)).reshape(leaf.shape)
        with jax.disable_jit():
            rest, parts = leaf.to_rest(jnp.asarray(whole)), leaf.to_parts(jnp.asarray(whole))
            np.testing.assert_array_equal(leaf.from_rest(rest), whole, err_msg=name)
            np.testing.assert_array_equal(leaf.from_parts(parts), whole, err_msg=name)
        assert float(jnp.sum(parts)) == float(jnp.sum(rest)) == pytest.approx(float(whole.sum())), name


@pytest.mark.parametrize("stack", [1, 3])
def test_parts_of_a_sum_gather_to_the_sum(stack: int):
    shape = (5, 3, 2)
    shards = Shards(shape=shape, stack=stack, axes=("ranks",), num_ranks=4)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, *shape)), jnp.float32)

    def rank(own: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        part = shards.reduce(own)
        return part, shards.gather(part), shards.gather(shards.own(values[0]))

    parts, gathered, alike = jax.vmap(rank, axis_name="ranks")(values)
    assert parts.shape[1:] == shards.owned_shape
    np.testing.assert_allclose(gathered, np.broadcast_to(values.sum(0), values.shape), rtol=1e-6)
    np.testing.assert_array_equal(alike, np.broadcast_to(values[0], values.shape))


def test_whole_rows_of_slices_and_back():
    rows = jnp.arange(3 * 8.0).reshape(3, 4, 2)  # three rows, each in four slices of two
    slices = jnp.moveaxis(rows, 1, 0)
    whole = jax.vmap(lambda own: to_whole_rows(own, "data", 4), axis_name="data")(slices)
    np.testing.assert_array_equal(whole[:3, 0], rows.reshape(3, 8))
    back = jax.vmap(lambda own: to_row_slices(own, "data", 3), axis_name="data")(whole)
    np.testing.assert_array_equal(back, slices)


def test_an_array_is_dealt_out_over_as_many_axes_as_its_pieces_are_enough_for():
    # 48 layers over 11 replicas: 5 each. Over 64 expert ranks too, 704 pieces would be sent for 48.
    assert shard_over((48, 64, 64), {"data": 11, "expert": 64}, stack=1).axes == ("data",)
    assert shard_over((48, 64, 64), {"data": 11, "expert": 64}, stack=3).axes == ("data", "expert")
    assert shard_over((3, 8, 8), {"data": 8}, stack=1).axes == ()


def test_a_mesh_is_no_part_of_a_runs_identity_and_outlives_a_replacement():
    placed = _config("data=4,expert=2,optimizer=sharded")
    assert placed.content_hash == _config("").content_hash
    assert placed.replace(steps=3).mesh == placed.mesh
    assert placed.mesh.changed(placed.mesh.text) == placed.mesh


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("data=3", "mesh.data 3 does not divide data_replicas 4 of run d32; choose a divisor"),
        ("expert=3", "mesh.expert 3 does not divide transport.num_ranks 4 of run d32; choose a divisor"),
        ("tensor=2", "'tensor=2' is no field=value; fields: data, expert, pipe"),
    ],
)
def test_axes_that_do_not_divide_are_refused_with_the_remedy(mesh: str, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        _config(mesh)


def test_too_few_devices_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"mesh data=2,expert=64,pipe=1 needs 128 devices, .*device_count=128"):
        build_mesh({"data": 2, "expert": 64})
