import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.analysis.vocabulary import PARAMETER_GROUPS
from rungwise.ladder.family import load_family
from rungwise.ladder.training.parameter_groups import PARAMETERS, group_norms
from rungwise.model.transformer import init_params


def test_gradient_norm_counts_each_parameter_once():
    """A replicated gradient (2, 1), and those of two experts on two ranks, (3, 4) and (6, 8): √(5 + 25 + 100).

    The mean of the two ranks' norms would be 7.862, the replicated part counted twice 11.619, rank 0 alone 5.477.
    """
    experts = jnp.array([[[[3.0, 4.0]], [[6.0, 8.0]]]])
    total, groups = group_norms({"embed": jnp.array([2.0, 1.0]), "layers": {"moe": {"experts": {"down": experts}}}})
    assert float(total) == pytest.approx(11.401754, abs=1e-6)
    assert {name: float(norm) for name, norm in groups.items()} == pytest.approx(
        {"embed": np.sqrt(5), "experts": np.sqrt(125)}
    )


def test_group_norms_add_up_and_bear_names_of_the_vocabulary():
    params = init_params(load_family("tiny").rung_runs[0].model, 0)
    total, groups = group_norms(params)
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])
    assert float(total) == pytest.approx(np.linalg.norm(flat), rel=1e-5)
    assert float(total) ** 2 == pytest.approx(sum(float(norm) ** 2 for norm in groups.values()), rel=1e-5)
    assert set(groups) == set(PARAMETER_GROUPS) - {"gates"}  # this family gates no attention
    assert {parameter.group for parameter in PARAMETERS.values()} == set(PARAMETER_GROUPS)
