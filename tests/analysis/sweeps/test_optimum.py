"""Planted valleys: where the optimum is, how sure, at which edge, and what the recipe loses."""

import math

import numpy as np
import pytest

from rungwise.analysis.sweeps.optimum import OptimumStatus, Sweep, fit_optima, fit_optimum, recipe_gap, sweep_key
from rungwise.analysis.sweeps.rate_law import fit_sweep_law
from rungwise.analysis.sweeps.valley import Noise, shape

FACTORS = np.array([0.25, 0.5, 1.0, 2.0, 4.0])


def valley(rate, *, best=0.02, floor=1.9, curvature=0.05, skew=0.6):
    return floor + curvature * shape(np.log(np.asarray(rate) / best), skew)


@pytest.mark.parametrize("skew", [-0.6, 0.0, 0.6])
@pytest.mark.parametrize("best", [0.012, 0.02, 0.03])
def test_optimum_of_a_clean_valley_lies_where_it_was_planted(best, skew):
    rates = 0.02 * FACTORS
    found = fit_optimum(rates, valley(rates, best=best, skew=skew), recipe=0.02)
    assert found.status is OptimumStatus.INSIDE
    assert found.value == pytest.approx(best, rel=0.06)
    assert found.low is not None
    assert found.high is not None
    assert found.low < best < found.high
    assert found.loss == pytest.approx(1.9, abs=2e-3)
    assert not found.at_edge


def test_shape_is_a_parabola_without_skew_and_steeper_above_with_it():
    u = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(shape(u, 0.0), u**2, atol=1e-12)
    np.testing.assert_allclose(shape(u, 1e-5), u**2, rtol=1e-4)
    assert shape(math.log(2), 1.0) / shape(-math.log(2), 1.0) == pytest.approx(1.59, abs=0.01)


@pytest.mark.parametrize("noise", [0.002, 0.006])
def test_intervals_hold_the_planted_optimum_and_what_the_recipe_loses(noise):
    random = np.random.default_rng(3)
    inside, lost_inside, count = 0, 0, 0
    for _ in range(25):
        offsets = random.uniform(-0.6, 0.6, 4)
        skews = random.normal(0.4, 0.5, 4)
        sweeps = []
        for offset, skew in zip(offsets, skews, strict=True):
            losses = valley(0.02 * FACTORS, best=0.02 * math.exp(offset), skew=skew)
            losses = losses * (1 + noise * random.standard_normal(FACTORS.size))
            sweeps.append(Sweep(values=tuple(0.02 * FACTORS), losses=tuple(losses), diverged=(False,) * 5, recipe=0.02))
        for found, offset, skew in zip(fit_optima(sweeps), offsets, skews, strict=True):
            if found.at_edge:
                continue
            count += 1
            inside += (found.low or 0.0) <= 0.02 * math.exp(offset) <= (found.high or math.inf)
            assert found.lost_low is not None
            assert found.lost_high is not None
            lost_inside += found.lost_low <= 0.05 * shape(-offset, skew) <= found.lost_high
    assert count >= 85
    assert inside / count >= 0.82
    assert lost_inside / count >= 0.82


def test_one_outlier_among_nine_rates_does_not_move_the_optimum():
    rates = 0.02 * np.geomspace(0.25, 4, 9)
    noise = 0.001 * np.random.default_rng(0).standard_normal(9)
    losses = valley(rates, skew=0.0) * (1 + noise)
    losses[2] *= 1.06
    found = fit_optimum(rates, losses, recipe=0.02)
    assert found.value == pytest.approx(0.02, rel=0.08)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.02 < found.high


def test_noise_seen_in_other_sweeps_decides_the_width():
    rates, losses = 0.02 * FACTORS, valley(0.02 * FACTORS)
    widths = []
    for spread in (0.001, 0.01):
        found = fit_optimum(rates, losses, recipe=0.02, noise=Noise(8 * spread**2, 8))
        widths.append(math.log((found.high or 0.08) / (found.low or 0.005)))
    assert widths[0] < 0.5 * widths[1]


@pytest.mark.parametrize(("best", "status"), [(0.004, OptimumStatus.LOW_EDGE), (0.1, OptimumStatus.HIGH_EDGE)])
def test_optimum_beyond_the_grid_has_no_interval_but_a_bound(best, status):
    rates = 0.02 * FACTORS
    found = fit_optimum(rates, valley(rates, best=best, skew=0.0), recipe=0.02)
    assert found.status is status
    assert found.at_edge
    low_edge = status is OptimumStatus.LOW_EDGE
    assert (found.low, found.high) == ((None, pytest.approx(0.01)) if low_edge else (pytest.approx(0.04), None))
    assert found.value == pytest.approx(rates[0] if low_edge else rates[-1])
    edge = valley(found.value, best=best, skew=0.0)
    assert found.lost == pytest.approx(valley(0.02, best=best, skew=0.0) - edge)
    assert found.lost_high is None


def test_diverged_runs_are_left_out_and_named():
    rates = 0.02 * np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
    losses = valley(rates)
    losses[4], losses[5] = 3.0, math.nan
    found = fit_optimum(rates, losses, recipe=0.02, diverged=[False] * 4 + [True, False])
    assert found.diverges_from == pytest.approx(0.08)
    assert found.largest == pytest.approx(0.04)
    assert found.value == pytest.approx(0.02, rel=0.1)


def test_a_recipe_that_diverges_has_no_loss_to_compare():
    rates = 0.02 * np.array([0.125, 0.25, 0.5, 1.0])
    found = fit_optimum(rates, valley(rates, best=0.005), recipe=0.02, diverged=[False, False, False, True])
    assert found.status is OptimumStatus.INSIDE
    assert found.lost is None
    assert found.diverges_from == pytest.approx(0.02)


def test_too_few_values_and_a_sweep_that_diverged_whole_have_no_optimum():
    few = fit_optimum([0.01, 0.02], [2.0, 1.9], recipe=0.01)
    assert (few.status, few.value, few.low, few.high) == (OptimumStatus.TOO_FEW, pytest.approx(0.02), None, None)
    gone = fit_optimum([0.01, 0.02], [math.nan, 2.0], recipe=0.01, diverged=[False, True])
    assert (gone.status, gone.value, gone.loss) == (OptimumStatus.ALL_DIVERGED, None, None)
    assert gone.diverges_from == 0.01


def test_repeats_of_a_rate_are_one_value():
    rates = np.repeat(0.02 * FACTORS, 3)
    losses = valley(rates) * (1 + 0.004 * np.random.default_rng(1).standard_normal(15))
    found = fit_optimum(rates, losses, recipe=0.02)
    assert found.num_values == 5
    assert found.value == pytest.approx(0.02, rel=0.15)


def test_edges_are_judged_by_the_mean_of_a_rates_runs():
    rates = np.concatenate([0.02 * FACTORS, 0.02 * FACTORS[[1, 2, 3, 4]]])
    losses = valley(rates)
    losses[-1] = 1.85  # one lucky run at the upper edge, whose other run is far above
    found = fit_optimum(rates, losses, recipe=0.02)
    assert found.status is OptimumStatus.INSIDE
    assert found.value == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(
    ("values", "losses", "keywords", "said"),
    [
        ([0.01, -0.02], [2.0, 1.9], {}, "positive"),
        ([0.01, 0.02], [2.0], {}, "shape"),
        ([0.01, 0.02], [2.0, 1.9], {"level": 1.0}, "level 1.0"),
        ([0.01, 0.02], [2.0, 1.9], {"recipe": 0.0}, "recipe 0.0"),
    ],
)
def test_bad_sweeps_are_refused(values, losses, keywords, said):
    with pytest.raises(ValueError, match=said):
        fit_optimum(values, losses, **{"recipe": 0.01, **keywords})


# --- laws -------------------------------------------------------------------------------------------------------------


def row(hidden, batch, tokens, *, noise=0.0, best=None):
    rate = 3.0 * hidden**-0.9 * batch**0.4 * tokens**-0.3 if best is None else best
    rates = rate * 1.2 * FACTORS
    random = np.random.default_rng([hidden, batch, tokens])
    losses = valley(rates, best=rate) * (1 + noise * random.standard_normal(5))
    optimum = fit_optimum(rates, losses, recipe=rate, noise=Noise(10 * noise**2, 10)).to_dict()
    name = f"d{hidden} {batch} {tokens}"
    return {"name": name, "hidden_dim": hidden, "tokens_per_step": batch, "tokens": tokens, "optimum": optimum}


HELD = {"hidden_dim": -1.0, "tokens_per_step": 0.0, "tokens": 0.0}


def test_law_recovers_planted_exponents_where_each_size_was_varied_alone():
    rows = [
        row(hidden, batch, tokens * hidden, noise=0.003)
        for hidden in (32, 64)
        for batch in (1024, 2048, 4096)
        for tokens in (10_000, 40_000)
    ]
    law = fit_sweep_law(rows, quantity="learning_rate", held=HELD, level=0.98)
    assert law is not None
    for term, planted in {"hidden_dim": -0.9, "tokens_per_step": 0.4, "tokens": -0.3}.items():
        constant = law.exponents[term]
        assert constant.held is None
        assert constant.low is not None
        assert constant.high is not None
        assert constant.low < planted < constant.high
        assert constant.high - constant.low < 0.6
    sizes = {"hidden_dim": 48, "tokens_per_step": 2048, "tokens": 960_000}
    assert law.value(**sizes) == pytest.approx(3.0 * 48**-0.9 * 2048**0.4 * 960_000**-0.3, rel=0.1)


def test_law_holds_what_rises_along_the_ladder_only():
    rows = [row(32, 1024, 350_000), row(48, 1536, 750_000), row(64, 2048, 1_300_000)]
    law = fit_sweep_law(rows, quantity="learning_rate", held=HELD)
    assert law is not None
    assert law.exponents["hidden_dim"].held is None
    for term in ("tokens_per_step", "tokens"):
        assert law.exponents[term].value == 0.0
        assert "varied only along with hidden_dim" in (law.exponents[term].held or "")
    for one in rows:
        sizes = {term: one[term] for term in HELD}
        assert law.value(**sizes) == pytest.approx(one["optimum"]["value"], rel=0.05)


def test_law_of_one_rung_is_its_coefficient_and_leaves_edges_out():
    rows = [row(32, 1024, 350_000, best=0.03), row(32, 1024, 1_400_000, best=0.03)]
    rates = 0.02 * FACTORS
    rows[1]["optimum"] = fit_optimum(rates, valley(rates, best=0.001), recipe=0.02).to_dict()
    law = fit_sweep_law(rows, quantity="learning_rate", held=HELD)
    assert law is not None
    assert law.num_optima == 1
    assert {constant.held for constant in law.exponents.values()} == {
        "one hidden_dim swept", "one tokens_per_step swept", "one tokens swept"
    }  # fmt: skip
    assert law.coefficient.value == pytest.approx(32 * rows[0]["optimum"]["value"])
    assert law.left_out == ("d32 1024 1400000: at the grid's lower edge: sweep smaller values",)
    assert fit_sweep_law(rows[1:], quantity="learning_rate", held=HELD) is None


# --- what a forecast asks ---------------------------------------------------------------------------------------------


def entry(*, best=0.02, recipe=0.02, at_recipe=True, key="a"):
    rates = 0.02 * FACTORS
    losses = valley(rates, best=best)
    optimum = fit_optimum(rates, losses, recipe=recipe).to_dict()
    return {
        "key": key,
        "at_recipe": at_recipe,
        "values": rates.tolist(),
        "losses": losses.tolist(),
        "optimum": optimum,
    }


def test_recipe_gap_is_small_at_the_optimum_and_the_planted_loss_away_from_it():
    near = recipe_gap({"rungs": {"d32": [entry()]}}, "d32")
    assert near is not None
    assert near.percent is not None
    assert near.percent < 0.1
    assert not near.flagged
    far = recipe_gap({"rungs": {"d32": [entry()]}}, "d32", learning_rate=0.05)
    assert far is not None
    planted = 0.05 * shape(math.log(2.5), 0.6)
    assert far.nats == pytest.approx(planted, rel=0.15)
    assert far.percent == pytest.approx(100 * planted / 1.9, rel=0.15)
    assert far.flagged
    assert not far.at_edge


def test_recipe_gap_at_an_edge_is_flagged_and_measured():
    gap = recipe_gap({"rungs": {"d32": [entry(best=0.002)]}}, "d32")
    assert gap is not None
    assert gap.at_edge
    assert gap.nats == pytest.approx(valley(0.02, best=0.002) - valley(0.005, best=0.002))
    beyond = recipe_gap({"rungs": {"d32": [entry()]}}, "d32", learning_rate=0.2)
    assert beyond is not None
    assert (beyond.nats, beyond.percent, beyond.at_edge, beyond.flagged) == (None, None, True, True)


def test_recipe_gap_takes_only_sweeps_of_the_same_run():
    summary = {"rungs": {"d32": [entry(best=0.06, at_recipe=False, key="b"), entry(best=0.02, key="a")]}}
    for key, percent in ((None, 0.0), ("a", 0.0), ("b", 100 * 0.05 * shape(-math.log(3), 0.6) / 1.9)):
        gap = recipe_gap(summary, "d32", key=key)
        assert gap is not None
        assert gap.percent == pytest.approx(percent, abs=0.3)
    assert recipe_gap(summary, "d32", key="c") is None
    assert recipe_gap(summary, "d64") is None


def test_sweep_key_ignores_rate_and_seed_and_sees_the_batch():
    config = {"run": "d32", "seed": 0, "learning_rate": 0.03, "data_replicas": 2, "model": {"hidden_dim": 32}}
    assert sweep_key(config) == sweep_key({**config, "run": "d32-seed1", "seed": 1, "learning_rate": 0.06})
    assert sweep_key(config) != sweep_key({**config, "data_replicas": 4})
