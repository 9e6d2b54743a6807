from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.analysis.vocabulary import PARAMETER_GROUPS
from rungwise.ladder.family import load_family
from rungwise.ladder.optimizer import (
    build_optimizer,
    group_norms,
    learning_rate_schedule,
    matrix_axes,
    parameter_group,
)
from rungwise.model.transformer import init_params

RUN = load_family("tiny").rung_runs[0]


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def test_muon_moves_every_matrix_and_adamw_the_rest_by_name():
    params = init_params(RUN.model, 0)
    axes = matrix_axes(params)
    rules = jax.tree.map(
        lambda leaf, axis: "adamw" if axis is None else "muon", params, axes, is_leaf=lambda node: node is None
    )
    assert _by_name(rules) == {
        "embed": "adamw",
        "final_norm": "adamw",
        "head": "adamw",
        "layers.attention.key": "muon",
        "layers.attention.key_norm": "adamw",
        "layers.attention.out": "muon",
        "layers.attention.query": "muon",
        "layers.attention.query_norm": "adamw",
        "layers.attention.value": "muon",
        "layers.attention_norm": "adamw",
        "layers.moe.experts.down": "muon",
        "layers.moe.experts.gate_up": "muon",
        "layers.moe.latent_down": "muon",
        "layers.moe.latent_norm": "adamw",
        "layers.moe.latent_up": "muon",
        "layers.moe.router": "adamw",
        "layers.moe.shared.down": "muon",
        "layers.moe.shared.gate_up": "muon",
        "layers.moe_norm": "adamw",
    }


def test_muon_orthogonalises_each_expert_on_its_own():
    """Every expert's gate and up matrices leave with singular values near one, whatever the others' gradients are."""
    params = init_params(RUN.model, 0)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    scale = 10.0 ** jnp.arange(RUN.model.num_experts)[None, :, None, None, None] / 1e16
    grads["layers"]["moe"]["experts"]["gate_up"] *= scale
    optimizer = build_optimizer(RUN)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    rate = np.asarray(learning_rate_schedule(RUN)(0))
    gate_up = np.asarray(_by_name(updates)["layers.moe.experts.gate_up"])
    for expert in (8, 20, 31):
        for half in (0, 1):
            singular = np.linalg.svd(gate_up[0, expert, :, half, :], compute_uv=False) / rate
            assert singular.max() < 1.3
            assert np.median(singular) > 0.6


def test_schedule_warms_up_then_decays_to_the_final_fraction():
    schedule = learning_rate_schedule(RUN)
    rates = np.asarray([schedule(step) for step in range(RUN.steps)])
    warmup = round(RUN.optimizer.warmup_fraction * RUN.steps)
    assert rates[0] == pytest.approx(RUN.learning_rate / warmup)
    assert rates.max() == pytest.approx(RUN.learning_rate)
    assert abs(int(rates.argmax()) - warmup) <= 1
    assert rates[-1] == pytest.approx(RUN.optimizer.final_fraction * RUN.learning_rate)
    assert np.all(np.diff(rates[warmup:]) < 0)


def test_adamw_decays_matrices_only():
    rule = RUN.optimizer.replace(name="adamw", weight_decay=0.5)
    params = init_params(RUN.model, 0)
    optimizer = build_optimizer(RUN.replace(optimizer=rule.model_dump()))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    moved = {name for name, leaf in _by_name(updates).items() if float(jnp.max(jnp.abs(leaf))) > 0}
    assert "layers.moe.experts.down" in moved
    assert not any(name.endswith("norm") or name in {"embed", "head", "layers.moe.router"} for name in moved)


def test_clip_norm_bounds_what_reaches_the_rule():
    params = init_params(RUN.model, 0)
    huge = jax.tree.map(lambda leaf: 1e6 * jnp.ones_like(leaf), params)
    clipped = RUN.replace(optimizer=RUN.optimizer.replace(name="adamw", clip_norm=1.0, epsilon=1.0).model_dump())
    optimizer = build_optimizer(clipped)
    updates, _ = optimizer.update(huge, optimizer.init(params), params)
    free = build_optimizer(RUN.replace(optimizer=RUN.optimizer.replace(name="adamw", epsilon=1.0).model_dump()))
    loose, _ = free.update(huge, free.init(params), params)
    assert float(group_norms(updates)[0]) < 0.1 * float(group_norms(loose)[0])


def test_group_norms_count_every_parameter_once():
    params = init_params(RUN.model, 0)
    total, groups = group_norms(params)
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])
    assert float(total) == pytest.approx(np.linalg.norm(flat), rel=1e-5)
    assert float(total) ** 2 == pytest.approx(sum(float(norm) ** 2 for norm in groups.values()), rel=1e-5)
    assert set(groups) <= set(PARAMETER_GROUPS)
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    assert all(parameter_group(path) in PARAMETER_GROUPS for path, _ in paths)
