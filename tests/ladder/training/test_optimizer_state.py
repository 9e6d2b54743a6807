"""The optimizer's memory: its step counter across a restore, and what it makes of a large gradient."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.training.optimizer import build_optimizer
from rungwise.ladder.training.step import TrainState, state_to_tree, tree_to_state

TINY = load_family("tiny").rung_runs[0]


def _run(**optimizer: Any) -> RunConfig:
    """The smallest rung of `tiny` with another optimizer, 40 steps long, peak 0.02."""
    return TINY.replace(steps=40, learning_rate=0.02, optimizer=TINY.optimizer.replace(**optimizer).model_dump())


def _random_tree(seed: int) -> Any:
    """A parameter of every rule."""
    rng = np.random.default_rng(seed)
    query, down, head = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 6, 2, 3), (1, 2, 4, 3), (6, 7))
    )
    layers = {"attention": {"query": query}, "moe": {"experts": {"down": down}}}
    return {"embed": head.T, "layers": layers, "head": head}


PLAIN_ADAM = {
    "name": "adamw",
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-30,
    "warmup_fraction": 0.0,
    "final_fraction": 1.0,
}


def _restored(folder: Path, state: TrainState, *, like: TrainState) -> TrainState:
    """The state after a round trip through a checkpoint on disk."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(int(state.step), state_to_tree(state), meta={})
    _, tree, _ = checkpoints.restore(state_to_tree(like))
    return tree_to_state(tree, like)


def _without_count(state: Any) -> Any:
    """The fault: every counter at zero, moments kept."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    kept = [jnp.zeros_like(leaf) if "count" in jax.tree_util.keystr(path) else leaf for path, leaf in leaves]
    return jax.tree.unflatten(structure, kept)


def test_update_over_rate_is_one_at_every_step_before_and_after_a_restore(tmp_path: Path):
    """Adam, β 0.9 and 0.95, no epsilon, gradient 1: update/rate is 1.0 at every step, whatever happens at step 101.

    Its faults, measured on the same code with its counter tampered with: a counter that never moves gives 1.0,
    1.360618, 1.604562, 1.785470, 1.925240 and tends to √0.05 / 0.1 = 2.236068; one lost at step 101 gives 2.242329,
    1.647793, 1.397093 for the next three steps, which looks like a loss spike.
    """
    rule, params = build_optimizer(_run(**PLAIN_ADAM)), {"embed": jnp.zeros(2)}
    ones, update = {"embed": jnp.ones(2)}, jax.jit(rule.update)

    def ratios(state: Any, count: int, *, stuck: bool = False) -> tuple[list[float], Any]:
        found = []
        for _ in range(count):
            updates, state = update(ones, _without_count(state) if stuck else state, params)
            found.append(float(-updates["embed"][0]) / 0.02)
        return found, state

    before, state = ratios(rule.init(params), 100)
    saved = TrainState(params, state, jnp.zeros((1, 1)), jnp.int32(100))
    fresh = TrainState(params, rule.init(params), jnp.zeros((1, 1)), jnp.int32(0))
    after, _ = ratios(_restored(tmp_path, saved, like=fresh).optimizer, 3)
    np.testing.assert_allclose(before + after, 1.0, rtol=2e-5)

    stuck, _ = ratios(rule.init(params), 300, stuck=True)
    np.testing.assert_allclose(stuck[:5], [1.0, 1.360618, 1.604562, 1.785470, 1.925240], rtol=2e-5)
    assert stuck[-1] == pytest.approx(2.236068, rel=1e-4)
    lost, _ = ratios(_without_count(state), 3)
    np.testing.assert_allclose(lost, [2.242329, 1.647793, 1.397093], rtol=2e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muonh"])
def test_two_steps_restore_two_steps_equal_four_bit_for_bit(optimizer: str, tmp_path: Path):
    rule, params = build_optimizer(_run(name=optimizer)), _random_tree(0)
    update = jax.jit(rule.update)

    def advance(state: TrainState, count: int) -> TrainState:
        for _ in range(count):
            grads = _random_tree(1 + int(state.step))
            updates, inner = update(grads, state.optimizer, state.params)
            moved = jax.tree.map(jnp.add, state.params, updates)
            state = TrainState(moved, inner, state.bias, state.step + 1)
        return state

    fresh = TrainState(params, rule.init(params), jnp.zeros((1, 1)), jnp.int32(0))
    whole = advance(fresh, 4)
    resumed = advance(_restored(tmp_path, advance(fresh, 2), like=fresh), 2)
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(whole.optimizer.step) == 4


GRADIENT = {
    "embed": jnp.array([2.0, 1.0]),
    "layers": {"moe": {"experts": {"down": jnp.array([[[[3.0, 4.0]], [[6.0, 8.0]]]])}}},
}
"""A replicated gradient (2, 1), and those of two experts on two ranks, (3, 4) and (6, 8)."""


def _linear(clip_norm: float | None) -> Any:
    """A first Adam step with an epsilon so large that it is the gradient times one number."""
    return build_optimizer(_run(name="adamw", epsilon=1e6, clip_norm=clip_norm))


def test_clipping_scales_the_whole_gradient_by_one_number():
    params = jax.tree.map(jnp.zeros_like, GRADIENT)
    free, clipped = (rule.update(GRADIENT, rule.init(params), params)[0] for rule in (_linear(None), _linear(1.0)))
    for left, right in zip(jax.tree.leaves(clipped), jax.tree.leaves(free), strict=True):
        np.testing.assert_allclose(left / right, 0.087706, rtol=2e-5)


def test_clipping_takes_the_sum_of_microbatches_once():
    """(6, 0) + (0, 8) clipped to 5 is (3, 4); each clipped first would point to (2.650, 4.240)."""
    rule, params = _linear(5.0), {"embed": jnp.zeros(2)}
    summed = jax.tree.map(jnp.add, {"embed": jnp.array([6.0, 0.0])}, {"embed": jnp.array([0.0, 8.0])})
    updates, _ = rule.update(summed, rule.init(params), params)
    np.testing.assert_allclose(-updates["embed"] / 0.01 * 1e6, [3.0, 4.0], rtol=2e-5)
