"""The best size at one compute, and runs that have none."""

import numpy as np
import pytest

from rungwise.analysis.fitting.fit import UnfitForecast
from rungwise.analysis.fitting.isoflop import fit_isoflop


def test_isoflop_returns_a_planted_vertex():
    params = np.geomspace(1e8, 1e10, 7)
    found = fit_isoflop(params, 2.5 + 0.03 * np.log(params / 1.3e9) ** 2)
    assert found.optimum == pytest.approx(1.3e9, rel=1e-6)
    assert found.loss == pytest.approx(2.5)
    assert found.curvature == pytest.approx(0.03)


def test_isoflop_has_no_optimum_beyond_its_sizes():
    params = np.geomspace(1e8, 1e9, 5)
    found = fit_isoflop(params, 2.5 + 0.03 * np.log(params / 5e9) ** 2)
    assert (found.optimum, found.loss) == (None, None)
    assert "outside the sizes tried" in found.status


def test_isoflop_refuses_two_sizes():
    with pytest.raises(UnfitForecast, match="2 sizes"):
        fit_isoflop([1e8, 1e9, 1e9], [2.5, 2.4, 2.4])
