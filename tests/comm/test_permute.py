import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.permute import combine_rows, dispatch_rows
from rungwise.comm.placement import place

TOKENS, TOP_K, SLOTS, WIDTH = 7, 3, 30, 4


@pytest.fixture
def case():
    random = np.random.default_rng(0)
    slot = random.permutation(SLOTS + 4)[: TOKENS * TOP_K]  # some lie beyond the last slot: placed nowhere
    return (
        place(jnp.asarray(slot, jnp.int32), SLOTS),
        jnp.asarray(random.normal(size=(TOKENS, WIDTH)), jnp.float32),
        jnp.asarray(random.normal(size=(SLOTS, WIDTH)), jnp.float32),
        jnp.asarray(random.normal(size=(TOKENS, TOP_K)), jnp.float32),
    )


def plain_dispatch(rows, placement):
    extended = jnp.concatenate([rows, jnp.zeros((1, WIDTH))])
    return extended[jnp.minimum(placement.item // TOP_K, TOKENS)]


def plain_combine(rows, gates, placement):
    extended = jnp.concatenate([rows, jnp.zeros((1, WIDTH))])
    return jnp.einsum("tkw,tk->tw", extended[placement.slot.reshape(TOKENS, TOP_K)], gates)


def test_permute_dispatch_equals_indexing_with_its_gradient(case):
    placement, tokens, slots, _ = case
    got, pull = jax.vjp(lambda rows: dispatch_rows(rows, placement), tokens)
    want, plain_pull = jax.vjp(lambda rows: plain_dispatch(rows, placement), tokens)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(pull(slots)[0], plain_pull(slots)[0], rtol=1e-6)


def test_permute_combine_equals_weighted_sum_with_its_gradients(case):
    placement, tokens, slots, gates = case
    got, pull = jax.vjp(lambda rows, gates: combine_rows(rows, gates, placement), slots, gates)
    want, plain_pull = jax.vjp(lambda rows, gates: plain_combine(rows, gates, placement), slots, gates)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for ours, plain in zip(pull(tokens), plain_pull(tokens), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_permute_unused_slots_may_hold_anything(case):
    placement, tokens, slots, gates = case
    used = np.asarray(placement.item) < TOKENS * TOP_K
    poisoned = jnp.where(used[:, None], slots, jnp.nan)
    _, pull = jax.vjp(lambda rows, gates: combine_rows(rows, gates, placement), poisoned, gates)
    _, clean_pull = jax.vjp(lambda rows, gates: combine_rows(rows, gates, placement), slots, gates)
    for got, want in zip(pull(tokens), clean_pull(tokens), strict=True):
        np.testing.assert_array_equal(got, want)
    _, pull = jax.vjp(lambda rows: dispatch_rows(rows, placement), tokens)
    np.testing.assert_array_equal(pull(poisoned)[0], pull(slots)[0])


def test_permute_gathers_backward_too(case):
    placement, tokens, slots, gates = case

    def loss(tokens, slots, gates):
        return jnp.sum(dispatch_rows(tokens, placement)) + jnp.sum(combine_rows(slots, gates, placement))

    assert "scatter" not in jax.jit(jax.grad(loss, (0, 1, 2))).lower(tokens, slots, gates).as_text()
    assert "scatter" in jax.jit(jax.grad(lambda rows: plain_dispatch(rows, placement).sum())).lower(tokens).as_text()
