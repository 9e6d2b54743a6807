import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=8)
@given(
    shape=st.sampled_from([(1, 1, 0), (2, 2, 0), (4, 1, 2), (4, 2, 1)]),
    factor=st.sampled_from([0.5, 1.15]),
    skew=st.sampled_from([0.0, 2.0]),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_expert_cell_keeps_what_the_rule_keeps(moe, shape, factor, skew, padding, seed):
    num_ranks, num_waves, spill = shape
    valid = np.random.default_rng(seed).random((num_ranks, 16)) >= padding
    layer = moe.layer(
        "expert_cell",
        num_ranks=num_ranks,
        num_waves=num_waves,
        spill=spill,
        top_k=3,
        factor=factor,
        skew=skew,
        seed=seed,
        valid=valid,
    )
    counts = moe.check(layer)
    assert counts.receiver_dropped.sum() == 0


# Two slots a cell. Expert 0 is wanted by all four tokens of each rank; the others' cells have room but for expert 1.
HOT = np.array([[[0, 1], [0, 2], [0, 3], [0, 1]]] * 2)


def test_expert_cell_hot_expert_by_hand(moe):
    layer = moe.layer("expert_cell", num_ranks=2, num_experts=4, num_tokens=4, factor=1.0, expert_ids=HOT)
    counts = moe.check(layer)
    np.testing.assert_array_equal(layer.result().kept[1], [[True, True], [True, True], [False, True], [False, True]])
    np.testing.assert_array_equal(counts.sender_dropped, [2, 2])
    np.testing.assert_array_equal(counts.spilled, [0, 0])
    np.testing.assert_array_equal(counts.tokens_lost_all_routes, [0, 0])
    np.testing.assert_array_equal(counts.expert_load.sum(0), [8, 4, 2, 2])


def test_expert_cell_spills_to_the_tokens_own_other_expert_by_hand(moe):
    # Choice 0 of token 2 goes to expert 3, which has room; that of token 3 to expert 1, whose cell is full.
    layer = moe.layer("expert_cell", num_ranks=2, num_experts=4, num_tokens=4, factor=1.0, expert_ids=HOT, spill=1)
    counts = moe.check(layer)
    np.testing.assert_array_equal(layer.result().kept[0], [[True, True], [True, True], [True, True], [False, True]])
    np.testing.assert_array_equal(counts.sender_dropped, [1, 1])
    np.testing.assert_array_equal(counts.spilled, [1, 1])


def test_expert_cell_cannot_borrow_what_a_pool_shares(moe):
    # 4 rows for rank 0's two experts either way: the pool holds all four assignments to expert 0, its cell two.
    ids = np.array([[[0], [0], [0], [0], [2], [2], [3], [3]]] * 2)
    kept = [
        int(
            moe.layer(
                name,
                num_ranks=2,
                num_experts=4,
                top_k=1,
                num_tokens=8,
                factor=1.0,
                receiver_factor=9.0,
                expert_ids=ids,
            )
            .result()
            .kept.sum()
        )
        for name in ("expert_cell", "pooled_wave")
    ]
    assert kept == [12, 16]


def test_expert_cell_first_come_case(moe):
    # Published case: capacity 1, four tokens; 4 of 8 assignments drop, by (token, expert), and token 3 loses both.
    ids = np.array([[[0, 1], [0, 2], [0, 3], [1, 2]]])
    layer = moe.layer("expert_cell", num_ranks=1, num_experts=4, num_tokens=4, factor=0.5, expert_ids=ids)
    counts = moe.check(layer)
    dropped = np.argwhere(~np.asarray(layer.result().kept[0]))
    assert [(int(token), int(ids[0, token, k])) for token, k in dropped] == [(1, 0), (2, 0), (3, 1), (3, 2)]
    assert counts.sender_dropped[0] / counts.valid[0] == 0.5
    assert counts.tokens_lost_all_routes[0] == 1
