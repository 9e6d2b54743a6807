"""Drops at another context length, predicted from a run's own: a planted likeness is found and carried over."""

import dataclasses

import numpy as np
import pytest

from rungwise.comm.drop_study import simulate
from rungwise.comm.routing import Traffic, draw_routes
from rungwise.ladder.changing.phases import plan_phases
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.planning.drops_context import is_quick, predict_drops, traffic_of

TILT, SKEW, DRAWS = 1.0, 60.0, 8


def _measured(config: RunConfig) -> tuple[float, float, float]:
    """What a run of a planted tilt logs: deviation of expert loads over the whole batch, senders' drops, all drops."""
    traffic = dataclasses.replace(traffic_of(config, 0.0), document_tilt=TILT, concentration=SKEW)
    parts = [dataclasses.replace(traffic, seed=1000 + seed) for seed in range(DRAWS)]
    drops = [simulate(part, [config.transport])[0] for part in parts]
    sender, total = (float(np.mean([getattr(one, name) for one in drops])) for name in ("sender_fraction", "fraction"))
    loads = [np.bincount(np.concatenate(list(draw_routes(part))).ravel(), minlength=32) for part in parts]
    return float(np.mean([load.std() / load.mean() for load in loads])), sender, total


@pytest.mark.parametrize("name", ["pooled_wave", "expert_cell"])
def test_drops_at_a_longer_context_follow_from_those_at_the_run_s_own(name: str):
    """64 → 128 → 1,024 tokens, 16, 8 and 1 documents a rank: each more dropped than the one before."""
    rung = load_family("tiny-phases").rung_runs[0]
    transport = dataclasses.replace(rung.transport, name=name, num_waves=2 if name == "pooled_wave" else 1)
    rung = rung.replace(transport=transport)
    configs = [phase.config for phase in plan_phases(rung)]
    own, *longer = (configs[index] for index in (0, 1, 3))
    deviation, sender, drops = _measured(own)
    found = [drops]
    for config in longer:
        _, _, planted = _measured(config)
        found.append(predict_drops(own, config, deviations=[deviation], sender_drop_fraction=sender, draws=6))
        assert found[-1] == pytest.approx(planted, rel=0.4)
    assert found == sorted(found)
    assert found[-1] > 2 * found[0]


def test_a_run_s_traffic_has_its_tokens_whatever_their_length():
    hero = load_family("tiny-phases").hero_run
    traffics: list[Traffic] = [traffic_of(phase.config, 0.3) for phase in plan_phases(hero)]
    assert [traffic.documents_per_rank for traffic in traffics] == [16, 8, 8, 1]
    assert {traffic.tokens_per_rank for traffic in traffics} == {1024}
    assert len({traffic.concentration for traffic in traffics}) == 1
    assert is_quick(hero)
    assert not is_quick(load_family("marin").hero_run)
