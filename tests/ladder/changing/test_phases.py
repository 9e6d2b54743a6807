"""Context and mixture by phase, as the family file says: configs, prices, refusals, epochs, conditions."""

import tomllib
from typing import Any

import pandas as pd
import pytest

from rungwise.analysis.conditions import compare_conditions
from rungwise.ladder.changing.phases import (
    describe_context,
    describe_mixture,
    has_phases,
    plan_phases,
    query_key_scale,
)
from rungwise.ladder.family import LadderConfig, RunConfig, family_text, load_family
from rungwise.ladder.planning.plan import plan_ladder, plan_run
from rungwise.model.accounting import count_params


def family(**changes: Any) -> LadderConfig:
    """`tiny-phases` with some tables changed; None takes one away."""
    content = tomllib.loads(family_text("tiny-phases"))
    for path, value in changes.items():
        table, (*keys, last) = content, path.split("__")
        for key in keys:
            table = table[key]
        if value is None:
            del table[last]
        else:
            table[last] = value
    return LadderConfig.model_validate(content)


@pytest.fixture(scope="module")
def hero() -> RunConfig:
    return load_family("tiny-phases").hero_run


def test_a_family_without_phases_says_nothing_of_them():
    run = load_family("tiny").hero_run
    content = run.model_dump(mode="json")
    assert not {"context", "text_share"} & set(content)
    assert set(content["data"]) == {"path", "tokenizer", "max_epochs"}
    assert not has_phases(run)
    (phase,) = plan_phases(run)
    assert phase.config == run
    assert plan_run(run).context is plan_run(run).mixture is plan_run(run).epochs is None


def test_phases_cut_the_batch_anew_and_change_nothing_else(hero: RunConfig):
    phases = plan_phases(hero)
    assert [(p.first_step / hero.steps, p.config.model.seq_len) for p in phases] == [
        (0.0, 64), (0.5, 128), (0.8, 128), (0.9, 1024)
    ]  # fmt: skip
    assert [p.config.sequences_per_rank for p in phases] == [16, 8, 8, 1]
    for phase in phases:
        config = phase.config
        assert config.tokens_per_step == hero.tokens_per_step == 8192
        assert config.model.window == hero.model.window == 32
        assert config.model.windows == (32, 32, config.model.seq_len)
        restored = config.replace(
            model=config.model.replace(seq_len=64, query_key_multiplier=1.3),
            sequences_per_rank=16,
            context=hero.context,
            data=hero.data,
        )
        assert restored == hero
    assert sum(p.tokens for p in phases) == hero.tokens
    assert [dict(p.config.data.mixture[0].weights) for p in phases] == [
        {"guides": 1, "manual": 4}, {"guides": 1, "manual": 4}, {"guides": 4, "manual": 1}, {"guides": 4, "manual": 1}
    ]  # fmt: skip


def test_query_key_multiplier_follows_the_reference_s_rule(hero: RunConfig):
    """1.3 × (1 + 0.1 ln 4) at 16K is the reference's published 1.48."""
    assert round(1.3 * query_key_scale(16_384, 4096), 2) == 1.48
    multipliers = [phase.config.model.query_key_multiplier for phase in plan_phases(hero)]
    assert multipliers == pytest.approx([1.3, 1.3 * 1.0693147, 1.3 * 1.0693147, 1.3 * 1.2772589])
    own = family(context=[{"start": 0.5, "seq_len": 128, "query_key_multiplier": 1.5, "window": "scaled"}]).hero_run
    last = plan_phases(own)[-1].config.model
    assert (last.query_key_multiplier, last.window) == (1.5, 64)


def test_flops_are_priced_phase_by_phase(hero: RunConfig):
    """6 a weight and token, and 12 × attention width × Σ windows; counted here from shapes, not by `count_flops`."""
    model = hero.model
    params = count_params(model)
    weights = params.active - params.norms
    query_dim = model.num_heads * model.head_dim
    expected = 0
    for phase in plan_phases(hero):
        windows = 32 + 32 + phase.config.model.seq_len
        expected += phase.tokens * (6 * weights + 12 * query_dim * windows)
    assert plan_run(hero).flops == expected
    plan = plan_ladder(load_family("tiny-phases")).to_dict()
    assert sum(phase["flops"] for phase in plan["phases"]["hero"]) == plan["hero"]["flops"] == expected
    plain = plan_run(hero.replace(context=()))
    assert plain.flops == hero.tokens * (6 * weights + 12 * query_dim * (32 + 32 + 64))
    assert plain.tokens == plan["hero"]["tokens"]
    assert plain.learning_rate == plan["hero"]["learning_rate"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": [{"start": 0.5, "seq_len": 96}]}, "context seq_len 96 does not divide the 1024 tokens of a rank"),
        ({"sequences_per_rank": 6, "context": [{"start": 0.2, "seq_len": 96}]}, "64 does not divide the longest, 96"),
        ({"context": [{"start": 0.5, "seq_len": 128}, {"start": 0.5, "seq_len": 256}]}, "must rise from phase"),
        ({"data__mixture": [{"weights": {"manual": 1, "guide": 1}}]}, "'guide' is no source; known: manual, guides"),
        ({"data__mixture": [{"start": 0.1, "weights": {"manual": 1}}]}, "first phase starts at 0.1; let it start at 0"),
        ({"data__mixture": [{"weights": {"manual": 0, "guides": 0}}]}, "come to 0 parts"),
        ({"data__mixture": [{"weights": {"manual": 99_991, "guides": 2}}]}, "come to 99993 parts"),
        ({"data__mixture": [{"weights": {"manual": 0.8, "guides": 0.2}}]}, "valid integer"),
        ({"data__mixture": None}, "sources and mixture: give both or neither"),
        ({"data__path": "text"}, "path 'text' with sources"),
    ],
)  # fmt: skip
def test_phases_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        family(**changes)


def test_a_refused_length_leaves_the_one_before_it(hero: RunConfig):
    lengths = [phase.config.model.seq_len for phase in plan_phases(hero, refused=(1,))]
    assert lengths == [64, 128, 128]
    assert [phase.config.model.seq_len for phase in plan_phases(hero, refused=(0,))] == [64, 64, 1024]


def test_epochs_of_every_rung_are_the_hero_s_where_simulated_and_a_broken_condition_where_not():
    plans = {
        wanted: plan_ladder(family(data__simulate_epochs=wanted, data__max_epochs=4.0, tokens_per_active_param=60))
        for wanted in (True, False)
    }
    simulated, plain = plans[True].epochs, plans[False].epochs
    assert set(simulated) == {"d32", "d32-seed1", "d40", "d48", "d64", "hero"}
    assert simulated["hero"] == plain["hero"]
    assert simulated["hero"]["guides"] > 1.5
    for run in simulated:
        assert simulated[run] == pytest.approx(simulated["hero"], rel=0.02)
    assert plain["d32"]["guides"] < 0.3
    outside = {
        wanted: compare_conditions(
            pd.DataFrame([{"epochs": rung.epochs, "mixture": rung.mixture} for rung in plan.rungs]),
            {"epochs": plan.hero.epochs, "mixture": plan.hero.mixture},
        )
        for wanted, plan in plans.items()
    }
    assert {wanted: found["epochs"]["outside"] for wanted, found in outside.items()} == {True: False, False: True}
    assert not outside[True]["mixture"]["outside"]


def test_less_than_one_epoch_is_as_good_as_another():
    """Nothing is seen twice in either run, so the condition holds."""
    table = pd.DataFrame([{"epochs": "guides 0.02, manual 0.1"}])
    for hero_epochs, outside in (("guides 0.9, manual 1", False), ("guides 1.2, manual 1", True), ("guides 0.9", True)):
        assert compare_conditions(table, {"epochs": hero_epochs})["epochs"]["outside"] is outside


def test_a_plan_states_context_and_mixture_in_words(hero: RunConfig):
    assert describe_context(hero) == "64, 128 from 0.5, 1024 from 0.9"
    assert describe_mixture(hero) == "guides 1, manual 4; from 0.8 guides 4, manual 1"
