"""Drops that sampling alone explains, against drawn routes; and which rungs' drop figures compare with the hero's."""

import dataclasses

import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_study import simulate
from rungwise.comm.routing import Traffic
from rungwise.ladder.family import load_family
from rungwise.ladder.planning.drops_expected import compare_with_hero, drop_conditions, expected_drops

TINY = TransportConfig(name="pooled_wave", num_experts=32, top_k=4, num_ranks=4, num_waves=2)
WIDE = TransportConfig(name="pooled_wave", num_experts=64, top_k=8, num_ranks=16, num_waves=2)


def _drawn(config: TransportConfig, *, num_tokens: int, draws: int) -> tuple[float, float]:
    shape = {name: getattr(config, name) for name in ("num_ranks", "num_experts", "top_k")}
    drops = [simulate(Traffic(tokens_per_rank=num_tokens, seed=seed, **shape), [config])[0] for seed in range(draws)]
    return (
        float(np.mean([drop.sender_fraction for drop in drops])),
        float(np.mean([drop.receiver_fraction for drop in drops])),
    )


@pytest.mark.parametrize(("config", "num_tokens", "draws"), [(TINY, 128, 40), (WIDE, 512, 6)])
@pytest.mark.parametrize("name", ["pooled_wave", "expert_cell", "ragged", "dropless"])
@pytest.mark.parametrize("factor", [1.0, 1.15])
def test_expected_drops_are_those_of_drawn_routes(
    name: str, factor: float, config: TransportConfig, num_tokens: int, draws: int
):
    waves = config.num_waves if name == "pooled_wave" else 1
    config = dataclasses.replace(
        config, name=name, num_waves=waves, sender_capacity_factor=factor, receiver_capacity_factor=factor
    )
    drawn = _drawn(config, num_tokens=num_tokens, draws=draws)
    assert expected_drops(config, num_tokens=num_tokens) == pytest.approx(drawn, rel=0.15, abs=0.001)


@pytest.mark.parametrize("name", ["tiny", "laptop", "gpu", "marin"])
def test_every_shipped_ladder_keeps_the_conditions_of_its_hero(name: str):
    family = load_family(name)
    marked = compare_with_hero(map(drop_conditions, family.rung_runs), drop_conditions(family.hero_run))
    assert [run for run, conditions in marked.items() if conditions.not_comparable] == []


def test_a_rung_under_other_conditions_says_which_differ():
    family = load_family("tiny")
    rung = family.rung_runs[0].replace(sequences_per_rank=2)
    marked = compare_with_hero([drop_conditions(rung)], drop_conditions(family.hero_run))
    reasons = marked["d32"].not_comparable
    assert reasons[0] == "tokens_per_rank 256, hero 128"
    differing = ["tokens_per_rank", "sequences_per_rank", "rows_per_pool", "rows_per_expert"]
    assert [reason.split()[0] for reason in reasons] == differing
    assert marked["hero"].not_comparable == ()


def test_documents_of_a_rank_are_known_for_the_shipped_bytes_only():
    assert drop_conditions(load_family("tiny").hero_run).documents_per_rank == pytest.approx(1 + 128 / 23_626)
    assert drop_conditions(load_family("gpu").hero_run).documents_per_rank is None
