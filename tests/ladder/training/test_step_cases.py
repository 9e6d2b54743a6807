"""A training step is one thing, however it is cut into ranks, replicas and microbatches, whatever is recomputed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import ExecutionConfig, RunConfig, load_family
from rungwise.ladder.recording.metrics import step_metrics
from rungwise.ladder.training.gradients import BatchFigures, make_gradient
from rungwise.ladder.training.optimizer import build_optimizer
from rungwise.ladder.training.parameter_groups import group_norms
from rungwise.ladder.training.step import (
    StepFigures,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    next_bias,
    state_to_tree,
    tree_to_state,
)
from rungwise.model import transformer
from rungwise.model.loss import token_losses
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.transformer import forward

BATCH, SEQ = 8, 8
ROOM = 8.0
"""Capacity factor at which nothing is dropped."""


QUICK = {"xla_backend_optimization_level": 0}
"""These tests spend their time compiling: without optimization it takes half as long."""


@pytest.fixture(autouse=True)
def _rolled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer to compile instead of all."""
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)


def _run(
    *,
    num_ranks: int = 2,
    replicas: int = 4,
    factor: float = ROOM,
    execution: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **model: Any,
) -> RunConfig:
    """The smallest rung of `tiny` made smaller still, eight sequences a step."""
    rung = load_family("tiny").rung_runs[0]
    shape = {
        "seq_len": SEQ,
        "vocab_size": 32,
        "hidden_dim": 16,
        "head_dim": 8,
        "num_layers": 3,
        "global_every": 2,
        "window": 4,
        "num_experts": 8,
        "top_k": 2,
        "expert_dim": 8,
        "latent_dim": 8,
        "logit_z_loss_weight": 0.05,
    }
    transport = {"num_experts": 8, "top_k": 2, "num_ranks": num_ranks, "num_waves": 1}
    factors = {"sender_capacity_factor": factor, "receiver_capacity_factor": factor}
    return rung.replace(
        model=rung.model.replace(**{**shape, **model}).model_dump(),
        transport={"name": "pooled_wave", **transport, **factors},
        data_replicas=replicas,
        sequences_per_rank=BATCH // (num_ranks * replicas),
        steps=20,
        execution=ExecutionConfig(**(execution or {})).model_dump(),
        optimizer=rung.optimizer.replace(**(optimizer or {})).model_dump(),
    )


def _tokens(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32, (BATCH, SEQ + 1)), jnp.int32)


def _state(config: RunConfig) -> TrainState:
    """A fresh state but for a bias that has chosen before."""
    bias = np.random.default_rng(1).normal(0, 0.1, (config.model.num_layers, config.model.num_experts))
    return init_state(config)._replace(bias=jnp.asarray(bias, jnp.float32))


Gradient = tuple[Any, BatchFigures]


_compiled: dict[tuple[str, str], Callable[..., Any]] = {}


def _once(what: str, config: RunConfig, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A compiled function of a config, built at its first use."""
    key = what, config.content_hash
    if key not in _compiled:
        _compiled[key] = jax.jit(build(), compiler_options=QUICK)
    return _compiled[key]


def _gradient(config: RunConfig, weights: np.ndarray | None = None) -> Gradient:
    """Gradient and figures of the first step; every token counted where `weights` is absent."""
    state, weights = _state(config), np.ones((BATCH, SEQ), np.float32) if weights is None else weights
    compiled = _once("gradient", config, lambda: make_gradient(config, jnp.float32))
    return compiled(state.params, state.bias, _tokens(), weights, state.step)


def _step(
    config: RunConfig, state: TrainState, tokens: jax.Array, weights: np.ndarray | None = None
) -> tuple[TrainState, StepFigures]:
    weights = np.ones((BATCH, SEQ), np.float32) if weights is None else weights
    return _once("step", config, lambda: make_train_step(config))(state, tokens, None, weights)


def _check_same(ours: Gradient, theirs: Gradient) -> None:
    """Counts exactly, values within rounding: 2e-5 of a leaf's largest entry."""
    counts = (ours[1].sums, theirs[1].sums)
    for field in ("tokens", "valid", "expert_load", "tokens_lost_all_routes", "sender_dropped", "receiver_dropped"):
        np.testing.assert_array_equal(*(getattr(sums, field) for sums in counts), err_msg=field)
    without = {"rank_load": jnp.zeros(())}  # what a layout may change
    cleaned = [(grads, batch._replace(sums=batch.sums._replace(**without))) for grads, batch in (ours, theirs)]
    for mine, other in zip(*map(jax.tree.leaves, cleaned), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5 * float(np.abs(other).max()) + 1e-7)


LAYOUTS = [
    pytest.param(2, 4, 1, id="ranks2-replicas4"),
    pytest.param(2, 1, 1, id="ranks2-replicas1", marks=pytest.mark.slow),
    pytest.param(8, 1, 1, id="ranks8-replicas1", marks=pytest.mark.slow),
    pytest.param(1, 2, 2, id="ranks1-replicas2-microbatches2", marks=pytest.mark.slow),
    pytest.param(1, 4, 4, id="ranks1-replicas4-microbatches4", marks=pytest.mark.slow),
    pytest.param(2, 4, 2, id="ranks2-replicas4-microbatches2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_ranks", "replicas", "microbatches"), LAYOUTS)
def test_gradient_is_the_same_however_a_batch_is_cut(num_ranks: int, replicas: int, microbatches: int):
    cut = _gradient(_run(num_ranks=num_ranks, replicas=replicas, execution={"microbatches": microbatches}))
    whole = _gradient(_run(num_ranks=1, replicas=1))
    assert int(jnp.sum(cut[1].sums.sender_dropped + cut[1].sums.receiver_dropped)) == 0
    _check_same(cut, whole)
    assert float(group_norms(cut[0])[0]) == pytest.approx(float(group_norms(whole[0])[0]), rel=1e-5)


@pytest.mark.parametrize("microbatches", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_microbatches_change_neither_gradient_nor_drops(microbatches: int):
    whole, cut = (_gradient(_run(factor=1.0, execution={"microbatches": parts})) for parts in (1, microbatches))
    assert np.all(np.asarray(whole[1].sums.sender_dropped + whole[1].sums.receiver_dropped) > 0)
    _check_same(cut, whole)


RECOMPUTED = [
    pytest.param("blocks", "quantile"),
    pytest.param("blocks_keep_communication", "quantile", marks=pytest.mark.slow),
    pytest.param("blocks", "loss_free_bias", marks=pytest.mark.slow),
    pytest.param("blocks", "auxiliary_loss", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mode", "balance"), RECOMPUTED)
def test_rematerialisation_changes_neither_gradient_nor_counts_nor_bias(mode: str, balance: str):
    options = {"balance": balance, "balance_loss_weight": 0.1 if balance == "auxiliary_loss" else 0.0}
    kept, again = _run(**options), _run(execution={"rematerialize": mode}, **options)
    ours, theirs = _gradient(again), _gradient(kept)
    _check_same(ours, theirs)
    assert np.asarray(ours[1].sums.valid).tolist() == [BATCH * SEQ * 2] * 3
    assert np.asarray(jnp.sum(ours[1].sums.expert_load, axis=-1)).tolist() == [BATCH * SEQ * 2] * 3
    bias = [
        next_bias(_state(config).bias, batch.sums, batch.margins, config)
        for config, (_, batch) in ((again, ours), (kept, theirs))
    ]
    np.testing.assert_allclose(bias[0], bias[1], rtol=1e-5, atol=1e-6)
    assert np.any(np.asarray(bias[0]) != np.asarray(_state(kept).bias)) == (balance != "auxiliary_loss")


def test_rematerialisation_recomputes_and_keeping_communication_recomputes_less():
    def products(mode: str) -> int:
        config = _run(execution={"rematerialize": mode})
        state, gradient = _state(config), make_gradient(config, jnp.float32)
        return str(jax.make_jaxpr(gradient)(state.params, state.bias, _tokens(), None, state.step)).count("dot_general")

    assert products("nothing") < products("blocks_keep_communication") <= products("blocks")


# The whole-gradient norm, each parameter once: two experts on two ranks, one replicated gain.
GRADS = {"final_norm": jnp.asarray([2.0, 1.0]), "layers": {"moe": {"experts": {"down": None}}}}
EXPERT_GRADS = jnp.asarray([[3.0, 4.0], [6.0, 8.0]])[None, :, None, :]  # layers, experts, inner, width


def test_gradient_norm_counts_every_parameter_once():
    total, groups = group_norms({**GRADS, "layers": {"moe": {"experts": {"down": EXPERT_GRADS}}}})
    assert float(total) == pytest.approx(11.401754, rel=1e-6)
    assert float(groups["experts"]) == pytest.approx(125**0.5)
    assert float(groups["norms"]) == pytest.approx(5**0.5)


def _clipped(grads: Any, clip: float) -> Any:
    """What is left of a gradient after clipping: with a huge epsilon Adam's first update is −rate · g / epsilon."""
    rule = {"name": "adamw", "clip_norm": clip, "epsilon": 1e9, "warmup_fraction": 0.0, "weight_decay": 0.0}
    config = _run(optimizer=rule)
    params = jax.tree.map(jnp.zeros_like, grads)
    optimizer = build_optimizer(config)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return jax.tree.map(lambda leaf: -leaf * 1e9 / config.learning_rate, updates)


def test_clipping_scales_the_whole_gradient_once():
    grads = {**GRADS, "layers": {"moe": {"experts": {"down": EXPERT_GRADS}}}}
    left = _clipped(grads, 1.0)
    np.testing.assert_allclose(left["final_norm"], 0.087706 * np.asarray([2.0, 1.0]), rtol=1e-5)
    np.testing.assert_allclose(left["layers"]["moe"]["experts"]["down"], 0.087706 * EXPERT_GRADS, rtol=1e-5)
    # Two micro-steps of [6, 0] and [0, 8]: their sum clipped to 5 is [3, 4]; clipped one by one it is [2.65, 4.24].
    added = jnp.asarray([6.0, 0.0]) + jnp.asarray([0.0, 8.0])
    np.testing.assert_allclose(_clipped({"final_norm": added}, 5.0)["final_norm"], [3.0, 4.0], rtol=1e-5)


LINEAR = {"name": "adamw", "epsilon": 1e3, "weight_decay": 0.0}
"""An optimizer whose first update is the gradient, times a number."""


def test_a_clipped_step_logs_the_norm_before_clipping_and_clips_the_sum_of_microbatches():
    free, clipped = (
        _run(optimizer={**LINEAR, "clip_norm": clip}, execution={"microbatches": parts})
        for clip, parts in ((None, 1), (0.1, 2))
    )
    state = _state(free)
    (after, figures), (cut, also) = (_step(config, _state(config), _tokens()) for config in (free, clipped))
    assert float(figures.grad_norm) > 0.2
    assert float(also.grad_norm) == pytest.approx(float(figures.grad_norm), rel=1e-5)
    scale = 0.1 / float(figures.grad_norm)
    assert float(also.update_norm) == pytest.approx(scale * float(figures.update_norm), rel=1e-3)
    for start, one, other in zip(*map(jax.tree.leaves, (state.params, after.params, cut.params)), strict=True):
        np.testing.assert_allclose(other - start, scale * (one - start), rtol=1e-3, atol=1e-6)


def _token_losses(config: RunConfig) -> np.ndarray:
    model, state = config.model, _state(config)
    method = build_method(dropless_config(model.num_experts, model.top_k))
    output = jax.jit(forward, static_argnames=("config", "method"), compiler_options=QUICK)(
        state.params, state.bias, _tokens()[:, :-1], config=model, method=method
    )
    return np.asarray(token_losses(output.logits, _tokens()[:, 1:])[0], np.float64)


# Counted tokens of eight sequences, two a replica: none on the first two replicas, then one, then all but a few.
UNEVEN = np.zeros((BATCH, SEQ), np.float32)
UNEVEN[5, 3] = 1.0
UNEVEN[6], UNEVEN[7, :5] = 1.0, 1.0


@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_and_gradient_are_means_over_counted_tokens_of_the_whole_batch(microbatches: int):
    config = _run(execution={"microbatches": microbatches})
    grads, figures = _gradient(config, UNEVEN)
    losses = _token_losses(config)
    assert float(figures.counted_tokens) == 14.0
    assert float(figures.loss.loss) == pytest.approx(float((losses * UNEVEN).sum() / 14), rel=1e-5)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    mean_of_ranks = np.mean([losses[5, 3], (losses * UNEVEN)[6:].sum() / 13])
    assert float(figures.loss.loss) != pytest.approx(mean_of_ranks, rel=1e-3)  # what averaging means would give


@pytest.mark.slow
def test_gradient_of_uneven_masks_does_not_depend_on_microbatches():
    one, four = (_gradient(_run(execution={"microbatches": parts}), UNEVEN) for parts in (1, 4))
    _check_same(four, one)


def test_a_step_without_counted_tokens_changes_nothing_and_says_so():
    config = _run(optimizer=LINEAR)
    state = _state(config)
    after, figures = _step(config, state, _tokens(), np.zeros((BATCH, SEQ), np.float32))
    assert int(after.step) == int(after.optimizer.step) == int(state.step) + 1  # the schedule goes on
    untouched = after._replace(step=state.step, optimizer=after.optimizer._replace(step=state.optimizer.step))
    jax.tree.map(np.testing.assert_array_equal, untouched, state)
    assert float(figures.counted_tokens) == 0.0
    values, _ = step_metrics(jax.device_get(figures))
    assert np.isnan(values["train/loss"])


def test_evaluation_between_two_steps_leaves_the_next_bias_alone():
    config = _run(balance="loss_free_bias", balance_step=0.01, optimizer=LINEAR)
    state, _ = _step(config, _state(config), _tokens())
    held, _ = _step(config, state, _tokens(1))
    jax.jit(make_eval_step(config), compiler_options=QUICK)(state, _tokens(2))
    np.testing.assert_array_equal(_step(config, state, _tokens(1))[0].bias, held.bias)
    moved = np.abs(np.asarray(held.bias) - np.asarray(state.bias))
    assert np.any(moved > 0)
    np.testing.assert_allclose(moved[moved > 0], 0.01, rtol=1e-3)
    back = tree_to_state(state_to_tree(state), jax.eval_shape(lambda: init_state(config)))
    np.testing.assert_array_equal(_step(config, back, _tokens(1))[0].bias, held.bias)


def test_microbatches_that_do_not_divide_or_need_all_routes_first_are_refused():
    with pytest.raises(ValueError, match="microbatches 3 does not divide data_replicas 4"):
        _run(execution={"microbatches": 3})
    with pytest.raises(ValueError, match="microbatches 2 with balance_scope 'global'"):
        _run(execution={"microbatches": 2}, balance="auxiliary_loss", balance_loss_weight=0.1)
