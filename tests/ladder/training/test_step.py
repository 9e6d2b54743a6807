import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.analysis.vocabulary import MOE_FIELDS, is_metric_name
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.recording.metrics import progress_metrics, step_metrics
from rungwise.ladder.training.schedule import Limits, horizon_of
from rungwise.ladder.training.step import (
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    state_to_tree,
    tree_to_state,
)
from rungwise.model.stats import LayerStats


@pytest.fixture(scope="module")
def run() -> RunConfig:
    """The smallest rung of `tiny`, two layers deep and ten steps long."""
    rung = load_family("tiny").rung_runs[0]
    return rung.replace(model=rung.model.replace(num_layers=2, seq_len=32, window=16).model_dump(), steps=10)


@pytest.fixture(scope="module")
def tokens(run: RunConfig) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(97, 105, (run.batch_size, run.model.seq_len + 1)), jnp.int32)


@pytest.fixture(scope="module")
def after_ten(run: RunConfig, tokens: jax.Array):
    state, step = init_state(run), jax.jit(make_train_step(run))
    figures = []
    for _ in range(run.steps):
        state, reported = step(state, tokens)
        figures.append(jax.device_get(reported))
    return state, figures


def test_train_step_learns_a_repeated_batch(after_ten):
    state, figures = after_ten
    assert int(state.step) == 10
    assert float(figures[-1].loss.loss) < float(figures[0].loss.loss) - 1.0
    assert float(figures[0].loss.loss) == pytest.approx(np.log(256), abs=0.5)


def test_train_step_moves_the_balancing_bias_one_step_late(run: RunConfig, tokens: jax.Array):
    state = init_state(run)
    moved, figures = jax.jit(make_train_step(run))(state, tokens)
    assert float(jnp.max(jnp.abs(figures.layers.router_bias_abs_max))) == 0.0
    assert float(jnp.max(jnp.abs(moved.bias))) > 0.0


def test_train_step_leaves_out_an_update_that_is_over_its_limits_or_not_finite(run: RunConfig, tokens, after_ten):
    state, _ = after_ten
    step, infinite = jax.jit(make_train_step(run)), jnp.float32(jnp.inf)

    def after(given: TrainState, loss: jax.Array, norm: jax.Array):
        return step(given, tokens, horizon_of(run)._replace(limits=Limits(loss, norm)))

    plain, applied = step(state, tokens)[0], after(state, infinite, infinite)
    assert int(applied[1].skipped) == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, applied[0])
    broken = state._replace(params=state.params | {"final_norm": state.params["final_norm"] * jnp.nan})
    for given, limits in (
        (state, (jnp.float32(1e-3), infinite)),
        (state, (infinite, jnp.float32(1e-6))),
        (broken, (infinite, infinite)),
    ):
        left_out, figures = after(given, *limits)
        assert int(figures.skipped) == 1
        for name in ("params", "bias"):
            jax.tree.map(np.testing.assert_array_equal, getattr(left_out, name), getattr(given, name))
        moments = [leaf for leaf in jax.tree.leaves(left_out.optimizer) if leaf.ndim]
        kept = [leaf for leaf in jax.tree.leaves(given.optimizer) if leaf.ndim]
        jax.tree.map(np.testing.assert_array_equal, moments, kept)
        assert int(left_out.step) == int(given.step) + 1
        assert step_metrics(jax.device_get(figures))[0]["train/skipped"] == 1.0


def test_step_figures_become_names_of_the_vocabulary(after_ten):
    _, figures = after_ten
    values, layers = step_metrics(figures[-1])
    assert all(is_metric_name(name) for name in (*values, *layers))
    assert {f"moe/{field}" for field in MOE_FIELDS} <= set(values)
    assert {f"moe_worst_layer/{field}" for field in MOE_FIELDS} <= set(values)
    assert all(len(vector) == 2 for vector in layers.values())
    assert values["moe/drop_fraction"] == pytest.approx(
        values["moe/sender_drop_fraction"] + values["moe/receiver_drop_fraction"]
    )
    assert set(LayerStats._fields) - set(MOE_FIELDS) == {"attention_logit_max", "residual_rms"}


def test_progress_counts_tokens_with_the_trainers_own_counter():
    values = progress_metrics(tokens=3 * 1024, horizon=12 * 1024, flops=30720.0)
    assert values == {"progress/tokens": 3072.0, "progress/flops": 30720.0, "progress/fraction": 0.25}


def test_evaluation_is_dropless_and_changes_no_state(run: RunConfig, tokens: jax.Array, after_ten):
    state, _ = after_ten
    before = jax.tree.map(np.asarray, state)
    losses = jax.jit(make_eval_step(run))(state, tokens)
    dropping = jax.jit(make_eval_step(run, dropping=True))(state, tokens)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))
    assert losses.shape == (run.batch_size,)
    assert not np.allclose(losses, dropping, atol=1e-6)


def test_state_survives_the_trip_through_plain_dicts(run: RunConfig, after_ten):
    state, _ = after_ten
    tree = state_to_tree(state)
    assert all(isinstance(node, dict) for node in (tree, tree["params"], tree["optimizer"]))
    back = tree_to_state(tree, jax.eval_shape(lambda: init_state(run)))
    assert isinstance(back, TrainState)
    jax.tree.map(np.testing.assert_array_equal, state, back)


def test_nonfinite_gradients_are_counted(run: RunConfig, tokens: jax.Array):
    state = init_state(run)
    poisoned = state._replace(params=state.params | {"embed": state.params["embed"].at[100].set(jnp.nan)})
    _, figures = jax.jit(make_train_step(run))(poisoned, tokens)
    assert int(figures.nonfinite) > 0
    assert np.isnan(float(figures.loss.loss))
