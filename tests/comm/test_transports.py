import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.config import TRANSPORTS, TransportConfig
from rungwise.comm.transports import TABLE, route

CONFIG = TransportConfig(name="pooled_wave", num_experts=32, top_k=4, num_ranks=8, num_waves=2)


def test_transports_table_holds_every_name():
    assert set(TABLE) == set(TRANSPORTS)


def test_transports_config_is_frozen_and_hashes():
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
    assert CONFIG.experts_per_rank == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 30}, ("30", "8", "num_ranks")),
        ({"num_waves": 3}, ("3", "4", "divisor")),
        ({"top_k": 33}, ("33", "32")),
        ({"top_k": 0}, ("top_k 0", "at least 1")),
        ({"num_ranks": 0}, ("num_ranks 0", "at least 1")),
        ({"name": "poolwave"}, ("poolwave", "did you mean 'pooled_wave'")),
        ({"sender_capacity_factor": 0.0}, ("0.0", "no slots")),
        ({"receiver_capacity_factor": -1.0}, ("-1.0", "no slots")),
    ],
)
def test_transports_config_refuses_in_one_line(change, words):
    with pytest.raises(ValueError, match="; ") as caught:
        dataclasses.replace(CONFIG, **change)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_refuse_an_axis_of_another_size(name):
    config = TransportConfig(name=name, num_experts=8, top_k=1, num_ranks=4)
    tokens, ids, gates = jnp.ones((2, 4, 8)), jnp.zeros((2, 4, 1), jnp.int32), jnp.ones((2, 4, 1))

    def one_rank(tokens, ids, gates):
        return route(tokens, ids, gates, lambda rows, group_expert=None: rows, axis="expert", config=config)

    with pytest.raises(ValueError, match="num_ranks 4 does not match axis 'expert' of size 2"):
        jax.vmap(one_rank, axis_name="expert")(tokens, ids, gates)


def test_transports_pooled_wave_refuses_more_experts_than_bfloat16_can_number():
    config = TransportConfig(name="pooled_wave", num_experts=512, top_k=1, num_ranks=1)
    tokens, ids, gates = jnp.ones((4, 8), jnp.bfloat16), jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
    with pytest.raises(ValueError, match="512 exceed 256"):
        route(tokens, ids, gates, lambda rows: rows, axis=None, config=config)


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_transports_agree_with_the_dense_reference_when_nothing_drops(moe, name, num_ranks):
    layer = moe.layer(name, num_ranks=num_ranks, num_waves=2, factor=30.0)
    result = layer.result()
    assert int(result.counts.sender_dropped.sum() + result.counts.receiver_dropped.sum()) == 0
    np.testing.assert_allclose(result.output, layer.expected_output(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pooled_wave", {"num_ranks": 1, "num_waves": 2}),
        ("pooled_wave", {"num_ranks": 4}),
        ("pooled_wave", {"num_ranks": 4, "num_waves": 2, "spill": 1}),
        ("expert_cell", {"num_ranks": 1}),
        ("expert_cell", {"num_ranks": 4, "num_waves": 2, "spill": 1}),
        ("ragged", {"num_ranks": 1}),
        ("ragged", {"num_ranks": 4}),
        ("dropless", {"num_ranks": 4}),
    ],
)
def test_transports_agree_in_values_and_gradients(moe, name, options, dtype, tolerance):
    with jax.enable_x64(dtype == np.float64):
        pooled = moe.layer(name, num_experts=16, factor=30.0, dtype=dtype, **options)
        reference = moe.regroup(pooled, "dropless", 1)
        for got, want in zip(
            jax.tree.leaves((pooled.result().output, pooled.gradients())),
            jax.tree.leaves((reference.result().output, reference.gradients())),
            strict=True,
        ):
            assert got.dtype == dtype
            scale = np.abs(want).max()
            np.testing.assert_allclose(moe.flat(got) / scale, moe.flat(want) / scale, atol=tolerance)


@pytest.mark.parametrize("name", ["expert_cell", "pooled_wave"])
def test_transports_spilled_gradients_are_those_of_the_expert_that_computed(moe, name):
    layer = moe.layer(name, num_ranks=4, num_waves=2, top_k=3, factor=1.0, receiver_factor=1.5, skew=2.0, spill=2)
    _, _, kept, turn = layer.expected_drops()
    assert (kept & (turn > 0)).any()
    assert not kept.all()
    choice = (np.arange(3) + turn) % 3
    dense = moe.regroup(layer, "dropless", 1)
    used = np.take_along_axis(layer.expert_ids, choice, axis=-1).reshape(dense.expert_ids.shape)
    dense = dataclasses.replace(dense, expert_ids=used)

    def output(tokens, gates, weights):
        weight = jnp.take_along_axis(gates, jnp.asarray(choice), axis=-1) * kept
        return dense.run(tokens.reshape(dense.tokens.shape), weight.reshape(dense.gates.shape), weights).output

    def loss(tokens, gates, weights):
        made = output(tokens, gates, weights).reshape(tokens.shape)
        return jnp.sum(made * jnp.cos(jnp.arange(made.size, dtype=made.dtype).reshape(made.shape)))

    want = jax.jit(jax.grad(loss, (0, 1, 2)))(layer.tokens, layer.gates, dense.weights)
    for got, expected in zip(jax.tree.leaves(layer.gradients()), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(moe.flat(got), moe.flat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_give_an_expert_without_tokens_exactly_zero_gradient(moe, name):
    # All four tokens choose expert 0, which rank 0 owns; rank 1 computes nothing.
    layer = moe.layer(
        name, num_ranks=2, num_experts=2, top_k=1, num_tokens=2, factor=4.0, expert_ids=np.zeros((2, 2, 1))
    )
    np.testing.assert_allclose(layer.result().output, layer.expected_output(), rtol=1e-5, atol=1e-6)
    for gradient in layer.gradients()[2]:
        assert np.abs(gradient[0]).max() > 0
        assert np.array_equal(gradient[1], np.zeros_like(gradient[1]))


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transports_sum_expert_gradients_once_over_ranks(name, num_ranks):
    # Published complaint: expert gradients too large by the expert-parallel size. Loss: mean over 4 tokens of w_e · x.
    config = TransportConfig(name=name, num_experts=2, top_k=1, num_ranks=num_ranks, sender_capacity_factor=4.0)
    config = dataclasses.replace(config, receiver_capacity_factor=4.0)
    tokens = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(num_ranks, -1, 1)
    ids = jnp.array([0, 1, 0, 1], jnp.int32).reshape(num_ranks, -1, 1)

    def loss(weights, scale):
        def one_rank(tokens, ids, weights):
            def experts(rows, group_expert=None):
                own = weights if group_expert is None else weights[group_expert]
                return rows * own[:, None, None]

            return route(tokens * scale, ids, jnp.ones(ids.shape), experts, axis="expert", config=config).output

        return jnp.mean(jax.vmap(one_rank, axis_name="expert")(tokens, ids, weights.reshape(num_ranks, -1)))

    by_weights, by_scale = jax.grad(loss, (0, 1))(jnp.ones(2), 1.0)
    np.testing.assert_allclose(by_weights, [1.0, 1.5], atol=1e-6)
    np.testing.assert_allclose(by_scale, 2.5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_transports_leave_padding_out_of_everything(moe, name, num_ranks):
    valid = np.random.default_rng(1).random((num_ranks, 16)) < 0.6
    valid[0] = num_ranks == 1  # with several ranks, the first has no token at all
    layer = moe.layer(name, num_ranks=num_ranks, num_waves=2, valid=valid)
    poisoned = dataclasses.replace(
        layer,
        tokens=np.where(valid[..., None], layer.tokens, np.nan),
        gates=np.where(valid[..., None], layer.gates, np.nan),
    )
    clean, dirty = layer.result(), poisoned.result()
    for got, want in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(jax.tree.leaves(poisoned.gradients()), jax.tree.leaves(layer.gradients()), strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(clean.counts.tokens_valid.sum()) == valid.sum()
    assert int(clean.counts.valid.sum()) == 2 * valid.sum()
    assert not np.asarray(clean.output)[~valid].any()


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != "dropless"])
def test_transports_shrink_with_the_number_of_real_tokens(moe, name):
    # Two of four tokens a rank are real and all want expert 0 of 2: its share of 4 assignments is 2 rows, not 4.
    layer = moe.layer(
        name,
        num_ranks=2,
        num_experts=2,
        top_k=1,
        num_tokens=4,
        factor=1.0,
        expert_ids=np.zeros((2, 4, 1)),
        valid=[[True, True, False, False]] * 2,
    )
    moe.check(layer)
    assert int(layer.result().kept.sum()) == 2


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_report_routes_to_nowhere(moe, name):
    ids = np.array([[[0, 1], [-1, 3], [8, 99], [2, 3]]])
    layer = moe.layer(name, num_ranks=1, num_tokens=4, factor=8.0, expert_ids=ids, valid=[[True, True, True, False]])
    counts = jax.tree.map(lambda count: np.asarray(count)[0], layer.result().counts)
    assert (counts.out_of_range, counts.valid, counts.tokens_valid, counts.tokens_lost_all_routes) == (
        3,
        3,
        3,
        1,
    )
    np.testing.assert_array_equal(counts.expert_load, [1, 1, 0, 1, 0, 0, 0, 0])
    assert np.isfinite(layer.result().output).all()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_ignore_what_experts_make_of_empty_rows(name):
    config = TransportConfig(name=name, num_experts=4, top_k=1, num_ranks=2, sender_capacity_factor=3.0)
    tokens = jnp.arange(1.0, 17.0).reshape(2, 4, 2)
    ids = jnp.array([[0, 0, 1, 2], [2, 0, 0, 0]], jnp.int32)[..., None]

    def run(poison):
        def one_rank(tokens, ids):
            def experts(rows, group_expert=None):
                return jnp.where(jnp.any(rows != 0, axis=-1, keepdims=True), 2 * rows, poison)

            valid = jnp.arange(4) < 3
            return route(tokens, ids, jnp.ones(ids.shape), experts, axis="expert", config=config, valid=valid)

        return jax.vmap(one_rank, axis_name="expert")(tokens, ids)

    np.testing.assert_array_equal(run(jnp.nan).output, run(0.0).output)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_work_in_bfloat16(moe, name):
    layer = moe.layer(name, num_ranks=4, num_waves=2, factor=30.0)
    small = dataclasses.replace(
        layer,
        **{
            field: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), getattr(layer, field))
            for field in ("tokens", "gates", "weights")
        },
    )
    result = small.result()
    assert result.output.dtype == jnp.bfloat16
    assert bool(result.kept.all())
    np.testing.assert_allclose(np.asarray(result.output, np.float32), small.expected_output(), rtol=0.05, atol=0.05)
