import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from rungwise.comm.config import TRANSPORTS
from rungwise.comm.ranks import Ranks, over_ranks


def test_ranks_virtual_collectives_have_their_meaning():
    ranks = Ranks(size=4)
    fn = over_ranks(lambda own, both: own * both + jax.lax.psum(own, ranks.axis), ranks, shared=(1,))
    np.testing.assert_allclose(fn(jnp.arange(4.0), 2.0), 2 * np.arange(4.0) + 6)


def test_ranks_gradient_of_a_shared_argument_is_summed_once():
    fn = over_ranks(lambda own, both: own * both, Ranks(size=4), shared=(1,))
    assert jax.grad(lambda both: jnp.sum(fn(jnp.arange(4.0), both)))(2.0) == 6.0


def test_ranks_refuse_a_mesh_without_the_axis():
    with pytest.raises(ValueError, match="axis 'expert' of size 4 is not in mesh"):
        Ranks(size=4, mesh=AbstractMesh((4,), ("data",)))
    with pytest.raises(ValueError, match="size 0"):
        Ranks(size=0)


@pytest.mark.slow
def test_ranks_virtual_equal_a_mesh_of_devices(on_eight_devices):
    checks = json.loads(on_eight_devices(Path(__file__).with_name("mesh_child.py")))
    assert {check["transport"] for check in checks} == set(TRANSPORTS)
    for check in checks:
        assert check["exact"], check
        assert check["error"] < 1e-5, check
    compiled = [check for check in checks if "named" in check]
    assert len(compiled) >= len(TRANSPORTS)
    for check in compiled:
        check_compiled(check)


def check_compiled(check):
    """In the compiled text every exchange stands once forward and once backward, and naming is what does it."""
    named, waves = check["named"], check.get("num_waves", 1)
    if check["transport"] in ("expert_cell", "pooled_wave"):
        assert named["all-to-all"] == 4 * waves, check
        assert named["all-gather"] == named["reduce-scatter"] == 0, check
    elif check["transport"] == "ragged":  # emulated: counts, and for each way rows and tables; backward rows only
        assert (named["all-gather"], named["reduce-scatter"]) == (5, 2), check
    else:
        assert (named["all-gather"], named["reduce-scatter"]) == (4, 3), check
    assert sum(check["nothing_named"].values()) > sum(named.values()), check
