"""What `ladder plan` says: the published ladder within its stated digits, and what it costs to say it."""

import json
import re
import subprocess
import sys
import tomllib
import tracemalloc
from dataclasses import asdict

import pandas as pd
import pytest
from rich.console import Console

from rungwise.analysis.conditions import compare_conditions
from rungwise.ladder.family import LadderConfig, family_text, load_family
from rungwise.ladder.planning.plan import LadderPlan, plan_ladder, rounds_to
from rungwise.ladder.planning.plan_table import plan_view


@pytest.fixture(scope="module")
def marin() -> LadderPlan:
    return plan_ladder(load_family("marin"))


def _digits(value: float, digits: int) -> str:
    return f"{value:.{digits - 1}e}"


def test_marin_total_is_the_published_one_to_the_last_parameter(marin: LadderPlan):
    parts = marin.parts["hero"]
    assert parts.params["gates"] == 14_155_776 + 154_140_672  # of attention heads; of 98 norms, rank 128
    assert parts.balancing_bias == 18_432
    described = sum(value for name, value in parts.params.items() if name not in ("gates", "convolutions"))
    assert described - 6_144 == 535_306_131_456  # without the embedding norm: the parts described publicly
    assert sum(parts.params.values()) + parts.balancing_bias == 535_477_106_688
    (stated,) = (item for item in marin.published if item.quantity == "num_params_with_bias")
    assert (stated.published, stated.ours, stated.difference) == (535_477_106_688, 535_477_106_688, 0)


def test_marin_parameters_round_to_the_published_ones(marin: LadderPlan):
    totals = [_digits(run.num_params, 2 if run.num_params < 1e10 else 3) for run in marin.rungs]
    assert totals == ["1.6e+09", "4.0e+09", "1.15e+10", "2.77e+10"]
    active = [round(run.num_active_params / 1e6) for run in marin.rungs]
    assert active[:3] == [61, 162, 481]
    assert _digits(marin.rungs[3].num_active_params, 2) == "1.2e+09"
    assert marin.hero.num_active_params == pytest.approx(22.76e9, abs=0.01e9)


def test_marin_active_parameters_give_the_published_steps_by_the_reference_s_own_rule(marin: LadderPlan):
    """791 tokens per active parameter there, norm gains not counted: each step count checks four to six digits."""
    steps = []
    for run in (*marin.rungs, marin.hero):
        counted = run.num_active_params - marin.parts[run.name].params["norms"]
        steps.append(round(791 * counted / run.tokens_per_step))
    assert steps == [11_420, 15_276, 15_128, 20_072, 390_251]
    assert steps == [run.steps for run in (*marin.rungs, marin.hero)]


def test_marin_tokens_are_the_published_ones(marin: LadderPlan):
    assert [round(run.tokens / 1e9) for run in marin.rungs] == [48, 128, 381, 926]
    assert marin.hero.tokens == 18_005_144_633_344


def test_marin_flops_are_within_a_percent_of_the_published_ones(marin: LadderPlan):
    stated = [2.6497e19, 1.7261e20, 1.3813e21, 7.7418e21, 2.6109e24]
    assert [run.flops for run in (*marin.rungs, marin.hero)] == pytest.approx(stated, rel=0.01)
    assert marin.hero.flops_with_head == pytest.approx(2.70e24, rel=0.005)


def test_marin_flops_differ_from_the_published_ones_by_three_named_rules(marin: LadderPlan):
    """The reference adds 3 operations a key and head for the mask, prices keys and values of global layers with the
    heads these use, and takes only each fourth layer as global, not the last. Its figures to thirteen digits."""
    stated = (2.320210052775936e15, 1.129954355970048e16, 9.130921800656486e16, 3.857022193930076e17)
    for run, per_step in zip((*marin.rungs, marin.hero), (*stated, 6.690294608796058e18), strict=True):
        config = next(item.model for item in load_family("marin").runs if item.run == run.name)
        fourth = config.num_layers // 4
        last = config.num_layers % 4 > 0
        keys = fourth * 4096 + (config.num_layers - fourth) * 2048
        mask = 3 * keys * config.num_heads
        unused = config.num_kv_heads - (config.global_kv_heads or 0)
        key_value = fourth * 2 * 2 * config.hidden_dim * unused * 128
        window = last * 4 * config.num_heads * 128 * 2048
        theirs = marin.parts[run.name].forward_flops_per_token["without_head"] + mask - key_value - window
        assert theirs * 3 * run.tokens_per_step == pytest.approx(per_step, rel=1e-13)


def test_marin_ladder_costs_a_third_of_what_was_announced(marin: LadderPlan):
    assert round(100 * marin.ladder_flops_share, 2) == 0.36
    assert round(100 * marin.ladder_flops_share_with_head, 2) == 0.42
    (stated,) = (item for item in marin.published if item.run == "ladder")
    assert (stated.published, stated.rounds_to_published) == (0.01, False)
    assert "about 1%" in stated.note


def test_marin_capacity_factors_as_announced_and_as_run(marin: LadderPlan):
    stated = {item.quantity: item for item in marin.published if item.quantity.endswith("capacity_factor")}
    sender, receiver = stated["sender_capacity_factor"], stated["receiver_capacity_factor"]
    assert (sender.published, sender.ours, sender.rounds_to_published) == (1.10, 1.15, False)
    assert (receiver.published, receiver.ours) == (1.15, 1.15)
    assert {run.sender_capacity_factor for run in marin.rungs} == {1.15}


def test_marin_announced_horizon_stands_beside_the_run_s(marin: LadderPlan):
    own, announced = marin.horizons
    assert (own.tokens, own.steps, own.learning_rate) == (18_005_144_633_344, 390_251, marin.hero.learning_rate)
    assert announced.name == "announced"
    assert abs(announced.tokens - 18.75e12) < marin.hero.tokens_per_step / 2 + 1
    assert announced.flops / own.flops == pytest.approx(announced.steps / 390_251)
    assert own.ladder_flops_share == marin.ladder_flops_share
    assert own.ladder_flops_share_with_head == marin.ladder_flops_share_with_head
    assert announced.ladder_flops_share < own.ladder_flops_share
    assert announced.learning_rate < own.learning_rate


def test_marin_says_where_published_figures_disagree(marin: LadderPlan):
    steps = {item.published: item for item in marin.published if item.quantity == "steps" and item.run == "hero"}
    assert steps[390_251].difference == 0
    assert steps[390_139].difference == 112
    assert "disagrees" in steps[390_139].note
    assert all(item.source for item in marin.published)


def test_no_size_or_cost_of_a_plan_is_taken_for_a_condition(marin: LadderPlan):
    rungs = pd.DataFrame([asdict(run) for run in marin.rungs])
    conditions = compare_conditions(rungs, asdict(marin.hero))
    assert {"tokens_per_active_param", "seq_len", "top_k"} <= set(conditions)
    assert [name for name in conditions if name.startswith(("flops", "num_params", "num_active"))] == []


def test_rounds_to_compares_at_the_published_digits():
    assert rounds_to(1.2349, 1.23)
    assert not rounds_to(1.2351, 1.23)
    assert rounds_to(390_251, 390_251)
    assert not rounds_to(1.15, 1.10, digits=3)


def _changed(edit) -> LadderConfig:
    document = tomllib.loads(family_text("marin"))
    edit(document)
    return LadderConfig.model_validate(document)


def test_published_figure_of_an_unknown_run_is_refused():
    with pytest.raises(ValueError, match="run 'd2049' is unknown; did you mean 'd2048'"):
        _changed(lambda document: document["published"][0]["values"].update(d2049=1.0))


def test_published_figure_of_an_unknown_quantity_is_refused():
    family = _changed(lambda document: document["published"][0].update(quantity="num_parms"))
    with pytest.raises(ValueError, match="quantity 'num_parms' is no number in the plan of 'd768'"):
        plan_ladder(family)


def test_alternative_horizon_below_one_token_is_refused():
    with pytest.raises(ValueError, match="alternative_tokens"):
        _changed(lambda document: document["hero"].update(alternative_tokens={"none": 0}))


def test_plan_of_tiny_has_every_json_field_and_no_table_without_content():
    plan = plan_ladder(load_family("tiny")).to_dict()
    assert plan["published"] == ()
    assert [horizon["name"] for horizon in plan["horizons"]] == ["own"]
    text = _rendered(plan, width=100)
    assert "parameters by part" in text
    for absent in ("published", "horizons", "longer context", "convolutions", "everything counted"):
        assert absent not in text


@pytest.mark.parametrize("width", [100, 140])
def test_plan_of_marin_fits_the_terminal(marin: LadderPlan, width: int):
    text = _rendered(marin.to_dict(), width=width)
    assert not re.search(r"\S…", text)  # no cell is cut
    for figure in ("535,477,088,256", "535,477,106,688", "22,763,237,376", "0.358%", "0.422%", "18,749,985,914,880"):
        assert figure in text


def _rendered(plan: dict, *, width: int) -> str:
    console = Console(width=width, record=True, quiet=False, file=None, highlight=False)
    with console.capture() as capture:
        console.print(plan_view(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_plan_of_marin_allocates_no_parameter():
    tracemalloc.start()
    try:
        plan_ladder(load_family("marin"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20  # a byte for every thousandth parameter of the smallest rung would be more


_CHILD = """
import contextlib, io, json, sys
from rungwise.ladder.cli import app
out = io.StringIO()
with contextlib.redirect_stdout(out):
    app(sys.argv[1:], standalone_mode=False)
heavy = {"jax", "jaxlib", "numpy", "flax", "optax", "mlflow", "pandas", "scipy", "matplotlib", "orbax"}
print(json.dumps({"heavy": sorted(heavy & set(sys.modules)), "modules": len(sys.modules), "out": out.getvalue()}))
"""


@pytest.mark.parametrize("words", [["plan", "marin"], ["plan", "marin", "--json"]], ids=" ".join)
def test_plan_imports_no_array_library(words: list[str]):
    command = [sys.executable, "-P", "-c", _CHILD, *words]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(child.stdout)
    assert seen["heavy"] == []
    assert seen["modules"] < 1000
    if "--json" in words:
        assert json.loads(seen["out"])["hero"]["num_params_with_bias"] == 535_477_106_688
