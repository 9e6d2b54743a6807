"""MXFP8 payloads through the transports. That a mesh, which moves bytes, agrees is in `mesh_child.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.comm.mxfp8 import count_clipped, round_trip

SHARDED = ("expert_cell", "pooled_wave", "ragged")


def quantized_reference(layer, rule):
    """Every assignment: tokens quantised, expert, output quantised, gate; and the values clipped on both ways."""
    weights = [jnp.asarray(part).reshape(-1, *part.shape[2:]) for part in layer.weights]
    ids = layer.expert_ids
    tokens = jnp.broadcast_to(jnp.asarray(layer.tokens)[:, :, None], (*ids.shape, layer.tokens.shape[-1]))
    hidden = jnp.tanh(jnp.einsum("rtkw,rtkwf->rtkf", round_trip(tokens, rule), weights[0][ids]))
    outputs = jnp.einsum("rtkf,rtkfw->rtkw", hidden, weights[1][ids])
    clipped = sum(int(count_clipped(rows, scale=rule)) for rows in (tokens, outputs))
    return jnp.einsum("rtkw,rtk->rtw", round_trip(outputs, rule), layer.gates), clipped


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_payload_mxfp8_quantises_both_ways_and_counts_what_it_clips(moe, name, rule):
    layer = moe.layer(name, num_ranks=2, factor=9.0, width=40, payload="mxfp8", payload_scale=rule)
    result = layer.result()
    want, clipped = quantized_reference(layer, rule)
    assert bool(result.kept.all())
    np.testing.assert_allclose(result.output, want, rtol=1e-3, atol=1e-3)
    off = np.abs(np.asarray(result.output) - want) / np.abs(want).max()
    assert np.mean(off > 1e-5) < 0.01  # an output at the edge between two numbers may round the other way
    assert abs(int(result.counts.clipped_values.sum()) - clipped) <= 0.02 * clipped
    assert (clipped > 0) == (rule == "floor")


@pytest.mark.parametrize("name", SHARDED)
def test_payload_does_not_change_who_is_kept_nor_the_gradients_path(moe, name):
    plain = moe.layer(name, num_ranks=4, factor=0.8, skew=2.0, width=40)
    small = dataclasses.replace(plain, config=dataclasses.replace(plain.config, payload="mxfp8"))
    assert not bool(plain.result().kept.all())
    np.testing.assert_array_equal(small.result().kept, plain.result().kept)
    for got, want in zip(jax.tree.leaves(small.gradients()), jax.tree.leaves(plain.gradients()), strict=True):
        error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        assert 0 < error < 0.1


def test_payload_ids_of_many_experts_travel_exactly(moe):
    # 200 local experts: above the 16 that e4m3 could number, within the 256 of bfloat16.
    random = np.random.default_rng(0)
    layer = moe.layer(
        num_ranks=2,
        num_experts=400,
        num_tokens=200,
        factor=9.0,
        expert_ids=random.permuted(np.tile(np.arange(400), (2, 1)), axis=1).reshape(2, 200, 2),
        payload="mxfp8",
    )
    small = dataclasses.replace(
        layer,
        tokens=jnp.ones_like(layer.tokens, jnp.bfloat16),
        gates=jnp.ones_like(layer.gates, jnp.bfloat16),
        weights=tuple(jnp.asarray(part, jnp.bfloat16) for part in layer.weights),
    )
    result = small.result()
    assert bool(result.kept.all())
    want = small.expected_output()
    assert (
        np.linalg.norm(np.asarray(result.output, np.float32) - want) / np.linalg.norm(want) < 0.05
    )  # one row off: 0.1


@pytest.mark.parametrize("name", SHARDED)
def test_payload_on_one_rank_crosses_nothing_and_is_not_quantised(moe, name):
    layer = moe.layer(name, num_ranks=1, factor=9.0, payload="mxfp8")
    np.testing.assert_allclose(layer.result().output, layer.expected_output(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"payload": "fp8"}, "mxfp8"),
        ({"payload_scale": "ceil"}, "rceil"),
        ({"ragged_exchange": "nativ"}, "native"),
        ({"name": "dropless", "payload": "mxfp8"}, "no meaning"),
        ({"name": "ragged", "spill": 1}, "no meaning"),
        ({"spill": 2}, "0..1"),
        ({"spill": -1}, "0..1"),
    ],
)
def test_payload_and_spill_are_refused_in_one_line(change, word):
    config = TransportConfig(name="pooled_wave", num_experts=8, top_k=2, num_ranks=2)
    with pytest.raises(ValueError, match=word) as caught:
        dataclasses.replace(config, **change)
    assert "\n" not in str(caught.value)
