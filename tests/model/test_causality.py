"""No logit depends on a later token, nor on another sequence: gradients there are exactly zero."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rungwise.model.config import ModelConfig


@pytest.mark.parametrize("position", [3, 6])
def test_logits_depend_on_no_later_token_and_on_no_other_sequence(
    variant: ModelConfig, probe: Callable[[ModelConfig], Any], position: int
):
    small, rng = probe(variant), np.random.default_rng(2)
    ids = rng.permutation(variant.vocab_size)
    own, others = ids[: variant.seq_len], ids[variant.seq_len :]
    tokens = rng.choice(others, small.tokens.shape)
    tokens[0, :-1] = own  # each of its tokens once in the batch: an embedding row's gradient is a position's
    pull = np.zeros((*tokens[:, 1:].shape, variant.vocab_size))
    # Columns that belong to no row checked for zero below, so that a tied head adds nothing there.
    columns = own[: position + 1]
    pull[0, position, columns] = rng.normal(size=len(columns))
    reach = np.abs(small.pulled(tokens, pull)["embed"]).sum(axis=-1)
    assert np.all(reach[own[: position + 1]] > 0)
    assert np.all(reach[own[position + 1 :]] == 0)
    assert np.all(reach[others] == 0)
