"""Memory planned before anything runs: against shapes, what JAX keeps, and compiled steps on one device."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_flatten_with_path
from rich.console import Console

from rungwise.comm import sharded
from rungwise.ladder.family import RunConfig, load_family, shipped_families
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.ladder.mesh.mesh_layout import build_layout
from rungwise.ladder.planning import memory_layer, memory_weights
from rungwise.ladder.planning.memory import device_share, parse_bytes, plan_memory
from rungwise.ladder.planning.memory_check import MEMORY_VARIABLE, check_device_memory, family_memory, refusal
from rungwise.ladder.planning.memory_layer import kept_activations
from rungwise.ladder.planning.memory_weights import device_weights, parameter_shapes
from rungwise.ladder.planning.plan import plan_ladder
from rungwise.ladder.planning.plan_table import plan_view
from rungwise.ladder.training.gradients import make_gradient
from rungwise.ladder.training.parameter_groups import parameter_name
from rungwise.ladder.training.step import compute_dtype, init_state, make_eval_step
from rungwise.model import transformer
from rungwise.model.attention import QUERY_BLOCK
from rungwise.model.transformer import abstract_params

SHAPE: dict[str, Any] = {
    "hidden_dim": 64,
    "latent_dim": 40,
    "expert_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 10,
    "seq_len": 256,
    "window": 128,
}
"""No two widths alike, and more layers than are unrolled."""

EVERY_OPTION: dict[str, Any] = {
    "attention_gate": True,
    "exclusive_attention": True,
    "gated_norm_rank": 16,
    "embed_norm": True,
    "short_conv_kernel": 4,
    "short_conv_sites": ("key", "value", "attention", "moe"),
    "learned_query_key_norm": False,
    "global_kv_heads": 1,
}


_spec = importlib.util.spec_from_file_location("memory_child", Path(__file__).with_name("memory_child.py"))
assert _spec is not None
assert _spec.loader is not None
_child = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_child)
variant: Callable[..., RunConfig] = partial(_child.variant, shape=SHAPE)
"""The smallest rung of `tiny` in `SHAPE`, changed."""


ONE_WAVE = {"num_waves": 1}
RESIDUALS: dict[str, dict[str, Any]] = {
    "pooled_wave": {},
    "every option": {"model": EVERY_OPTION},
    "no latent width": {"model": {"latent_dim": None}},
    "ragged": {"transport": {"name": "ragged", **ONE_WAVE}},
    "expert_cell": {"transport": {"name": "expert_cell", **ONE_WAVE}},
    "expert_cell in two waves": {"transport": {"name": "expert_cell"}},
    "dropless": {"transport": {"name": "dropless", **ONE_WAVE}},
    "one rank": {"transport": {"num_ranks": 1}, "data_replicas": 8},
    "two microbatches": {"execution": {"microbatches": 2}},
    "experts again": {"execution": {"rematerialize_experts": True}},
    "ragged, experts again": {
        "transport": {"name": "ragged", **ONE_WAVE},
        "execution": {"rematerialize_experts": True},
    },
    "experts in mxfp8": {"execution": {"expert_matmul": "mxfp8"}},
    "ragged, experts in mxfp8": {
        "transport": {"name": "ragged", **ONE_WAVE},
        "execution": {"expert_matmul": "mxfp8"},
    },
    "blocks": {"execution": {"rematerialize": "blocks"}},
    "blocks, pooled_wave kept": {"execution": {"rematerialize": "blocks_keep_communication"}},
    "blocks, ragged kept": {
        "transport": {"name": "ragged", **ONE_WAVE},
        "execution": {"rematerialize": "blocks_keep_communication"},
    },
    "blocks, dropless kept": {
        "transport": {"name": "dropless", **ONE_WAVE},
        "execution": {"rematerialize": "blocks_keep_communication"},
    },
}


QUICK = (("pooled_wave", "float32"), ("every option", "bfloat16"), ("ragged", "bfloat16"))


def _residual_bytes(config: RunConfig) -> float:
    """Bytes of what the scan over layers hands to the backward pass, a layer."""
    state = jax.eval_shape(lambda: init_state(config))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
    gradient = make_gradient(config, compute_dtype(config.execution))
    traced = jax.make_jaxpr(lambda params, bias, batch: gradient(params, bias, batch, None, jnp.zeros((), jnp.int32)))
    layers, found = config.model.num_layers, []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            is_scan = equation.primitive.name == "scan" and equation.params["length"] == layers
            if is_scan and not equation.params["reverse"]:
                stacked = [out.aval for out in equation.outvars if out.aval.shape[:1] == (layers,)]
                found.append(sum(aval.size * aval.dtype.itemsize for aval in stacked))
            for value in equation.params.values():
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    walk(getattr(value, "jaxpr", value))

    walk(traced(state.params, state.bias, tokens).jaxpr)
    assert len(found) == 1
    return found[0] / layers


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if (case, dtype) in QUICK else pytest.mark.slow)
        for case in RESIDUALS
        for dtype in ("bfloat16", "float32")
        if dtype == "bfloat16" or case in ("pooled_wave", "every option")
    ],
)
def test_saved_activations_are_what_jax_hands_to_the_backward_pass(case: str, dtype: str):
    changes = RESIDUALS[case]
    config = variant(**{**changes, "execution": {**changes.get("execution", {}), "compute_dtype": dtype}})
    share = device_share(config, config.mesh, device="cpu")
    planned = kept_activations(config.model, config.transport, share, config.execution.rematerialize)
    assert sum(planned.values()) == pytest.approx(_residual_bytes(config), rel=0.005)


@pytest.mark.parametrize("name", shipped_families())
def test_parameter_shapes_are_the_model_s_of_every_shipped_hero(name: str):
    model = load_family(name).hero_run.model
    leaves = tree_flatten_with_path(abstract_params(model))[0]
    assert parameter_shapes(model) == {parameter_name(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("optimizer", ["adamw", "muonh"])
@pytest.mark.parametrize(
    "mesh",
    [
        "",
        "data=2,expert=4",
        "data=2,expert=4,optimizer=sharded",
        "data=11,expert=64,optimizer=sharded",
        "data=11,expert=64,weights=sharded",
        "data=11,weights=sharded,optimizer=sharded",
        "expert=4,pipe=5",
        "data=2,pipe=4,optimizer=sharded",
        "data=3,expert=4,pipe=4,weights=sharded,optimizer=sharded",
    ],
)
def test_what_a_device_holds_is_what_the_layout_gives_it(mesh: str, optimizer: str):
    placed = MeshConfig().changed(mesh)
    model = load_family("marin").rung_runs[0].model
    config = load_family("marin").hero_run
    config = config.replace(model=model.model_dump(), optimizer={**config.optimizer.model_dump(), "name": optimizer})
    params = abstract_params(model)
    layout = build_layout(
        params,
        placed.sizes,
        optimizer=optimizer,
        weights=placed.weights,
        optimizer_state=placed.optimizer,
    )
    planned = device_weights(config, placed)
    for path, leaf in tree_flatten_with_path(params)[0]:
        name = parameter_name(path)
        rest = jax.eval_shape(layout.leaves[name].to_rest, leaf)
        parts = jax.eval_shape(layout.leaves[name].to_parts, leaf)
        held = {
            "rest": _on_one(rest.shape, layout.leaves[name].rest_spec, placed),
            "part": _on_one(parts.shape, layout.leaves[name].part_spec, placed),
        }
        assert {"rest": planned[name].rest, "part": planned[name].part} == held, name


def _on_one(shape: tuple[int, ...], spec: Any, mesh: MeshConfig) -> int:
    """Elements of one device."""
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(shape) // math.prod(mesh.sizes[axis] for axis in axes)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muonh"])
def test_optimizer_state_is_what_the_optimizer_keeps(optimizer: str):
    config = variant(model=EVERY_OPTION, optimizer={"name": optimizer})
    state = jax.eval_shape(lambda: init_state(config)).optimizer.directions
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert plan_memory(config).phases["update"]["optimizer_state"] == pytest.approx(kept, abs=64)  # but for step counts


def test_constants_of_other_files_are_theirs():
    assert memory_weights.MOST_PADDING == sharded.MOST_PADDING
    assert memory_layer.QUERY_BLOCK == QUERY_BLOCK


HERO_AS_RUN = {
    "mesh": "data=11,expert=64,weights=sharded,optimizer=sharded",
    "execution": "rematerialize=blocks,param_dtype=bfloat16",
    "fused": True,
}
"""The reference kept bfloat16 weights on its devices, float32 ones in the host's memory, and had fused attention."""


def test_of_the_reference_hero_the_fixed_cell_does_not_fit_where_the_pool_in_waves_does():
    memory = family_memory(load_family("marin"), device_memory=parse_bytes("186GB"), **HERO_AS_RUN)
    rows = {row["transport"]: row for row in memory.configurations if row["rematerialize"] == "blocks"}
    assert rows["pooled_wave"]["fits"]
    assert not rows["expert_cell"]["fits"]
    assert 15e9 < rows["expert_cell"]["total"] - rows["pooled_wave"]["total"] < 25e9
    assert rows["dropless"]["total"] > 10 * rows["pooled_wave"]["total"]


def test_experts_computed_again_hold_one_wave_of_the_hero_at_a_time():
    """The reference does so within its three waves: its peak of 149.9 GiB within 3%; a single wave saves nothing."""
    hero = load_family("marin").hero_run
    mesh = hero.mesh.changed(HERO_AS_RUN["mesh"])

    def total(waves: int, *, again: bool) -> int:
        execution = {"rematerialize": "blocks", "param_dtype": "bfloat16", "rematerialize_experts": again}
        run = hero.replace(
            execution={**hero.execution.model_dump(), **execution},
            transport={**vars(hero.transport), "num_waves": waves},
        )
        return plan_memory(run, mesh, fused=True).total

    assert total(3, again=True) == pytest.approx(149.9 * 2**30, rel=0.03)
    assert total(3, again=True) < 0.97 * total(3, again=False)
    assert total(1, again=True) == total(1, again=False)


def test_evaluation_with_drops_takes_the_microbatches_of_a_step_and_their_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)
    found = []
    for parts in (1, 4):
        config = variant(model={"seq_len": 64, "num_layers": 2}, data_replicas=4, execution={"microbatches": parts})
        tokens = np.random.default_rng(0).integers(0, 256, (config.batch_size, 65)).astype(np.int32)
        state = init_state(config)
        lowered = jax.jit(make_eval_step(config, dropping=True)).lower(state, tokens)
        step = lowered.compile(compiler_options=_child.QUICK)
        memory: Any = step.memory_analysis()
        found.append((np.asarray(step(state, tokens)), memory.temp_size_in_bytes))
    (whole, all_of_it), (cut, a_part) = found
    np.testing.assert_allclose(cut, whole, rtol=1e-5)
    assert a_part < 0.6 * all_of_it  # copies of weights are in both


def test_a_receive_buffer_of_the_hero_is_the_published_one():
    """Fixed cells at factor 2, top 4: 3.00 GiB each way; at 1.25, top 8: 3.75 GiB, times 48 layers if all were kept."""
    hero = load_family("marin").hero_run
    cell = {**vars(hero.transport), "name": "expert_cell", "num_waves": 1}
    mesh = hero.mesh.changed("data=11,expert=64")
    for top_k, factor, published in ((4, 2.0, 3.00), (8, 1.25, 3.75)):
        run = hero.replace(
            model=hero.model.replace(top_k=top_k).model_dump(),
            transport={**cell, "top_k": top_k, "sender_capacity_factor": factor},
        )
        assert plan_memory(run, mesh).buffers.receive == pytest.approx(published * 2**30, rel=0.005)


def test_every_run_of_gpu_fits_80_gb_with_room_for_another_compiler():
    memory = family_memory(load_family("gpu"), device_memory=parse_bytes("80GB"))
    assert memory.device == "accelerator"
    assert all(run["fits"] for run in memory.runs.values())
    assert max(run["total"] for run in memory.runs.values()) < 60e9


def test_a_plan_names_what_does_not_fit_and_by_how_much():
    memory = family_memory(load_family("tiny"), device_memory=parse_bytes("100MB"))
    assert [name for name, run in memory.runs.items() if not run["fits"]] == ["hero"]
    hero = memory.runs["hero"]
    assert hero["short_by"] == hero["total"] - 100_000_000
    totals = [row["total"] for row in memory.configurations]
    assert totals == sorted(totals)
    assert len(totals) == 12


def test_a_rung_takes_as_many_devices_of_data_as_divide_its_replicas():
    memory = family_memory(load_family("marin"), mesh="data=11,expert=64", execution="rematerialize=blocks")
    meshes = [run["mesh"] for run in memory.runs.values() if run["run"] != "hero"]
    assert meshes == ["expert=64", "data=2,expert=64", "data=6,expert=64", "data=11,expert=64"]


def test_a_run_is_planned_at_the_context_that_needs_most():
    run = load_family("tiny-phases").hero_run
    longest = run.replace(model=run.model.replace(seq_len=1024).model_dump(), sequences_per_rank=1, context=())
    scores = [plan_memory(config).phases["layers"]["saved_attention_scores"] for config in (run, longest)]
    assert scores[0] == scores[1]


def test_an_unknown_field_of_mesh_or_execution_is_refused():
    with pytest.raises(ValueError, match="'expret=2' is no field=value"):
        family_memory(load_family("tiny"), mesh="expret=2")
    with pytest.raises(ValueError, match="'remat' is no field=value"):
        family_memory(load_family("tiny"), execution="remat=blocks")


def test_amounts_of_memory_are_read_with_their_units():
    read = [parse_bytes(text) for text in ("80GB", "138 GiB", "1.5e9", "2kb")]
    assert read == [80 * 10**9, 138 * 2**30, 1_500_000_000, 2000]
    for wrong in ("80 GBs", "", "-1GB", "lots"):
        with pytest.raises(ValueError, match="is no amount; write 80GB"):
            parse_bytes(wrong)


def test_a_run_too_large_for_its_device_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    run = load_family("tiny").rung_runs[0]
    monkeypatch.setenv(MEMORY_VARIABLE, "1MB")
    with pytest.raises(
        ValueError, match=r"run d32 needs about 0\.0218 GB a device on one device, the device has 0\.001"
    ):
        check_device_memory(run)
    monkeypatch.setenv(MEMORY_VARIABLE, "1GB")
    check_device_memory(run)
    monkeypatch.delenv(MEMORY_VARIABLE)
    check_device_memory(run)  # a CPU does not say


def test_a_refusal_names_what_would_help():
    hero = load_family("marin").hero_run
    plan = plan_memory(hero, hero.mesh.changed("data=11,expert=64"))
    assert "rematerialize = 'blocks'" in str(refusal(plan, parse_bytes("186GB")))
    assert refusal(plan, parse_bytes("9TB")) is None
    experts = variant(model={"seq_len": 32, "window": 16, "num_experts": 64}, execution={"rematerialize": "blocks"})
    assert "mesh.optimizer = 'sharded'" in str(refusal(plan_memory(experts), parse_bytes("1MB")))


def test_plan_prints_the_verdict_and_refuses_what_is_no_amount():
    command = [sys.executable, "-P", "-m", "rungwise.ladder", "plan", "tiny", "--device-memory"]
    said = subprocess.run([*command, "100MB", "--json"], capture_output=True, text=True, check=True)
    memory = json.loads(said.stdout)["memory"]
    assert {name: run["fits"] for name, run in memory["runs"].items()}["hero"] is False
    assert memory["device_memory"] == 100_000_000
    wrong = subprocess.run([*command, "lots"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "device memory 'lots' is no amount" in wrong.stderr


def test_tables_say_what_does_not_fit_and_which_rung_does_not_compare():
    plan = plan_ladder(load_family("tiny"), device_memory=parse_bytes("100MB")).to_dict()
    plan["drops"]["d48"]["not_comparable"] = ("rows_per_pool 70, hero 74",)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(plan_view(plan))
    text = capture.get()
    assert "in 100 MB" in text
    assert "MB short" in text
    assert "Not comparable, d48: rows_per_pool 70, hero 74." in text
