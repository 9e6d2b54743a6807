import copy
import json
import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from rungwise.ladder.family import LadderConfig, RunConfig, explain, family_text, load_family
from rungwise.ladder.training.optimizer_config import Beta2Law, EpsilonLaw, GroupDecay


@pytest.fixture(scope="module")
def marin() -> tuple[RunConfig, ...]:
    return load_family("marin").runs


def test_law_gives_the_reference_peaks(marin: tuple[RunConfig, ...]):
    """Published to four digits; the hero's 0.003291 is the law's value for the announced 390,139 steps, not 390,251."""
    assert [round(run.learning_rate, 4) for run in marin[:4]] == [0.0158, 0.0144, 0.0149, 0.0134]
    hero, law = marin[-1], load_family("marin").learning_rate
    assert hero.learning_rate == pytest.approx(0.003291, abs=6e-7)
    announced = law.peak(tokens=390_139 * hero.tokens_per_step, hidden_dim=6144, tokens_per_step=hero.tokens_per_step)
    assert round(announced, 6) == 0.003291
    assert round(hero.learning_rate / hero.optimizer.matrix_ratio, 6) == 0.000759


def test_laws_resolve_to_the_reference_numbers(marin: tuple[RunConfig, ...]):
    """Epsilon 6.04e-15 for the hero; beta2 at its lower bound from 8.4M tokens a step on."""
    assert marin[-1].optimizer.epsilon == pytest.approx(6.04e-15, rel=1e-3)
    assert [run.optimizer.beta2 for run in marin] == pytest.approx([0.999**32, 0.95, 0.95, 0.95, 0.95])
    law = Beta2Law(base=0.999, reference_tokens=131_072, low=0.95, high=0.9999)
    assert [law.beta2(tokens_per_step=tokens) for tokens in (1024, 131_072, 46_137_344)] == [0.9999, 0.999, 0.95]
    assert EpsilonLaw(per_root_step=9.676e-18).epsilon(steps=390_251) == pytest.approx(6.0446e-15, rel=1e-4)


def test_learning_rate_law_is_capped_where_it_says_so():
    law = load_family("marin").learning_rate
    assert law.peak(tokens=10**6, hidden_dim=64, tokens_per_step=2**20) == 0.05
    assert law.replace(max=None).peak(tokens=10**6, hidden_dim=64, tokens_per_step=2**20) > 0.05


def test_run_config_has_every_number_resolved_and_survives_json(marin: tuple[RunConfig, ...]):
    dumped = marin[-1].optimizer.model_dump(mode="json")
    assert all(not name.endswith("_law") for name in dumped)
    assert (dumped["beta2"], dumped["epsilon"]) == (0.95, marin[-1].optimizer.epsilon)
    read = RunConfig.model_validate(json.loads(marin[-1].model_dump_json()))
    assert read == marin[-1]
    assert hash(read.optimizer) == hash(marin[-1].optimizer)
    assert read.optimizer.group_decay == GroupDecay(
        decays=(("gates", 0.02), ("router", 0.02)), start_step=58_014, anneal=True
    )


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda o: o.update(epsilon=1e-8), "optimizer: epsilon and epsilon_law: give exactly one of the two"),
        (lambda o: o.pop("beta2_law"), "optimizer: beta2 and beta2_law: give exactly one of the two"),
        (lambda o: o["beta2_law"].update(low=0.99995), "optimizer.beta2_law: low 0.99995 exceeds high 0.9999"),
        (lambda o: o["epsilon_law"].update(per_step=1), "unknown key 'optimizer.epsilon_law.per_step'"),
        (lambda o: o.update(name="lion"), "optimizer.name: Input should be 'adamw', 'muon' or 'muonh'"),
        (lambda o: o.update(newton_schulz_steps=3), "newton_schulz_steps 3 with newton_schulz 'quintic'"),
        (lambda o: o.update(weight_decay=0.1), "weight_decay 0.1 with name 'muonh', which keeps the norm"),
        (lambda o: o["group_decay"].update(decays={"experts": 0.1}), "group_decay of 'experts' with name 'muonh'"),
        (lambda o: o["group_decay"].update(decays={"gate": 0.1}), "'gate' is no parameter group; known: embed"),
        (lambda o: o["group_decay"].update(decays={"gates": -0.1}), "decay -0.1 of group 'gates' is negative"),
        (lambda o: o["group_decay"].update(decays={}), "optimizer.group_decay.decays"),
        (lambda o: o.update(warmup_fraction=0.01234), "warmup_fraction 0.01234 has more than four decimals"),
    ],
)
def test_optimizer_refuses_bad_combinations_in_one_line(edit: Any, complaint: str):
    document = copy.deepcopy(tomllib.loads(family_text("marin")))
    edit(document["optimizer"])
    with pytest.raises(ValidationError) as caught:
        LadderConfig.model_validate(document)
    message = explain(caught.value)
    assert complaint in message
    assert "\n" not in message
