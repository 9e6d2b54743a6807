"""The rules in NumPy against the transports themselves and against loops; the router model; the study's sums."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_rules import kept_set
from rungwise.comm.drop_study import calibrate, concentration_of, count_drops, simulate
from rungwise.comm.routing import Traffic, draw_routes

OPTIONS = [
    ("dropless", {}),
    ("expert_cell", {}),
    ("expert_cell", {"num_waves": 2, "spill": 2}),
    ("pooled_wave", {"num_waves": 2}),
    ("pooled_wave", {"num_waves": 2, "spill": 2}),
    ("ragged", {}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_drop_study_keeps_exactly_what_the_transport_keeps(moe, name, options, num_ranks):
    random = np.random.default_rng(0)
    ids = random.integers(-1, 10, size=(num_ranks, 40, 3))  # experts −1, 8 and 9 do not exist
    valid = random.random((num_ranks, 40)) < 0.9
    layer = moe.layer(
        name, num_ranks=num_ranks, top_k=3, num_tokens=40, factor=0.9, expert_ids=ids, valid=valid, **options
    )
    result, made = layer.result(), kept_set(layer.expert_ids, layer.config, valid=valid)
    np.testing.assert_array_equal(made.kept, result.kept)
    counts = result.counts
    np.testing.assert_array_equal((made.valid & ~made.sent).sum((1, 2)), counts.sender_dropped)
    np.testing.assert_array_equal((made.sent & ~made.kept).sum((1, 2)), counts.receiver_dropped)
    np.testing.assert_array_equal((made.kept & (made.turn > 0)).sum((1, 2)), counts.spilled)
    can_spill = bool(options.get("spill")) and not (name == "pooled_wave" and num_ranks == 1)  # one pool in all
    assert (int(counts.spilled.sum()) > 0) == can_spill


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_drop_study_rules_equal_loops(moe, name, options, seed):
    random = np.random.default_rng(seed)
    layer = moe.layer(
        name,
        num_ranks=4,
        top_k=3,
        skew=2.0,
        factor=random.choice([0.5, 1.0, 1.33]),
        receiver_factor=random.choice([0.7, 1.15]),
        seed=seed,
        valid=random.random((4, 16)) < random.choice([0.0, 0.5, 1.0]),
        **options,
    )
    made, want = kept_set(layer.expert_ids, layer.config, valid=layer.valid), layer.expected_drops()
    for got, expected in zip((made.valid, made.sent, made.kept), want, strict=False):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(made.turn * made.sent, want.turn)


def test_drop_study_counts_are_those_of_the_kept_sets():
    traffic = Traffic(num_ranks=4, tokens_per_rank=300, num_experts=16, top_k=3, concentration=2.0, rank_tilt=0.3)
    base = TransportConfig(name="dropless", num_experts=16, top_k=3, num_ranks=4, sender_capacity_factor=1.05)
    configs = [dataclasses.replace(base, name=name, **options) for name, options in OPTIONS]
    routes = np.stack(list(draw_routes(traffic)))
    for config, drops in zip(configs, count_drops(routes, configs), strict=True):
        made = kept_set(routes.astype(int), config)
        assert drops.valid == routes.size
        assert drops.sender_dropped == (made.valid & ~made.sent).sum()
        assert drops.receiver_dropped == (made.sent & ~made.kept).sum()
        assert drops.sender_fraction + drops.receiver_fraction == pytest.approx(drops.fraction)
        if config.name == "expert_cell":
            assert drops.spilled == (made.turn > 0).sum()
    assert simulate(traffic, configs) == count_drops(routes, configs)


def test_drop_study_draws_distinct_choices_by_successive_sampling():
    # Two of three experts, one after the other, with weights 1, 2 and 5: P(i then j) = w_i / 8 · w_j / (8 − w_i).
    weights = np.array([1.0, 2.0, 5.0])
    traffic = Traffic(num_ranks=1, tokens_per_rank=400_000, num_experts=3, top_k=2, popularity=tuple(weights))
    (routes,) = draw_routes(traffic)
    assert (routes[:, 0] != routes[:, 1]).all()
    for first, second in np.ndindex(3, 3):
        if first != second:
            want = weights[first] / 8 * weights[second] / (8 - weights[first])
            got = np.mean((routes[:, 0] == first) & (routes[:, 1] == second))
            assert got == pytest.approx(want, abs=5 * math.sqrt(want / len(routes)) + 1e-4)


def test_drop_study_popularity_has_the_asked_spread_and_the_journal_figure_recovers_it():
    for alpha in (2.0, 9.0):
        traffic = Traffic(num_ranks=2, tokens_per_rank=300_000, num_experts=384, top_k=1, concentration=alpha)
        load = np.bincount(np.concatenate(list(draw_routes(traffic))).reshape(-1), minlength=384)
        deviation = load.std() / load.mean()
        found = concentration_of(deviation, num_experts=384, assignments=int(load.sum()))
        assert found == pytest.approx(alpha, rel=0.06)
    assert concentration_of(0.01, num_experts=384, assignments=40_000) == math.inf


def test_drop_study_documents_make_tokens_alike():
    def spread(**documents):
        traffic = Traffic(num_ranks=1, tokens_per_rank=8192, num_experts=64, top_k=2, **documents)
        (routes,) = draw_routes(traffic)
        pieces = [np.bincount(piece.reshape(-1), minlength=64) for piece in np.split(routes, 4)]
        return np.std(pieces, axis=0).mean() / np.mean(pieces)

    assert spread(documents_per_rank=4, document_tilt=0.5) > 4 * spread()
    assert spread(documents_per_rank=0, document_tilt=0.5) == spread()
    many, few = (
        simulate(
            Traffic(
                num_ranks=8,
                tokens_per_rank=4096,
                num_experts=64,
                top_k=2,
                documents_per_rank=number,
                document_tilt=0.5,
            ),
            [TransportConfig(name="pooled_wave", num_experts=64, top_k=2, num_ranks=8)],
        )[0]
        for number in (32, 2)
    )
    assert few.fraction > 2 * many.fraction  # fewer documents a rank: more drops at equal tokens


def test_drop_study_pool_of_a_rank_never_drops_more_than_its_experts_apart():
    traffic = Traffic(num_ranks=8, tokens_per_rank=2048, num_experts=64, top_k=4, concentration=9.0)
    base = TransportConfig(name="ragged", num_experts=64, top_k=4, num_ranks=8)
    ragged, wave, cell = simulate(
        traffic, [dataclasses.replace(base, name=name) for name in ("ragged", "pooled_wave", "expert_cell")]
    )
    assert ragged.fraction < wave.fraction < cell.fraction
    apart = dataclasses.replace(base, name="pooled_wave", sender_capacity_factor=9.0)
    assert ragged.fraction < simulate(traffic, [apart])[0].fraction


def test_drop_study_calibration_finds_a_planted_value():
    planted = Traffic(num_ranks=4, tokens_per_rank=4096, num_experts=48, top_k=4, concentration=7.0)
    config = TransportConfig(name="expert_cell", num_experts=48, top_k=4, num_ranks=4, sender_capacity_factor=1.3)
    target = simulate(planted, [config])[0].fraction
    start = dataclasses.replace(planted, seed=1)  # other draws than the planted ones
    found = calibrate([start], config, target, by="concentration", low=1.0, high=60.0)
    assert found == pytest.approx(7.0, rel=0.1)
    with pytest.raises(ValueError, match="is outside"):
        calibrate([start], config, 0.9, by="concentration", low=1.0, high=60.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_ranks": 0}, "num_ranks 0"),
        ({"top_k": 9}, "top_k 9"),
        ({"concentration": 0.0}, "concentration 0"),
        ({"rank_tilt": -1.0}, "rank_tilt -1"),
        ({"documents_per_rank": 17}, "documents_per_rank 17"),
        ({"popularity": (1.0,)}, "1 weights for 8"),
    ],
)
def test_drop_study_refuses_bad_traffic_in_one_line(change, word):
    good = Traffic(num_ranks=2, tokens_per_rank=16, num_experts=8, top_k=2)
    with pytest.raises(ValueError, match=word) as caught:
        dataclasses.replace(good, **change)
    assert "\n" not in str(caught.value)


def test_drop_study_refuses_another_shape_than_the_traffic():
    traffic = Traffic(num_ranks=2, tokens_per_rank=16, num_experts=8, top_k=2)
    config = TransportConfig(name="ragged", num_experts=8, top_k=2, num_ranks=4)
    with pytest.raises(ValueError, match="num_ranks 4"):
        simulate(traffic, [config])
    with pytest.raises(ValueError, match="top_k 1"):
        simulate(traffic, [dataclasses.replace(config, num_ranks=2, top_k=1)])
    with pytest.raises(ValueError, match="num_ranks 4"):
        count_drops(draw_routes(traffic), [config])


def test_drop_study_of_the_reference_hero_is_small_and_free_of_jax():
    code = """
import resource, sys, time
from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_study import simulate
from rungwise.comm.routing import Traffic
shape = dict(num_ranks=64, num_experts=384, top_k=8)
(drops,) = simulate(Traffic(tokens_per_rank=65_536, concentration=9.0, **shape),
                    [TransportConfig(name="pooled_wave", num_waves=3, **shape)])
assert drops.valid == 64 * 65_536 * 8 and 0 < drops.fraction < 0.2, drops
assert "jax" not in sys.modules
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kilobytes; 60 thousand measured
assert time.process_time() < 10, time.process_time()  # a budget of work, 1.1 s measured, whatever else runs
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=300)
