import dataclasses

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=20)
@given(
    shape=st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 1), (4, 2)]),
    factor=st.sampled_from([0.5, 1.0, 1.15, 2.0]),
    receiver_factor=st.sampled_from([0.5, 1.0, 1.33]),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_pooled_wave_keeps_what_the_rule_keeps(moe, shape, factor, receiver_factor, skew, padding, seed):
    num_ranks, num_waves = shape
    valid = np.random.default_rng(seed).random((num_ranks, 16)) >= padding
    layer = moe.layer(
        num_ranks=num_ranks,
        num_waves=num_waves,
        factor=factor,
        receiver_factor=receiver_factor,
        skew=skew,
        seed=seed,
        valid=valid,
    )
    moe.check(layer)


def test_pooled_wave_hot_expert_by_hand(moe):
    # 2 ranks × 4 tokens, 4 experts; all want expert 0. Pool: ceil(1.5·4/2) = 3 slots, expert: ceil(1·4/2) = 2 rows.
    layer = moe.layer(
        num_ranks=2,
        num_experts=4,
        top_k=1,
        num_tokens=4,
        factor=1.5,
        receiver_factor=1.0,
        expert_ids=np.zeros((2, 4, 1)),
    )
    result = layer.result()
    np.testing.assert_array_equal(result.kept[..., 0], [[True, False, False, False]] * 2)  # slot 0 of each source
    counts = result.counts
    np.testing.assert_array_equal(counts.sender_dropped, [1, 1])  # token 3 found no slot
    np.testing.assert_array_equal(counts.receiver_dropped, [2, 2])
    np.testing.assert_array_equal(counts.tokens_lost_all_routes, [3, 3])
    np.testing.assert_array_equal(counts.expert_load.sum(0), [8, 0, 0, 0])
    np.testing.assert_array_equal(counts.rank_load.sum(0), [8, 0])


def test_pooled_wave_first_come_case(moe):
    # Published case: capacity 1, four tokens; 4 of 8 assignments drop and only token 3 loses both experts.
    ids = np.array([[[0, 1], [0, 2], [0, 3], [1, 2]]])
    layer = moe.layer(num_ranks=1, num_experts=4, num_tokens=4, factor=1.0, receiver_factor=0.5, expert_ids=ids)
    result = layer.result()
    assert np.argwhere(~np.asarray(result.kept[0])).tolist() == [[1, 0], [2, 0], [3, 0], [3, 1]]
    assert (int(result.counts.receiver_dropped[0]), int(result.counts.tokens_lost_all_routes[0])) == (4, 1)


def test_pooled_wave_full_expert_drops_evenly_from_all_sources(moe):
    layer = moe.layer(
        num_ranks=4, top_k=1, num_waves=2, factor=4.0, receiver_factor=1.7, expert_ids=np.zeros((4, 16, 1))
    )
    counts = moe.check(layer)
    assert counts.receiver_dropped.sum() > 0
    survivors = np.asarray(layer.result().kept).sum((1, 2))
    assert survivors.max() - survivors.min() <= layer.config.num_waves


def test_pooled_wave_gradients_are_those_of_the_kept_assignments(moe):
    # Dropping must equal zero gates on the dropped assignments of a transport that drops nothing.
    layer = moe.layer(num_ranks=4, num_waves=2, factor=1.0, skew=2.0)
    kept = np.asarray(layer.result().kept)
    assert not kept.all()
    dense = moe.regroup(layer, "dropless", 1)
    by_tokens, by_gates, by_weights = layer.gradients()
    masked = type(dense)(
        dense.config,
        dense.tokens,
        dense.expert_ids,
        dense.gates * kept.reshape(dense.gates.shape),
        dense.weights,
        dense.valid,
    )
    want_tokens, want_gates, want_weights = masked.gradients()
    np.testing.assert_allclose(moe.flat(by_tokens), moe.flat(want_tokens), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moe.flat(by_gates), moe.flat(want_gates) * moe.flat(kept), rtol=1e-4, atol=1e-5)
    for got, want in zip(by_weights, want_weights, strict=True):
        np.testing.assert_allclose(moe.flat(got), moe.flat(want), rtol=1e-4, atol=1e-5)


def test_pooled_wave_shapes_do_not_depend_on_padding(moe):
    layer = moe.layer(num_ranks=2, num_waves=2)
    sizes = []

    @jax.jit
    def run(valid, *args):
        sizes.append(valid.shape)
        return dataclasses.replace(layer, valid=valid).run(*args)

    for share in (0.0, 0.5, 1.0):
        valid = np.random.default_rng(0).random((2, 16)) < share
        run(valid, layer.tokens, layer.gates, layer.weights)
    assert len(sizes) == 1


def test_pooled_wave_spills_into_the_pool_of_another_choice_by_hand(moe):
    # 4 slots a pool. Rank 0 of the experts gets six assignments: the last two, (2, 1) and (3, 0), find no slot. The
    # other choice of (2, 1) is expert 0 in the same full pool; that of (3, 0) is expert 3, where there is room.
    ids = np.array([[[0, 2], [1, 0], [0, 1], [1, 3]]] * 2)
    layer = moe.layer(
        num_ranks=2, num_experts=4, num_tokens=4, factor=1.0, receiver_factor=4.0, expert_ids=ids, spill=1
    )
    counts = moe.check(layer)
    np.testing.assert_array_equal(layer.result().kept[0], [[True, True], [True, True], [True, False], [True, True]])
    np.testing.assert_array_equal(counts.spilled, [1, 1])
    np.testing.assert_array_equal(counts.sender_dropped, [1, 1])


def test_pooled_wave_survival_does_not_depend_on_the_source(moe):
    # Sources with mixed experts: over many draws every source keeps the same share of what it sent, within 4 errors.
    layer = moe.layer(num_ranks=4, num_experts=8, num_tokens=16, factor=4.0, receiver_factor=1.0)
    args = layer.tokens, layer.gates, layer.weights
    run = jax.jit(lambda ids, *args: dataclasses.replace(layer, expert_ids=ids).run(*args).kept)
    random = np.random.default_rng(0)
    popularity = random.normal(size=8)
    shares = []
    for _ in range(200):
        ids = np.argsort(-(random.gumbel(size=(4, 16, 8)) + popularity), axis=-1)[..., :2].astype(np.int32)
        shares.append(np.asarray(run(ids, *args)).mean((1, 2)))
    apart = np.array(shares) - np.mean(shares, axis=1, keepdims=True)
    error = apart.std(0) / np.sqrt(len(shares))
    assert np.mean(shares) < 0.9
    assert np.all(np.abs(apart.mean(0)) < 4 * error), apart.mean(0) / error
