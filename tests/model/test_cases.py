"""Published complaints about routing, balance and losses, each with its right value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.analysis.fitting.intervals import RungMeans, profile_floors
from rungwise.comm.config import TransportConfig
from rungwise.model.balance import loss_free_bias
from rungwise.model.config import ModelConfig
from rungwise.model.loss import LossSums, loss_parts
from rungwise.model.methods import build_method
from rungwise.model.moe import MoeMethod, MoeResult, moe
from rungwise.model.stats import LayerStats, layer_stats

TRANSPORTS = ("dropless", "pooled_wave")


def _method(name: str, num_experts: int, *, num_ranks: int = 1, replicas: int = 1, top_k: int = 1) -> MoeMethod:
    roomy = TransportConfig(
        name=name,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        sender_capacity_factor=16.0,
        receiver_capacity_factor=16.0,
    )
    return build_method(roomy, data_replicas=replicas)


def _scalar_experts(num_experts: int) -> dict[str, jax.Array]:
    """Experts that turn √x into down · x: silu(40√x) is 40√x to the last bit, and up is 1/40."""
    gate_up = jnp.broadcast_to(jnp.asarray([40.0, 1 / 40])[None, None, :, None], (num_experts, 1, 2, 1))
    return {"gate_up": gate_up, "down": jnp.ones((num_experts, 1, 1))}


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_expert_gradients_do_not_grow_with_ranks_or_replicas(name: str, num_ranks: int, replicas: int):
    # Loss: the mean over tokens 1, 2, 3, 4 of w_expert · x, experts 0, 1, 0, 1. A gradient not divided by the ranks is
    # [2, 3], one divided twice [0.5, 0.75].
    method, weights = _method(name, 2, num_ranks=num_ranks, replicas=replicas), _scalar_experts(2)
    tokens = jnp.sqrt(jnp.asarray([1.0, 2.0, 3.0, 4.0]))[:, None, None]
    experts = jnp.asarray([0, 1, 0, 1], jnp.int32)[:, None, None]

    def loss(down: jax.Array, scale: jax.Array) -> jax.Array:
        routed = method.run(tokens, experts, scale * jnp.ones((4, 1, 1)), {**weights, "down": down})
        return jnp.mean(routed.output)

    by_expert, by_scale = jax.jit(jax.grad(loss, (0, 1)))(weights["down"], jnp.ones(()))
    np.testing.assert_allclose(by_expert.ravel(), [1.0, 1.5], atol=1e-6)
    np.testing.assert_allclose(by_scale, 2.5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_rank_without_tokens_ends_its_step_with_a_gradient_of_exactly_zero(name: str):
    tokens, experts = jnp.ones((4, 1, 1)), jnp.zeros((4, 1, 1), jnp.int32)

    def output(weights: dict[str, jax.Array], num_ranks: int) -> jax.Array:
        return _method(name, 2, num_ranks=num_ranks).run(tokens, experts, jnp.ones((4, 1, 1)), weights).output

    weights = _scalar_experts(2)
    np.testing.assert_array_equal(output(weights, 2), output(weights, 1))
    grads = jax.grad(lambda weights: jnp.sum(output(weights, 2) ** 2))(weights)
    for leaf in jax.tree.leaves(grads):
        assert np.all(leaf[0] != 0)
        assert np.all(leaf[1] == 0)


def test_experts_that_do_not_divide_by_ranks_are_refused():
    with pytest.raises(ValueError, match=r"num_experts 30 .* num_ranks 8"):
        _method("pooled_wave", 30, num_ranks=8)


def _router_only(num_experts: int, *, top_k: int = 1, **changes: Any) -> ModelConfig:
    """A model whose hidden width is its number of experts, so that an identity router's logits are its input."""
    plain: dict[str, Any] = {
        "vocab_size": 2,
        "seq_len": 8,
        "hidden_dim": num_experts,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "window": 8,
        "global_every": 1,
        "rotary_fraction": 0.0,
        "rotary_theta": 1.0,
        "query_key_multiplier": 1.0,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_shared_experts": 0,
        "expert_dim": 1,
        "latent_dim": None,
        "gate_sum": 1.0,
        "balance": "none",
        "logit_z_loss_weight": 0.0,
        "init_scale": 1.0,
        "norm_epsilon": 1e-6,
    }
    return ModelConfig(**{**plain, **changes})


def _route(
    logits: np.ndarray, bias: Any, config: ModelConfig, method: MoeMethod | None = None
) -> tuple[MoeResult, np.ndarray]:
    """The MoE branch on router logits [batch, seq, experts], and the experts it chose."""
    chosen: list[np.ndarray] = []
    method = method or _method("dropless", config.num_experts, top_k=config.top_k)

    def recording(latent: jax.Array, experts: jax.Array, gates: jax.Array, weights: dict[str, Any]) -> Any:
        chosen.append(np.asarray(experts))
        return method.run(latent, experts, gates, weights)

    experts = config.num_experts
    rng = np.random.default_rng(0)
    params = {
        "router": jnp.eye(experts),
        "experts": {
            "gate_up": jnp.asarray(rng.normal(size=(experts, experts, 2, 1)), jnp.float32),
            "down": jnp.asarray(rng.normal(size=(experts, 1, experts)), jnp.float32),
        },
    }
    spied = dataclasses.replace(method, run=recording)
    result = moe(params, jnp.asarray(bias), jnp.asarray(logits, jnp.float32), config=config, method=spied)
    return result, chosen[0]


def _stats(result: MoeResult, bias: Any) -> LayerStats:
    return layer_stats(result.sums, bias=jnp.asarray(bias), attention_logit_max=jnp.zeros(()))


SCORES = np.asarray([[[0.6, 0.58], [0.66, 0.55], [0.52, 0.57]]])


def test_bias_chooses_experts_and_its_loss_would_show():
    config = _router_only(2, balance="loss_free_bias", balance_step=0.001)
    result, chosen = _route(SCORES, [-0.03, 0.03], config)
    assert chosen.ravel().tolist() == [1, 0, 1]
    assert np.asarray(result.sums.expert_load).tolist() == [1, 2]
    after = loss_free_bias(jnp.asarray([-0.03, 0.03]), result.sums.expert_load, step=config.balance_step)
    np.testing.assert_allclose(after, [-0.029, 0.029], rtol=1e-6)
    _, forgotten = _route(SCORES, [0.0, 0.0], config)
    assert forgotten.ravel().tolist() == [0, 0, 1]


def test_router_z_loss_is_the_mean_squared_log_sum_exp():
    logits = np.asarray([[[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]]])
    result, _ = _route(logits, np.zeros(3), _router_only(3, router_z_loss_weight=0.1))
    assert float(result.router_z_loss) == pytest.approx(2.95759, abs=5e-6)
    assert float(_stats(result, np.zeros(3)).router_z_loss) == pytest.approx(2.95759, abs=5e-6)
    huge, _ = _route(np.asarray([[[1000.0, 0.0]]]), np.zeros(2), _router_only(2, router_z_loss_weight=0.1))
    assert float(huge.router_z_loss) == pytest.approx(1e6)


def test_loss_balance_and_objective_are_three_numbers():
    sums = LossSums(*(jnp.asarray(value) for value in (30.0, 0.0, 0.0, 10.0, 0.0)))
    parts = loss_parts(sums, z_loss_weight=1e-4, balance_loss=12 * 1.05, penalty=0.01 * 12 * 1.05)
    assert float(parts.loss) == pytest.approx(3.0)
    assert float(jnp.exp(parts.loss)) == pytest.approx(20.085537, rel=1e-6)
    assert 0.01 * float(parts.balance_loss) == pytest.approx(0.126)
    assert float(parts.objective) == pytest.approx(3.126)


def test_a_ladder_of_objectives_bends_the_law_that_a_ladder_of_losses_keeps():
    flops = np.asarray([1e19, 1e20, 1e21, 1e22])
    clean = 1.6 + 95 * flops**-0.094
    contaminated = clean + 0.0105 * np.asarray([6, 8, 11, 16])

    def line(loss: np.ndarray, at: float) -> tuple[float, float]:
        """Exponent and forecast of a line in (log C, log(L − 1.6))."""
        rungs = RungMeans(log_flops=np.log(flops), loss=loss)
        near, far = (profile_floors(rungs, np.log(target), floor=1.6).quantile(0.5) for target in (at / np.e, at))
        return float(np.log((near - 1.6) / (far - 1.6))), far

    assert line(clean, 1e24) == pytest.approx((0.0940, 2.126894), abs=1e-6)
    assert line(contaminated, 1e24) == pytest.approx((0.072793, 2.291020), abs=1e-6)


def test_token_gerrymandering_shows_in_the_parts_of_the_balance_loss():
    # Two rows of probability (1, 0), four of (0.4, 0.6): f = (1/3, 2/3), P = (3/5, 2/5).
    logits = np.log(np.asarray([[[1.0, 1e-30]] * 2 + [[0.4, 0.6]] * 4]))
    config = _router_only(2, balance="auxiliary_loss", balance_loss_weight=0.01)
    result, _ = _route(logits, np.zeros(2), config)
    stats = _stats(result, np.zeros(2))
    assert float(result.balance_loss) == pytest.approx(14 / 15, rel=1e-6)
    assert float(stats.expert_load_max_over_mean) == pytest.approx(4 / 3)
    assert float(stats.balance_inner_product) == pytest.approx(14 / 15 - 1, rel=1e-5)
    # E^½ ‖f − u‖ and E^½ ‖P − u‖ for deviations of 1/6 and 1/10: what the inner product alone hides.
    assert float(stats.frequency_deviation) == pytest.approx(2 / 6)
    assert float(stats.probability_deviation) == pytest.approx(2 / 10)


def test_tied_logits_choose_the_same_experts_on_one_rank_and_on_eight():
    logits = np.random.default_rng(0).integers(-1, 2, (8, 8, 8)).astype(np.float64)
    bias = np.asarray([0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0])
    config = _router_only(8, top_k=3)
    expected = [sorted(range(8), key=lambda e: (-(row + bias)[e], e))[:3] for row in logits.reshape(-1, 8)]
    outputs = []
    for name, num_ranks in (("dropless", 1), ("pooled_wave", 8)):
        result, chosen = _route(logits, bias, config, _method(name, 8, num_ranks=num_ranks, top_k=3))
        assert chosen.reshape(-1, 3).tolist() == expected
        assert np.asarray(result.sums.expert_load).tolist() == np.bincount(np.ravel(expected), minlength=8).tolist()
        assert int(result.sums.sender_dropped + result.sums.receiver_dropped) == 0
        outputs.append(result.output)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


def test_tight_capacity_drops_first_come_and_counts_what_it_drops():
    # Four tokens, routes [[0, 1], [0, 2], [0, 3], [1, 2]], one slot an expert: 4 of 8 dropped, token 3 loses both.
    logits = np.asarray([[[9.0, 8, 0, 0], [9.0, 0, 8, 0], [9.0, 0, 0, 8], [0.0, 9, 8, 0]]])
    tight = TransportConfig(
        name="pooled_wave", num_experts=4, top_k=2, sender_capacity_factor=1.0, receiver_capacity_factor=0.5
    )
    result, chosen = _route(logits, np.zeros(4), _router_only(4, top_k=2), build_method(tight))
    assert chosen.reshape(-1, 2).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2]]
    stats = _stats(result, np.zeros(4))
    assert float(stats.drop_fraction) == 0.5
    assert float(stats.tokens_lost_all_routes) == 0.25
    assert np.asarray(result.output[0, 3]).tolist() == [0.0] * 4
    assert np.all(np.any(np.asarray(result.output[0, :3]) != 0, axis=-1))


def test_figures_of_a_router_by_hand():
    # Eight tokens all for experts 0 and 1 of four; every row's probabilities are (0.4, 0.3, 0.2, 0.1).
    probability = np.asarray([0.4, 0.3, 0.2, 0.1])
    logits = np.broadcast_to(np.log(probability), (2, 4, 4))
    result, _ = _route(logits, [0.0, 0.0, 0.0, -0.5], _router_only(4, top_k=2))
    stats = _stats(result, [0.0, 0.0, 0.0, -0.5])
    assert float(stats.dead_experts) == 2.0
    assert float(stats.expert_load_max_over_mean) == pytest.approx(2.0)
    assert float(stats.router_entropy) == pytest.approx(-np.sum(probability * np.log(probability)), rel=1e-5)
    assert float(stats.router_bias_abs_max) == 0.5
    assert float(stats.topk_margin) == pytest.approx(np.log(0.3 / 0.2), rel=1e-5)
    assert float(stats.router_z_loss) == pytest.approx(0.0, abs=1e-10)
    assert float(stats.balance_inner_product) == pytest.approx(4 * (0.5 * 0.7 - 0.25), rel=1e-5)


def test_rank_load_is_that_of_the_busiest_rank():
    # Sixteen assignments, experts 0 and 1 on rank 0 of two: 12 there and 4 on the other.
    logits = np.zeros((2, 4, 4))
    logits[:, :, 0], logits[:, :2, 1], logits[:, 2:, 2] = 3.0, 2.0, 2.0
    result, _ = _route(logits, np.zeros(4), _router_only(4, top_k=2), _method("pooled_wave", 4, num_ranks=2, top_k=2))
    assert np.asarray(result.sums.expert_load).tolist() == [8, 4, 4, 0]
    assert float(_stats(result, np.zeros(4)).rank_load_max_over_mean) == pytest.approx(12 / 8)
