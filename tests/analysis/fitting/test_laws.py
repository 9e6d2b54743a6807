"""Laws in parameters and tokens: gradients, the laws they contain, and the compute law that touches them."""

from dataclasses import astuple, fields

import numpy as np
import pytest

from rungwise.analysis.fitting.laws import LAWS, PowerLaw, SurfaceLaw

PARAMS = np.array([1e7, 3e8, 7e9, 7e10])
TOKENS = np.array([2e9, 6e9, 1.4e11, 1.4e12])
HOFFMANN = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28)


@pytest.mark.parametrize("outer", [1.0, 0.7, 1.6])
def test_surface_gradient_matches_differences(outer: float):
    law = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28, outer)
    gradient = law.gradient(PARAMS, TOKENS)
    for index, field in enumerate(fields(SurfaceLaw)):
        values = list(astuple(law))
        step = 1e-6 * values[index]
        values[index] += step
        up = SurfaceLaw(*values).value(PARAMS, TOKENS)
        values[index] -= 2 * step
        down = SurfaceLaw(*values).value(PARAMS, TOKENS)
        np.testing.assert_allclose(gradient[:, index], (up - down) / (2 * step), rtol=2e-5, err_msg=field.name)


def test_surface_value_is_hoffmanns():
    assert float(HOFFMANN.value(70e9, 1.4e12)) == pytest.approx(1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28)


def test_surface_contains_gadres_law():
    """E + a C^k' ... in tokens per parameter M: both powers share one exponent (Gadre et al. 2024, equation 4)."""
    law = SurfaceLaw(1.84, 150.0, 0.27, 320.0, 0.27)
    params, ratio = 1.5e8, 20.0
    flops = 6.0 * params**2 * ratio
    half = 0.27 / 2
    expected = 1.84 + (150.0 * ratio**half + 320.0 * ratio**-half) * (flops / 6.0) ** -half
    assert float(law.value(params, ratio * params)) == pytest.approx(expected)


def test_surface_contains_kaplans_law_without_a_floor():
    """((N_c / N)^(a_N / a_D) + D_c / D)^a_D with the constants of Kaplan et al. 2020, equation 1.5."""
    size, data, a_n, a_d = 8.8e13, 5.4e13, 0.076, 0.095
    law = SurfaceLaw(0.0, size ** (a_n / a_d), a_n / a_d, data, 1.0, a_d)
    expected = ((size / 1e9) ** (a_n / a_d) + data / 2e10) ** a_d
    assert float(law.value(1e9, 2e10)) == pytest.approx(expected)


def test_compute_law_touches_the_surface():
    law = HOFFMANN.along_compute(7e9, 1.4e11)
    flops = 6 * 7e9 * 1.4e11
    assert float(law.value(flops)) == pytest.approx(float(HOFFMANN.value(7e9, 1.4e11)))
    for factor in (0.99, 1.01):
        ahead = float(HOFFMANN.value(7e9 * factor, 1.4e11 * factor))
        assert float(law.value(flops * factor**2)) == pytest.approx(ahead, abs=2e-6)


def test_compute_factor_of_one_percent_at_the_reference_hero():
    """Marin's law at its hero: 1 % of loss is 1.5 times the compute."""
    law = PowerLaw(1.5, 84.71, 0.08996)
    loss = float(law.value(2.6108941613772703e24))
    assert loss == pytest.approx(2.0389, abs=2e-4)
    assert law.compute_factor(loss, 0.01 * loss) == pytest.approx(1.5, abs=0.05)


def test_law_table_counts_the_free_constants():
    for form in LAWS.values():
        if form.surface:
            free = 5 + form.outer_free - form.shared_exponent - (form.floor is not None)
            assert form.num_parameters == free, form.name
