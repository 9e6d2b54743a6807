"""One training step of every shipped family: its smallest rung, or a miniature of a hero that is only planned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr, tree_flatten_with_path

from rungwise.ladder.family import RunConfig, load_family, shipped_families
from rungwise.ladder.training.step import StepFigures, TrainState, init_state, make_train_step

QUICK = {"xla_backend_optimization_level": 0}
"""One step takes no time; compiling it without optimization takes half as long."""

MINIATURE: dict[str, Any] = {
    "seq_len": 16,
    "vocab_size": 64,
    "hidden_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "global_kv_heads": 1,
    "head_dim": 8,
    "window": 8,
    "expert_dim": 16,
    "latent_dim": 16,
    "gated_norm_rank": 4,
}
"""Tiny widths; depth, experts and every option stay the hero's."""


MOST_TOKENS = 8192
"""Of a step that a test takes on a CPU."""


def _smallest(family: str) -> RunConfig:
    """The first run of a family, as it is; of one that is only planned, or made for an accelerator, its hero with tiny
    widths on four ranks."""
    ladder = load_family(family)
    if not ladder.plan_only and ladder.rung_runs[0].tokens_per_step <= MOST_TOKENS:
        return ladder.rung_runs[0].replace(steps=10)
    hero = ladder.hero_run
    transport = {"name": "pooled_wave", "num_ranks": 4, "num_waves": hero.transport.num_waves}
    factors = {name: getattr(hero.transport, name) for name in ("sender_capacity_factor", "receiver_capacity_factor")}
    counts = {"num_experts": hero.model.num_experts, "top_k": hero.model.top_k}
    return hero.replace(
        model=hero.model.replace(**MINIATURE).model_dump(),
        transport={**transport, **factors, **counts},
        data_replicas=hero.execution.microbatches,
        sequences_per_rank=2,
        steps=10,
    )


def _first_step(config: RunConfig) -> tuple[TrainState, TrainState, StepFigures]:
    rng = np.random.default_rng(0)
    vocab = config.model.vocab_size
    tokens = jnp.asarray(rng.integers(0, vocab, (config.batch_size, config.model.seq_len + 1)), jnp.int32)
    state = jax.jit(lambda: init_state(config), compiler_options=QUICK)()
    after, figures = jax.jit(make_train_step(config), compiler_options=QUICK)(state, tokens)
    return state, after, jax.device_get(figures)


SMALL = [pytest.param(name, marks=() if name == "tiny" else pytest.mark.slow) for name in shipped_families()]


@pytest.mark.parametrize("family", SMALL)
def test_first_step_of_the_smallest_rung_is_finite_and_moves_every_parameter(family: str):
    config = _smallest(family)
    before, after, figures = _first_step(config)
    assert float(figures.loss.loss) == pytest.approx(np.log(config.model.vocab_size), rel=0.15)
    assert int(figures.nonfinite) == 0
    assert np.isfinite(float(figures.update_norm))
    assert np.all(np.asarray(figures.layers.drop_fraction) < 0.5)
    for (path, old), new in zip(tree_flatten_with_path(before.params)[0], jax.tree.leaves(after.params), strict=True):
        name, moved = keystr(path, simple=True, separator="."), np.asarray(old) != np.asarray(new)
        assert np.all(np.isfinite(new)), name
        layered = name.startswith("layers.")
        assert np.all(np.any(moved, axis=tuple(range(1, moved.ndim)))) if layered else np.any(moved), name
    assert np.all(np.any(np.asarray(after.bias) != 0, axis=-1)) == (
        config.model.balance in ("quantile", "loss_free_bias")
    )


def test_the_miniature_of_the_planned_hero_keeps_its_shape():
    model = _smallest("marin").model
    assert (model.num_experts, model.top_k, model.num_layers, model.num_shared_experts) == (384, 8, 48, 2)
    assert (model.latent_dim, model.expert_dim) == (model.hidden_dim // 2, model.hidden_dim // 2)
    assert model.attention_gate
    assert model.exclusive_attention
    assert model.embed_norm
    assert model.gated_norm_rank
    assert set(model.short_conv_sites) == {"key", "attention", "moe"}
    assert (model.global_kv_heads, model.quantile_estimator) == (model.num_kv_heads // 2, "histogram")
