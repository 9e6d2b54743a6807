import jax.numpy as jnp
import numpy as np

from rungwise.model.loss import language_model_loss


def test_loss_is_the_sum_over_counted_tokens_over_their_count():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 3, 5)), rng.integers(0, 5, (2, 3))
    weights = np.asarray([[1, 1, 0], [0, 0, 1]], np.float32)
    log_z = np.log(np.exp(logits).sum(-1))
    losses = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    parts = language_model_loss(
        jnp.asarray(logits), jnp.asarray(targets), z_loss_weight=0.1, weights=jnp.asarray(weights)
    )
    np.testing.assert_allclose(parts.loss, (losses * weights).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(parts.logit_z_loss, (log_z**2 * weights).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(parts.objective, parts.loss + 0.1 * parts.logit_z_loss, rtol=1e-6)


def test_loss_of_a_batch_without_counted_tokens_is_zero_not_nan():
    parts = language_model_loss(
        jnp.ones((1, 2, 3)), jnp.zeros((1, 2), int), z_loss_weight=0.0, weights=jnp.zeros((1, 2))
    )
    assert float(parts.loss) == 0.0
