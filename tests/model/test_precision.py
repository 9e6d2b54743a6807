"""In bfloat16 only products and activations are narrow: router, norms, softmax, sums and all state stay float32."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from rungwise.ladder.family import ExecutionConfig, RunConfig, load_family
from rungwise.ladder.training.step import init_state, make_train_step
from rungwise.model import transformer
from rungwise.model.config import ModelConfig
from rungwise.model.loss import loss_sums
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.transformer import ModelOutput, forward, init_bias, init_params

REPEATS = 2
"""Sums over this many entries are copies coming back together, not reductions."""


@pytest.fixture(autouse=True)
def _rolled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)


def _tokens(config: ModelConfig) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (4, config.seq_len + 1)))


def _loss(params: Any, config: ModelConfig, dtype: Any) -> tuple[jax.Array, ModelOutput]:
    method = build_method(dropless_config(config.num_experts, config.top_k))
    tokens = _tokens(config)
    output = forward(params, init_bias(config), tokens[:, :-1], config=config, method=method, compute_dtype=dtype)
    sums = loss_sums(output.logits, tokens[:, 1:])
    penalty = jnp.sum(output.router_z_loss) + jnp.sum(output.balance_loss)
    return sums.loss / sums.count + 1e-3 * penalty, output


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every operation, those inside loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _in_bfloat16(config: ModelConfig) -> list[JaxprEqn]:
    traced = jax.make_jaxpr(jax.grad(lambda params: _loss(params, config, jnp.bfloat16)[0]))(init_params(config, 0))
    return list(_equations(traced.jaxpr))


def _narrow(values: Any) -> bool:
    return any(getattr(value.aval, "dtype", None) == jnp.bfloat16 for value in values)


def _summed(equation: JaxprEqn) -> int:
    shape = equation.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    return int(np.prod([shape[axis] for axis in equation.params["axes"]]))


def test_products_are_narrow_and_everything_delicate_is_not(variant: ModelConfig):
    equations = _in_bfloat16(variant)
    products = [equation for equation in equations if equation.primitive.name == "dot_general"]
    assert sum(_narrow(product.invars) for product in products) > 20
    for equation in equations:
        name = equation.primitive.name
        if name in ("exp", "log", "rsqrt", "sqrt", "div", "cumsum", "reduce_max"):
            assert not _narrow(equation.invars), equation
        if name == "reduce_sum" and _summed(equation) > REPEATS:
            assert not _narrow(equation.invars), equation


def test_router_products_and_logits_are_float32(variant: ModelConfig):
    rows, hidden, experts = 4 * variant.seq_len, variant.hidden_dim, variant.num_experts
    products = [equation for equation in _in_bfloat16(variant) if equation.primitive.name == "dot_general"]

    def shapes(product: JaxprEqn) -> list[tuple[int, ...]]:
        return [value.aval.shape for value in (*product.invars, *product.outvars)]  # pyright: ignore[reportAttributeAccessIssue]

    router = [product for product in products if shapes(product)[:2] == [(rows, hidden), (hidden, experts)]]
    assert router
    assert not any(_narrow(product.invars) for product in router)
    logits = [product for product in products if shapes(product)[2] == (rows, variant.vocab_size)]
    assert logits
    assert all(_narrow(product.invars) and not _narrow(product.outvars) for product in logits[:1])


def test_loss_in_bfloat16_stays_near_float32(variant: ModelConfig):
    # Eight bits of mantissa: a product is off by 0.4 %, a loss of 3.4 nats over 32 tokens by less than 0.03.
    def run(dtype: Any) -> tuple[jax.Array, ModelOutput]:
        return jax.jit(lambda params: _loss(params, variant, dtype))(init_params(variant, 0))

    (wide, _), (narrow, output) = run(jnp.float32), run(jnp.bfloat16)
    assert output.logits.dtype == jnp.float32
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(output))
    assert float(narrow) != float(wide)
    assert abs(float(narrow) - float(wide)) < 0.03


def _run(execution: dict[str, Any]) -> RunConfig:
    rung = load_family("tiny").rung_runs[0]
    shape = {"seq_len": 16, "vocab_size": 32, "hidden_dim": 16, "head_dim": 8, "window": 8, "expert_dim": 8}
    model = rung.model.replace(**shape, latent_dim=8, num_layers=2).model_dump()
    return rung.replace(model=model, execution=ExecutionConfig(**execution).model_dump(), steps=10)


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bfloat16_step_keeps_parameters_optimizer_and_bias_in_float32(microbatches: int):
    config = _run({"compute_dtype": "bfloat16", "microbatches": microbatches})
    state = jax.eval_shape(lambda: init_state(config))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
    after, figures = jax.eval_shape(make_train_step(config), state, tokens)
    for leaf in jax.tree.leaves((after.params, after.optimizer, after.bias, figures)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_parameters_may_be_kept_in_bfloat16_too():
    state = jax.eval_shape(lambda: init_state(_run({"param_dtype": "bfloat16"})))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert state.bias.dtype == jnp.float32


@pytest.mark.slow
def test_training_in_bfloat16_follows_float32():
    tokens = jnp.asarray(np.random.default_rng(0).integers(97, 105, (8, 17)) - 90, jnp.int32)
    losses = []
    for dtype in ("float32", "bfloat16"):
        config = _run({"compute_dtype": dtype})
        state, step = init_state(config), jax.jit(make_train_step(config))
        for _ in range(config.steps):
            state, figures = step(state, tokens)
        losses.append(float(figures.loss.loss))
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
