"""Rules by name, and steps against loops in NumPy float64."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.training.optimizer import build_optimizer, update_rule
from rungwise.ladder.training.parameter_groups import MATRIX_AXES, PARAMETERS, fans, group_norms
from rungwise.ladder.training.schedule import Horizon
from rungwise.model.config import ModelConfig
from rungwise.model.transformer import abstract_params

TINY = load_family("tiny").rung_runs[0]

WHOLE = ModelConfig(
    vocab_size=11,
    seq_len=8,
    hidden_dim=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    window=4,
    global_every=2,
    rotary_fraction=0.5,
    rotary_theta=1e4,
    query_key_multiplier=1.0,
    learned_query_key_norm=True,
    attention_gate=True,
    gated_norm_rank=3,
    embed_norm=True,
    short_conv_kernel=2,
    short_conv_sites=("key", "value", "attention", "moe"),
    num_experts=3,
    top_k=1,
    num_shared_experts=2,
    expert_dim=5,
    latent_dim=6,
    gate_sum=1.0,
    balance="none",
    logit_z_loss_weight=0.0,
    init_scale=0.5,
    norm_epsilon=1e-6,
)
"""Every option that has a parameter, at the smallest sizes that tell all axes apart."""

SHAPES = abstract_params(WHOLE)

MATRICES = (
    "embed_norm_gate.down",
    "embed_norm_gate.up",
    "final_norm_gate.down",
    "final_norm_gate.up",
    "layers.attention.key",
    "layers.attention.out",
    "layers.attention.query",
    "layers.attention.value",
    "layers.attention_norm_gate.down",
    "layers.attention_norm_gate.up",
    "layers.moe.experts.down",
    "layers.moe.experts.gate_up",
    "layers.moe.latent_down",
    "layers.moe.latent_up",
    "layers.moe.shared.down",
    "layers.moe.shared.gate_up",
    "layers.moe_norm_gate.down",
    "layers.moe_norm_gate.up",
)

OTHERS = (
    "embed",
    "embed_norm",
    "final_norm",
    "layers.attention.gate",
    "layers.attention.key_norm",
    "layers.attention.query_norm",
    "layers.attention_norm",
    "layers.conv.attention",
    "layers.conv.key",
    "layers.conv.moe",
    "layers.conv.value",
    "layers.moe.latent_norm",
    "layers.moe.router",
    "layers.moe_norm",
)


ADAMW = {"name": "adamw", "weight_decay": 0.5, "matrix_ratio": 4.0}
MUON = {"name": "muon", "weight_decay": 0.5, "matrix_ratio": 4.0, "newton_schulz_steps": 3}
MUONH = {"name": "muonh", "matrix_ratio": 4.0, "newton_schulz_steps": 5, "newton_schulz": "quintic"}


def _run(**optimizer: Any) -> RunConfig:
    """The smallest rung of `tiny` with another optimizer, 40 steps long, peak 0.02."""
    return TINY.replace(steps=40, learning_rate=0.02, optimizer=TINY.optimizer.replace(**optimizer).model_dump())


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _random_tree(seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32), SHAPES)


_PROGRAMS: dict[str, tuple[Any, Any]] = {}


def _compiled(run: RunConfig) -> tuple[Any, Any]:
    """A run's optimizer as (init, update), the update as one program, built once."""
    if run.content_hash not in _PROGRAMS:
        rule = build_optimizer(run)
        _PROGRAMS[run.content_hash] = (rule.init, jax.jit(rule.update))
    return _PROGRAMS[run.content_hash]


def _matrices(name: str, array: np.ndarray) -> Iterator[np.ndarray]:
    """Every matrix of a parameter as a view of two axes, by hand."""
    short = name.removeprefix("layers.")
    if short == name:
        yield array
        return
    for layer in array:
        if short in ("attention.query", "attention.key", "attention.value"):
            yield layer.reshape(layer.shape[0], -1)
        elif short == "attention.out":
            yield layer.reshape(-1, layer.shape[-1])
        elif short == "moe.experts.gate_up":
            yield from (expert[:, half, :] for expert in layer for half in (0, 1))
        elif short == "moe.shared.gate_up":
            yield from (layer[:, half, :] for half in (0, 1))
        elif short == "moe.experts.down":
            yield from layer
        else:
            yield layer


@pytest.mark.parametrize(
    ("optimizer", "matrix", "head"), [("adamw", "adam", "adam"), ("muon", "muon", "adam"), ("muonh", "muonh", "adamh")]
)
def test_every_parameter_gets_its_rule_by_name(optimizer: str, matrix: str, head: str):
    names = _by_name(SHAPES)
    rules = {name: update_rule(name, optimizer) for name in names}
    assert rules == dict.fromkeys(MATRICES, matrix) | dict.fromkeys(OTHERS, "adam") | {"head": head}
    assert set(PARAMETERS) == set(names)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muonh"])
def test_unknown_parameter_is_refused_by_name(optimizer: str):
    params = {"embed": jnp.ones(3), "layers": {"moe": {"adapter": jnp.ones((2, 3))}}}
    with pytest.raises(ValueError, match=r"parameter 'layers\.moe\.adapter' has no group and no rule"):
        build_optimizer(_run(name=optimizer)).init(params)
    with pytest.raises(ValueError, match=r"layers\.moe\.adapter"):
        group_norms(params)


def test_matrix_axes_are_the_matrices_split_by_hand():
    """Rows, columns and number of the matrices of every parameter, from the table and from slices."""
    assert set(MATRIX_AXES) == set(MATRICES)
    for name, leaf in _by_name(SHAPES).items():
        if name in MATRICES:
            rows, columns = fans(leaf.shape, MATRIX_AXES[name])
            by_hand = [matrix.shape for matrix in _matrices(name, np.zeros(leaf.shape))]
            assert by_hand == [(rows, columns)] * (leaf.size // (rows * columns)), name


def _newton_schulz(x: np.ndarray, coefficients: list[tuple[float, float, float]]) -> np.ndarray:
    """Orthogonalised momentum, by the published polynomial, in float64."""
    if x.shape[0] > x.shape[1]:
        return _newton_schulz(x.T, coefficients).T
    x = x / (np.linalg.norm(x) + 1e-8)
    for a, b, c in coefficients:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def _rate(step: int) -> float:
    """Peak 0.02, 40 steps, 2 of them warm-up, down to 5%."""
    return 0.02 * (1 + step) / 2 if step < 2 else 0.02 * (1 - 0.95 * (step - 2) / 37)


def _adam(grads: list[np.ndarray], *, nesterov: bool = False) -> np.ndarray:
    """Bias-corrected; Nesterov's momentum as in Dozat 2016, with a constant β1."""
    m, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for grad in grads:
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
    count = len(grads)
    ahead = 0.9 * m / (1 - 0.9 ** (count + 1)) + 0.1 * grads[-1] / (1 - 0.9**count)
    return (ahead if nesterov else m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.95**count)) + 1e-8)


def _momentum(grads: list[np.ndarray]) -> np.ndarray:
    """Nesterov, bias-corrected as Optax has it."""
    m, count = np.zeros_like(grads[0]), len(grads)
    for grad in grads:
        m = 0.95 * m + 0.05 * grad
    return 0.95 * m / (1 - 0.95 ** (count + 1)) + 0.05 * grads[-1] / (1 - 0.95**count)


def _on_sphere(param: np.ndarray, direction: np.ndarray, rate: float) -> np.ndarray:
    radius = np.linalg.norm(param)
    moved = param - rate * radius * direction / np.linalg.norm(direction)
    return moved * radius / np.linalg.norm(moved)


def _slow_step(name: str, param: np.ndarray, grads: list[np.ndarray], optimizer: str) -> np.ndarray:
    """A parameter after one more step, from all gradients so far: `grads[-1]` is this step's."""
    rate, new = _rate(len(grads) - 1), param.copy()
    if optimizer == "adamw":
        return param - rate * (_adam(grads) + (0.5 * param if name in MATRICES else 0.0))
    if name == "head" and optimizer == "muonh":
        return _on_sphere(param, _adam(grads), rate)
    if name not in MATRICES:
        return param - rate / 4 * _adam(grads, nesterov=optimizer == "muon")
    slices = zip(_matrices(name, new), *(_matrices(name, grad) for grad in grads), strict=True)
    for matrix, *parts in slices:
        coefficients = QUINTIC if optimizer == "muonh" else [(3.4445, -4.7750, 2.0315)] * 3
        direction = _newton_schulz(_momentum(parts), coefficients)
        if optimizer == "muonh":
            matrix[:] = _on_sphere(matrix, direction, rate)
        else:
            scale = np.sqrt(max(1, matrix.shape[1] / matrix.shape[0]))
            matrix[:] = matrix - rate * (scale * direction + 0.5 * matrix)
    return new


@pytest.mark.parametrize("optimizer", [ADAMW, MUON, MUONH], ids=lambda optimizer: optimizer["name"])
def test_three_steps_equal_loops_in_float64(optimizer: dict[str, Any]):
    run, params = _run(**optimizer), _random_tree(0)
    init, update = _compiled(run)
    state = init(params)
    slow, seen = {name: np.asarray(leaf, np.float64) for name, leaf in _by_name(params).items()}, []
    for step in range(3):
        grads = _random_tree(1 + step, scale=0.1)
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        seen.append({name: np.asarray(leaf, np.float64) for name, leaf in _by_name(grads).items()})
        following = {
            name: _slow_step(name, leaf, [past[name] for past in seen], run.optimizer.name)
            for name, leaf in slow.items()
        }
        for name, leaf in _by_name(updates).items():
            moved = following[name] - slow[name]
            scale = np.abs(moved).max()
            np.testing.assert_allclose(leaf / scale, moved / scale, atol=1e-4, err_msg=f"{name} at step {step}")
        slow = following


def test_muonh_keeps_the_norm_of_every_matrix_over_ten_steps():
    run, params = _run(**MUONH), _random_tree(0)
    init, update = _compiled(run)
    state, start = init(params), _by_name(params)
    for step in range(10):
        updates, state = update(_random_tree(1 + step), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    after = _by_name(params)
    for name in (*MATRICES, "head"):
        pairs = zip(*(_matrices(name, np.array(tree[name], np.float64)) for tree in (start, after)), strict=True)
        for before, now in pairs:
            assert np.linalg.norm(now) == pytest.approx(np.linalg.norm(before), rel=1e-6), name
            assert np.linalg.norm(now - before) > 0.02 * np.linalg.norm(before), name


def test_muonh_rates_of_the_three_groups():
    """First step: matrices and head turn by the rate, Adam moves each entry by the rate over the ratio."""
    params, (init, update) = _random_tree(0), _compiled(_run(**MUONH))
    updates, _ = update(_random_tree(1), init(params), params)
    moved, before = _by_name(updates), _by_name(params)
    for name in OTHERS:
        np.testing.assert_allclose(jnp.abs(moved[name]), 0.01 / 4, rtol=1e-4, err_msg=name)
    for name in (*MATRICES, "head"):
        for turn, matrix in zip(*(_matrices(name, np.array(t[name])) for t in (moved, before)), strict=True):
            # the chord is at most the rate, and shorter by what of the direction is along the matrix itself
            chord = np.linalg.norm(turn) / np.linalg.norm(matrix)
            assert 0.5 * 0.01 < chord < 1.01 * 0.01, name


def test_muon_orthogonalises_each_expert_on_its_own():
    """Every expert's gate and up matrices leave with singular values near one, however small its gradient is."""
    params, grads = _random_tree(0), _random_tree(1)
    grads["layers"]["moe"]["experts"]["gate_up"] *= 10.0 ** jnp.arange(-4, -1)[None, :, None, None, None]
    init, update = _compiled(_run(name="muon", newton_schulz_steps=5))
    updates, _ = update(grads, init(params), params)
    gate_up = np.asarray(_by_name(updates)["layers.moe.experts.gate_up"])
    for layer, expert, half in itertools.product((0, 1), (0, 1, 2), (0, 1)):
        singular = np.linalg.svd(gate_up[layer, expert, :, half, :], compute_uv=False) / 0.01
        assert singular.max() < 1.3
        assert singular.min() > 0.5


def test_one_compiled_update_serves_every_horizon():
    run, params, grads = _run(name="adamw"), _random_tree(0), _random_tree(1)
    traced = []

    @jax.jit
    def update(state: Any, horizon: Horizon) -> Any:
        traced.append(1)
        return build_optimizer(run, horizon).update(grads, state, params)[0]

    state = _compiled(run)[0](params)._replace(step=jnp.int32(7))
    for peak, steps in ((0.02, 40), (0.3, 40), (0.02, 400)):
        horizon = Horizon(jnp.float32(peak), jnp.int32(steps))
        own = run.replace(steps=steps, learning_rate=peak)
        alone, _ = _compiled(own)[1](grads, state, params)
        for name, leaf in _by_name(update(state, horizon)).items():
            np.testing.assert_allclose(leaf, _by_name(alone)[name], rtol=1e-4, atol=1e-7, err_msg=name)
    assert len(traced) == 1


def test_group_decay_starts_late_anneals_and_spares_the_rest():
    """Zero gradient: what moves is decay alone, by rate / 4 · decay · (1 − step/steps) · parameter."""
    decay = {"decays": {"gates": 0.2, "router": 0.1}, "start_step": 10, "anneal": True}
    init, update = _compiled(_run(**MUONH, group_decay=decay))
    params = _random_tree(0)
    for step in (9, 10, 39):
        state = init(params)._replace(step=jnp.int32(step))
        updates, _ = update(jax.tree.map(jnp.zeros_like, params), state, params)
        for name, leaf in _by_name(updates).items():
            share = {"layers.attention.gate": 0.2, "layers.moe.router": 0.1}.get(name, 0.0) if step >= 10 else 0.0
            expected = -_rate(step) / 4 * share * (1 - step / 40) * _by_name(params)[name]
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6, err_msg=f"{name} at step {step}")


def test_adamw_decays_matrices_only():
    params, (init, update) = _random_tree(0), _compiled(_run(**ADAMW))
    updates, _ = update(jax.tree.map(jnp.zeros_like, params), init(params), params)
    assert {name for name, leaf in _by_name(updates).items() if float(jnp.max(jnp.abs(leaf))) > 0} == set(MATRICES)


def test_optimizer_state_keeps_the_type_of_bfloat16_parameters():
    """Float32 gradients, as added up over microbatches, must not change what a checkpoint holds."""
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), SHAPES)
    rule = build_optimizer(_run(**MUONH))
    state = jax.eval_shape(rule.init, params)
    updates, following = jax.eval_shape(rule.update, SHAPES, state, params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(updates))
    assert jax.tree.map(lambda leaf: leaf.dtype, following) == jax.tree.map(lambda leaf: leaf.dtype, state)
