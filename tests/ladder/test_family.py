import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rungwise.ladder.family import LadderConfig, explain, family_text, load_family, shipped_families


def _tiny(tmp_path: Path, edit: Any) -> str:
    """A changed copy of the tiny family, as a file."""
    import pydantic_core

    document = copy.deepcopy(tomllib.loads(family_text("tiny")))
    edit(document)
    try:
        LadderConfig.model_validate(document)
    except pydantic_core.ValidationError as error:
        return explain(error)
    return "accepted"


@pytest.mark.parametrize("name", shipped_families())
def test_shipped_families_load_and_plan(name: str):
    family = load_family(name)
    assert family.name == name
    assert len(family.rungs) == 4
    assert all(run.learning_rate > 0 and run.steps > 0 for run in family.runs)


def test_tiny_keeps_the_promises_of_its_geometry():
    from rungwise.ladder.planning.plan import plan_ladder

    plan = plan_ladder(load_family("tiny"))
    top, smallest = plan.rungs[-1], plan.rungs[0]
    assert plan.hero.flops >= 4 * top.flops
    assert top.flops >= 16 * smallest.flops
    assert len([rung for rung in plan.rungs if rung.rung == smallest.rung]) == 3
    ratios = [run.tokens_per_active_param for run in (*plan.rungs, plan.hero)]
    assert max(ratios) / min(ratios) < 1.01
    for field in ("num_experts", "top_k", "num_shared_experts", "tokens_per_rank", "num_ranks", "seq_len"):
        assert len({getattr(run, field) for run in (*plan.rungs, plan.hero)}) == 1


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda d: d["recipe"].update(top_q=3), "unknown key 'recipe.top_q'; did you mean 'top_k'?"),
        (lambda d: d.update(hreo={}), "unknown key 'hreo'; did you mean 'hero'?"),
        (lambda d: d["transport"].update(num_rank=2), "unknown key 'transport.num_rank'; did you mean 'num_ranks'?"),
        (lambda d: d["rungs"][1].update(hiden_dim=3), "unknown key 'rungs.1.hiden_dim'; did you mean 'hidden_dim'?"),
        (lambda d: d["recipe"].update(top_k=33), "top_k 33 exceeds num_experts 32"),
        (lambda d: d["transport"].update(num_ranks=5), "num_experts 32 does not divide by num_ranks 5"),
        (lambda d: d["recipe"].update(num_heads=3), "head_dim = hidden_dim / num_heads: 32 is not a multiple of 3"),
        (lambda d: d["transport"].update(sender_capacity_factor=0.0), "capacity factor 0.0 gives no slots"),
        (lambda d: d["rungs"][0].update(override={"num_layer": 2}), "override.num_layer is not a known field"),
        (lambda d: d["recipe"].pop("top_k"), "key 'recipe.top_k' is missing"),
        (lambda d: d["recipe"].update(aspect_ratio=32.0), "num_layers and aspect_ratio: give exactly one"),
        (lambda d: d["rungs"].reverse(), "must rise from rung to rung"),
        (lambda d: d["hero"].update(hidden_dim=16), "hero.hidden_dim 16 is below the top rung's"),
    ],
)
def test_family_refuses_bad_input_in_one_line(tmp_path: Path, edit: Any, complaint: str):
    message = _tiny(tmp_path, edit)
    assert complaint in message
    assert "\n" not in message


def test_family_names_the_nearest_shipped_one():
    with pytest.raises(ValueError, match="family 'tinny' is unknown; did you mean 'tiny'"):
        load_family("tinny")


def test_override_replaces_a_derived_value():
    document = tomllib.loads(family_text("tiny"))
    document["rungs"][1]["override"] = {"num_layers": 2, "learning_rate": 0.5, "steps": 7}
    run = next(
        run
        for run in LadderConfig.model_validate(document).runs
        if run.rung == f"d{document['rungs'][1]['hidden_dim']}"
    )
    assert (run.model.num_layers, run.learning_rate, run.steps) == (2, 0.5, 7)


def test_marin_reproduces_the_published_ladder():
    from rungwise.ladder.planning.plan import plan_ladder

    plan = plan_ladder(load_family("marin"))
    runs = (*plan.rungs, plan.hero)
    rates = [0.0158, 0.0144, 0.0149, 0.0134, 0.003291]
    flops = [2.6497e19, 1.7261e20, 1.3813e21, 7.7418e21, 2.6109e24]
    for run, rate, cost in zip(runs, rates, flops, strict=True):
        assert run.learning_rate == pytest.approx(rate, rel=5e-3)
        assert run.flops == pytest.approx(cost, rel=1e-2)
    assert plan.hero.num_params == pytest.approx(535_477_106_688, rel=1e-3)
    assert plan.hero.num_active_params == pytest.approx(22.76e9, abs=0.01e9 * 4)
    assert plan.hero.tokens == 18_005_144_633_344
    assert plan.hero.flops_with_head == pytest.approx(2.70e24, rel=1e-2)
