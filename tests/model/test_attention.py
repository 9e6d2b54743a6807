import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model import attention as module
from rungwise.model.attention import attend, causal_window_mask


def _plain(query, key, value, window):
    logits = jnp.einsum("bkgid,bkjd->bkgij", query, key)
    logits = jnp.where(causal_window_mask(0, query.shape[3], window), logits, -jnp.inf)
    return jnp.einsum("bkgij,bkjd->bkgid", jax.nn.softmax(logits, axis=-1), value)


def _inputs(seq_len: int):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 2, 3, seq_len, 4))
    key, value = rng.normal(size=(2, 2, 2, seq_len, 4))
    return jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)


@pytest.mark.parametrize("window", [1, 3, 11])
@pytest.mark.parametrize("block", [4, 11, 64])
def test_attend_equals_plain_softmax_with_its_gradient(monkeypatch: pytest.MonkeyPatch, window: int, block: int):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    query, key, value = _inputs(11)
    target = jnp.asarray(np.random.default_rng(1).normal(size=query.shape))
    limit = jnp.asarray(window)

    def written_out(query, key, value):
        return jnp.sum(attend(query, key, value, limit)[0] * target)

    def automatic(query, key, value):
        return jnp.sum(_plain(query, key, value, limit) * target)

    np.testing.assert_allclose(
        attend(query, key, value, limit)[0], _plain(query, key, value, limit), rtol=2e-5, atol=2e-6
    )
    ours = jax.grad(written_out, argnums=(0, 1, 2))(query, key, value)
    theirs = jax.grad(automatic, argnums=(0, 1, 2))(query, key, value)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_attend_reports_the_largest_logit_it_sees():
    query, key, value = _inputs(6)
    logits = np.einsum("bkgid,bkjd->bkgij", query, key)
    seen = np.tril(np.ones((6, 6), bool))
    assert float(attend(query, key, value, jnp.asarray(6))[1]) == pytest.approx(logits[..., seen].max(), rel=1e-5)
