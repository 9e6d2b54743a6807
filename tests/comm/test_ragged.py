import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.comm.buffers import ragged_room


@settings(max_examples=8)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),
    factor=st.sampled_from([0.5, 1.0, 1.15, 9.0]),
    skew=st.sampled_from([0.0, 2.0]),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_ragged_keeps_what_the_rule_keeps(moe, num_ranks, factor, skew, padding, seed):
    valid = np.random.default_rng(seed).random((num_ranks, 16)) >= padding
    layer = moe.layer("ragged", num_ranks=num_ranks, factor=factor, skew=skew, seed=seed, valid=valid)
    counts = moe.check(layer)
    assert counts.receiver_dropped.sum() == 0


@pytest.mark.parametrize(
    ("ids", "factor", "kept"),
    [
        # All want expert 0 and its rank has 4 rows: the first source takes them all.
        ([[0, 0, 0, 0], [0, 0, 0, 0]], 1.0, [[1, 1, 1, 1], [0, 0, 0, 0]]),
        # 6 rows shared by experts 0 and 1: expert 0 first, from both sources, then expert 1 from the first.
        ([[0, 1, 1, 0], [0, 0, 1, 1]], 1.5, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        # 3 rows: the third assignment to expert 0 is the second source's first; its second drops.
        ([[0, 0, 2, 2], [0, 0, 3, 3]], 0.75, [[1, 1, 1, 1], [1, 0, 1, 0]]),
    ],
)
def test_ragged_hot_expert_by_hand(moe, ids, factor, kept):
    layer = moe.layer(
        "ragged", num_ranks=2, num_experts=4, top_k=1, num_tokens=4, factor=factor, expert_ids=np.array(ids)[..., None]
    )
    counts = moe.check(layer)
    np.testing.assert_array_equal(layer.result().kept[..., 0], np.array(kept, bool))
    np.testing.assert_array_equal(counts.sender_dropped, 4 - np.array(kept).sum(1))
    np.testing.assert_array_equal(counts.receiver_dropped, [0, 0])


def test_ragged_pool_is_full_before_anything_drops(moe):
    # One destination wanted by all: it computes exactly its pool, however the rows are spread over its experts.
    layer = moe.layer("ragged", num_ranks=4, num_experts=16, skew=3.0, factor=0.8, seed=3)
    result = layer.result()
    owner = layer.expert_ids // layer.config.experts_per_rank
    pool = ragged_room(layer.config, num_tokens=16).pool
    for rank in range(4):
        wanted, got = (owner == rank).sum(), np.asarray(result.kept)[owner == rank].sum()
        assert got == min(wanted, pool)
    assert not bool(result.kept.all())


def test_ragged_gradients_are_those_of_the_kept_assignments(moe):
    layer = moe.layer("ragged", num_ranks=4, factor=0.8, skew=2.0)
    kept = np.asarray(layer.result().kept)
    assert not kept.all()
    dense = moe.regroup(layer, "dropless", 1)
    masked = type(dense)(
        dense.config,
        dense.tokens,
        dense.expert_ids,
        dense.gates * kept.reshape(dense.gates.shape),
        dense.weights,
        dense.valid,
    )
    (by_tokens, by_gates, by_weights), (want_tokens, want_gates, want_weights) = layer.gradients(), masked.gradients()
    np.testing.assert_allclose(moe.flat(by_tokens), moe.flat(want_tokens), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moe.flat(by_gates), moe.flat(want_gates) * moe.flat(kept), rtol=1e-4, atol=1e-5)
    for got, want in zip(jax.tree.leaves(by_weights), jax.tree.leaves(want_weights), strict=True):
        np.testing.assert_allclose(moe.flat(got), moe.flat(want), rtol=1e-4, atol=1e-5)
