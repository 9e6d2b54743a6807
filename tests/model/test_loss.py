import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model.loss import LossSums, loss_parts, loss_sums, objective_of, token_losses


def _batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = np.asarray([[1, 1, 0], [0, 0, 1]], np.float32)
    return rng.normal(size=(2, 3, 5)), rng.integers(0, 5, (2, 3)), weights


def test_loss_is_the_sum_over_counted_tokens_over_their_count():
    logits, targets, weights = _batch()
    log_z = np.log(np.exp(logits).sum(-1))
    losses = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    sums = loss_sums(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights))
    parts = loss_parts(sums, z_loss_weight=0.1, balance_loss=2.0, penalty=0.5)
    assert float(sums.count) == 3.0
    np.testing.assert_allclose(parts.loss, (losses * weights).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(parts.logit_z_loss, (log_z**2 * weights).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(parts.log_z_mean, (log_z * weights).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(parts.objective, parts.loss + 0.1 * parts.logit_z_loss + 0.5, rtol=1e-6)
    assert float(parts.balance_loss) == 2.0


def test_objective_of_parts_of_a_batch_add_up_to_the_whole():
    logits, targets, weights = _batch()
    whole = loss_sums(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights))
    shares = [
        objective_of(
            loss_sums(jnp.asarray(logits[row]), jnp.asarray(targets[row]), jnp.asarray(weights[row])),
            whole.count,
            z_loss_weight=0.1,
        )
        for row in (slice(0, 1), slice(1, 2))
    ]
    np.testing.assert_allclose(sum(shares), objective_of(whole, whole.count, z_loss_weight=0.1), rtol=1e-6)
    parts = loss_parts(whole, z_loss_weight=0.1, balance_loss=0.0, penalty=0.0)
    np.testing.assert_allclose(sum(shares), parts.objective, rtol=1e-6)


def test_a_batch_without_counted_tokens_has_no_loss_and_no_gradient():
    # NaN, not 0: a loss of 0 would be logged, averaged and fitted.
    nothing = jnp.zeros((1, 2))

    def objective(logits: jax.Array) -> jax.Array:
        sums = loss_sums(logits, jnp.zeros((1, 2), int), nothing)
        return objective_of(sums, sums.count, z_loss_weight=1.0)

    sums = loss_sums(jnp.ones((1, 2, 3)), jnp.zeros((1, 2), int), nothing)
    assert np.isnan(float(loss_parts(sums, z_loss_weight=0.0, balance_loss=0.0, penalty=0.0).loss))
    assert np.all(np.asarray(jax.grad(objective)(jnp.ones((1, 2, 3)))) == 0.0)


def _sums(loss: float, count: int) -> LossSums:
    return LossSums(*(jnp.asarray(value) for value in (loss, 0.0, 0.0, float(count), 0.0)))


def test_loss_weighs_every_token_alike_wherever_it_lies():
    # Published complaint: means of ranks or of micro-steps averaged, and 0 / 0 on a rank without counted tokens.
    first, second = [_sums(10.0, 5), _sums(8.0, 1), _sums(0.0, 0)], [_sums(3.0, 2), _sums(4.0, 1), _sums(0.0, 0)]

    def mean(parts: list[LossSums]) -> float:
        added = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        return float(loss_parts(added, z_loss_weight=0.0, balance_loss=0.0, penalty=0.0).loss)

    assert mean(first) == pytest.approx(3.0)
    assert mean(first + second) == pytest.approx(25 / 9)


def test_log_partition_of_huge_logits_is_finite():
    losses, log_z = token_losses(jnp.asarray([[[1000.0, 0.0]]]), jnp.asarray([[0]]))
    assert float(losses[0, 0]) == 0.0
    sums = loss_sums(jnp.asarray([[[1000.0, 0.0]]]), jnp.asarray([[0]]))
    assert float(sums.logit_z) == pytest.approx(1e6)
    assert float(log_z[0, 0]) == 1000.0
