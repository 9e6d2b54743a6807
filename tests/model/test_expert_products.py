"""Experts computed again in the backward pass, and experts that multiply in MXFP8, behind every transport."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.config import TRANSPORTS, TransportConfig
from rungwise.ladder.family import ExecutionConfig, RunConfig, load_family
from rungwise.ladder.recording.metrics import step_metrics
from rungwise.ladder.training.step import init_state, make_train_step
from rungwise.model import transformer
from rungwise.model.methods import build_method
from rungwise.model.moe import RoutedOutput

RANKS, EXPERTS, TOP_K, WIDTH, INNER = 2, 4, 2, 64, 96
SHAPE = (4, 8)
"""Two replicas of two ranks, one sequence of eight tokens each."""

QUICK = {"xla_backend_optimization_level": 0}


def _transport(name: str) -> TransportConfig:
    return TransportConfig(
        name=name,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_ranks=RANKS,
        num_waves=2 if name.endswith(("wave", "cell")) else 1,
    )


def _operands() -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    random = np.random.default_rng(0)
    experts = np.argsort(random.random((*SHAPE, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int32)
    weights = {
        "gate_up": random.normal(size=(EXPERTS, WIDTH, 2, INNER)) / WIDTH**0.5,
        "down": random.normal(size=(EXPERTS, INNER, WIDTH)) / INNER**0.5,
    }
    latent, gates = random.normal(size=(*SHAPE, WIDTH)), random.uniform(0.5, 1.5, (*SHAPE, TOP_K))
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (latent, gates, weights))
    return narrow[0], jnp.asarray(experts), narrow[1], narrow[2]


def _run(name: str, **options: Any) -> tuple[RoutedOutput, Any]:
    """What experts give back, and gradients by tokens, gates and weights of Σ output · fixed numbers."""
    method = build_method(_transport(name), data_replicas=2, **options)

    def loss(latent: jax.Array, experts: jax.Array, gates: jax.Array, weights: Any) -> tuple[jax.Array, RoutedOutput]:
        routed = method.run(latent, experts, gates, weights)
        return jnp.sum(routed.output * jnp.cos(jnp.arange(WIDTH))), routed

    (_, routed), grads = jax.jit(jax.value_and_grad(loss, (0, 2, 3), has_aux=True), compiler_options=QUICK)(
        *_operands()
    )
    return routed, grads


def _worst(got: Any, want: Any) -> float:
    """The largest difference of an array in norm, relative."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in pairs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "pooled_wave" else pytest.mark.slow) for name in TRANSPORTS]
)
def test_experts_computed_again_and_in_mxfp8_keep_the_counts_and_differ_by_rounding(name: str):
    kept, grads = _run(name)
    again, grads_again = _run(name, rematerialize_experts=True)
    assert _worst((again, grads_again), (kept, grads)) < 1e-6
    mxfp8, grads_mxfp8 = _run(name, expert_matmul="mxfp8", rematerialize_experts=True)
    assert float(mxfp8.clipped_values) == 0.0  # pyright: ignore[reportArgumentType]
    assert kept.clipped_values is None
    for field in ("valid", "sender_dropped", "receiver_dropped", "expert_load"):
        np.testing.assert_array_equal(getattr(mxfp8, field), getattr(kept, field))
    errors = _worst(mxfp8.output, kept.output), _worst(grads_mxfp8, grads)
    assert 0.03 < errors[0] < 0.08, errors  # three products deep, 3.8% a product of two quantised operands
    assert 0.03 < errors[1] < 0.12, errors


def _forward(name: str, replicas: int) -> Any:
    method = build_method(_transport(name), data_replicas=replicas, expert_matmul="mxfp8")
    return jax.jit(method.run, compiler_options=QUICK)


@pytest.mark.slow
def test_experts_in_mxfp8_of_several_replicas_are_those_of_each():
    """Rows of all replicas are multiplied together, and a block of values never spans two rows."""
    latent, experts, gates, weights = _operands()
    together, alone = _forward("pooled_wave", 2), _forward("pooled_wave", 1)
    parts = [alone(latent[at : at + 2], experts[at : at + 2], gates[at : at + 2], weights).output for at in (0, 2)]
    whole = together(latent, experts, gates, weights).output
    np.testing.assert_allclose(whole, jnp.concatenate(parts), rtol=1e-5, atol=1e-5)


def test_values_beyond_mxfp8_are_counted_once_for_each_expert_that_multiplied_them():
    latent, experts, gates, weights = _operands()
    weights |= {"gate_up": weights["gate_up"].at[:, 0].set(0.0)}  # nothing beyond reaches the second product
    routed = _forward("dropless", 2)(latent.at[:, 0, 0].set(3.2e38), experts, gates, weights)
    assert float(routed.clipped_values) == SHAPE[0] * TOP_K  # pyright: ignore[reportArgumentType]
    assert bool(jnp.all(jnp.isfinite(routed.output)))


def _small(**execution: Any) -> RunConfig:
    rung = load_family("tiny").rung_runs[0]
    shape = {
        "seq_len": 8,
        "vocab_size": 32,
        "hidden_dim": 16,
        "head_dim": 8,
        "window": 4,
        "expert_dim": 8,
        "latent_dim": 8,
    }
    model = rung.model.replace(**shape, num_layers=2, num_experts=8)
    return rung.replace(
        model=model.model_dump(),
        transport={**vars(rung.transport), "num_experts": 8},
        execution=ExecutionConfig(**execution).model_dump(),
        optimizer=rung.optimizer.replace(name="adamw").model_dump(),  # quick to compile
        steps=10,
    )


def test_a_step_in_mxfp8_reports_what_was_clipped_and_other_steps_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)
    config = _small(expert_matmul="mxfp8")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (config.batch_size, 9)))
    state = jax.eval_shape(lambda: init_state(config))
    assert jax.eval_shape(make_train_step(_small()), state, tokens)[1].clipped_values is None
    step = jax.jit(make_train_step(config), compiler_options=QUICK)
    state = init_state(config)
    values, _ = step_metrics(jax.device_get(step(state, tokens)[1]))
    assert values["train/clipped_values"] == 0.0
    beyond = state._replace(params=_with_latent_gain(state.params, 1e38))
    values, _ = step_metrics(jax.device_get(step(beyond, tokens)[1]))
    assert values["train/clipped_values"] > 0


def _with_latent_gain(params: Any, gain: float) -> Any:
    moe = params["layers"]["moe"]
    changed = moe | {"latent_norm": moe["latent_norm"] * gain}
    return params | {"layers": params["layers"] | {"moe": changed}}


def test_what_is_off_is_no_part_of_a_runs_identity():
    off = ExecutionConfig(rematerialize_experts=False, expert_matmul="compute")
    assert set(off.model_dump()) == {"param_dtype", "compute_dtype", "rematerialize", "microbatches"}
    assert ExecutionConfig(expert_matmul="mxfp8").content_hash != off.content_hash
