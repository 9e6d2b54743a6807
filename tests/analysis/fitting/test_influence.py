"""Which runs a fit rests on: the odd corner first, and its effect that of leaving it out."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.fitting.influence import rank_influence
from rungwise.analysis.fitting.laws import SurfaceLaw
from rungwise.analysis.fitting.surface_fit import fit_surface


def test_influence_ranks_an_odd_corner_first_and_states_what_it_moves():
    params, ratio = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e8, 5e9, 6), np.geomspace(2, 100, 5)))
    tokens = params * ratio
    noise = 0.002 * np.random.default_rng(0).standard_normal(30)
    loss = SurfaceLaw(1.69, 406.4, 0.34, 410.7, 0.28).value(params, tokens) * np.exp(noise)
    odd = int(np.argmax(params / tokens))
    loss[odd] *= 1.02
    ranked = rank_influence(params, tokens, loss, delta=math.inf)
    assert ranked["row"].iloc[0] == odd
    others = np.arange(30) != odd
    everything = fit_surface(params, tokens, loss, delta=math.inf).law
    without = fit_surface(params[others], tokens[others], loss[others], delta=math.inf).law
    moved = np.log(without.value(params, tokens) / everything.value(params, tokens))
    assert ranked["moves"].iloc[0] == pytest.approx(np.sqrt(np.mean(moved**2)), rel=0.3)
    assert ranked["token_exponent"].iloc[0] == pytest.approx(
        without.token_exponent - everything.token_exponent, rel=0.4
    )


def test_influence_on_epochs_rows_names_those_of_least_tokens(reference_data: Path):
    """With its five rows of least tokens a parameter beta is 0.453, without them 0.367."""
    raw = pd.read_csv(reference_data / "epoch_chinchilla" / "svg_extracted_data.csv")
    params, tokens = raw["Model Size"], raw["Training FLOP"] / (6 * raw["Model Size"])
    fit = fit_surface(params, tokens, raw["loss"])
    found = (fit.law.floor, fit.law.size_exponent, fit.law.token_exponent)
    assert found == pytest.approx((1.891338, 0.349313, 0.453049), abs=2e-5)
    assert float(fit.law.value(70e9, 1.4e12)) == pytest.approx(2.012406, abs=1e-5)
    least = set(np.argsort((tokens / params).to_numpy())[:5].tolist())
    assert least <= set(rank_influence(params, tokens, raw["loss"])["row"].iloc[:6])
