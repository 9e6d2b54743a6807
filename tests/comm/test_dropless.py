import numpy as np
import pytest

from rungwise.comm import dropless as module


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dropless_on_ranks_equals_one_rank(moe, num_ranks):
    layer = moe.layer("dropless", num_ranks=num_ranks, skew=3.0)
    single = moe.regroup(layer, "dropless", 1)
    np.testing.assert_allclose(moe.flat(layer.result().output), moe.flat(single.result().output), rtol=1e-5, atol=1e-6)
    for counts, whole in zip(layer.result().counts, single.result().counts, strict=True):
        np.testing.assert_array_equal(np.asarray(counts).sum(), np.asarray(whole).sum())


@pytest.mark.parametrize("block", [1, 4, 128])
def test_dropless_does_not_depend_on_the_block(moe, monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    layer = moe.layer("dropless", num_ranks=1, num_tokens=50, skew=3.0)
    np.testing.assert_allclose(layer.result().output, layer.expected_output(), rtol=1e-5, atol=1e-5)


def test_dropless_computes_every_assignment_of_one_expert(moe):
    layer = moe.layer("dropless", num_ranks=2, top_k=1, num_tokens=150, expert_ids=np.full((2, 150, 1), 5))
    result = layer.result()
    assert bool(result.kept.all())
    np.testing.assert_array_equal(result.counts.expert_load.sum(0), [0, 0, 0, 0, 0, 300, 0, 0])
    np.testing.assert_allclose(result.output, layer.expected_output(), rtol=1e-5, atol=1e-5)
