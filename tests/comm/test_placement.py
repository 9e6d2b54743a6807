import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rungwise.comm.placement import place, rank_within


@given(bins=st.lists(st.integers(0, 6), min_size=1, max_size=200))
def test_placement_rank_counts_earlier_items_of_the_bin(bins):
    num_bins = 6  # 6 itself stands for an item without bin
    want = [bins[:position].count(own) for position, own in enumerate(bins)]
    got = rank_within(jnp.array(bins, jnp.int32), num_bins)
    inside = np.array(bins) < num_bins
    np.testing.assert_array_equal(np.asarray(got)[inside], np.array(want)[inside])


def test_placement_knows_both_directions():
    placement = place(jnp.array([3, 5, 0, 9], jnp.int32), 5)  # items 1 and 3 lie beyond the last slot
    np.testing.assert_array_equal(placement.slot, [3, 5, 0, 5])
    np.testing.assert_array_equal(placement.item, [2, 4, 4, 0, 4])
    np.testing.assert_array_equal(placement.inverse().slot, placement.item)
