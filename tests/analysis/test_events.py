"""Declared changes: what they move, what they end, whether they did what was said; and changes nobody declared."""

import math

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.alerts import OPEN_STATES, Alert
from rungwise.analysis.curves import forecast_curve
from rungwise.analysis.divergence import Monitor, replay
from rungwise.analysis.events import Change, Effect, parse_effect, preceding
from rungwise.analysis.forecast import Forecast, forecast_final
from rungwise.analysis.points import ladder_points


def noisy(values: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    return values * np.exp(share * np.random.default_rng(seed).standard_normal(len(values)))


def run(steps: int = 600, /, **columns: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"step": np.arange(steps), "train/loss": noisy(np.full(steps, 2.5), 0.004, 9), **columns})


def rules(alerts: list[Alert]) -> set[str]:
    return {alert.rule for alert in alerts}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("up", Effect(direction="up")),
        ("down 0.03", Effect(direction="down", size=0.03)),
        ("up by 14%", Effect(direction="up", size=0.14, relative=True)),
        ("up x3", Effect(direction="up", size=2.0, relative=True)),
        ("down x2", Effect(direction="down", size=0.5, relative=True)),
        ("slope up", Effect(direction="up", slope=True)),
        ("none", Effect(direction="none")),
        (-0.006, Effect(direction="down", size=0.006)),
        ({"direction": "up", "size": 0.2, "relative": True}, Effect(direction="up", size=0.2, relative=True)),
    ],
)
def test_effects_are_read_as_people_write_them(said, meant: Effect):
    assert parse_effect(said) == meant


@pytest.mark.parametrize("said", ["sideways", "up a lot", {"direction": "up", "by": 3}, True, None])
def test_effects_that_say_nothing_are_refused(said):
    with pytest.raises(ValueError, match="is none of"):
        parse_effect(said)


def test_change_keeps_what_it_cannot_read_as_words():
    change = Change.of({"step": 3, "kind": "mixture", "expected": {"train/loss": "a bit up"}, "note": "phase two"})
    assert change.text == "train/loss a bit up; phase two"
    assert change.moves("train/loss")
    assert not change.moves("eval/loss")


def test_declared_effects_count_before_those_of_the_kind():
    change = Change.of({"step": 0, "kind": "transport", "expected": {"train/*": "none", "eval/loss": "up 0.1"}})
    assert not change.moves("train/grad_norm")
    assert change.moves("eval/loss")
    assert change.moves("moe/drop_fraction")
    assert change.breaks("moe/sender_drop_fraction")
    assert not change.breaks("train/loss")
    assert not Change.of({"step": 0, "kind": "transport", "planned": True}).breaks("moe/drop_fraction")


def test_preceding_change_is_the_last_one_near_enough():
    changes = [
        Change(kind=kind, step=step, effects={}) for kind, step in (("mixture", 10), ("precision", 50), ("note", 90))
    ]
    found = preceding(changes, 100, within=60)
    assert found is not None
    assert found.step == 50
    assert preceding(changes, 100, within=20) is None


@pytest.fixture
def announced() -> pd.DataFrame:
    """Steps 0 to 49 at 2.50, 50 to 89 at 2.75 (2.80 first), 3.05 from 90 on; a fixed evaluation at 2.60, then 2.75."""
    rng = np.random.default_rng(0)
    loss = np.r_[np.full(50, 2.50), 2.80, np.full(39, 2.75), np.full(5, 3.05)]
    loss[:90] += 0.01 * rng.standard_normal(90)
    table = pd.DataFrame({"step": np.arange(95), "train/loss": loss, "eval/loss": np.nan})
    table.loc[[10, 20, 30, 40], "eval/loss"] = 2.60
    table.loc[[60, 65, 70, 75, 80, 85], "eval/loss"] = 2.75
    return table


EVENT = {"step": 50, "kind": "mixture"}


def training(alerts: list[Alert]) -> list[int]:
    return [alert.step for alert in alerts if alert.metric == "train/loss" and alert.family == "run_change"]


def test_announced_mixture_makes_a_new_baseline_and_evaluation_is_judged_on(announced: pd.DataFrame):
    alerts = replay(announced, events=[EVENT])
    assert min(training(alerts)) == 90
    evaluation = next(alert for alert in alerts if alert.metric == "eval/loss")
    assert evaluation.observed - (evaluation.expected or 0.0) == pytest.approx(0.15)
    assert evaluation.event == "the declared mixture change at step 50"


def test_the_same_unannounced_alerts_at_once(announced: pd.DataFrame):
    alerts = replay(announced)
    assert min(training(alerts)) == 50
    assert all(alert.event is None for alert in alerts)


def test_announced_fall_is_quiet_and_nan_within_the_grace_is_not(announced: pd.DataFrame):
    fallen = announced[announced["step"] < 90].drop(columns="eval/loss")
    fallen.loc[fallen["step"] >= 50, "train/loss"] -= 0.65
    assert replay(fallen, events=[EVENT]) == []
    broken = announced.copy()
    broken.loc[55, "train/loss"] = math.nan
    assert ("nonfinite", 55) in [(alert.rule, alert.step) for alert in replay(broken, events=[EVENT])]


def test_undeclared_step_of_a_setting_is_found_within_ten_rows():
    step = np.arange(600)
    rate = 1e-3 * (1.0 - step / 700)
    norms = {f"param_norm/{name}": 20.0 + 0.01 * step for name in ("experts", "head")}
    assert replay(run(**{"train/learning_rate": rate}, **norms)) == []
    (alert,) = replay(run(**{"train/learning_rate": np.where(step >= 300, 3.0 * rate, rate)}, **norms))
    assert (alert.rule, alert.metric, alert.severity) == ("undeclared_change", "train/learning_rate", "warning")
    assert 300 <= alert.step <= 310
    assert alert.observed / (alert.expected or 1.0) == pytest.approx(3.0, rel=0.05)
    zeroed = norms | {"param_norm/experts": np.where(step >= 300, 0.9, 1.0) * norms["param_norm/experts"]}
    (alert,) = replay(run(**{"train/learning_rate": rate}, **zeroed))
    assert (alert.rule, alert.metric) == ("undeclared_change", "param_norm/experts")


def test_the_same_step_declared_is_quiet():
    step = np.arange(600)
    rate = np.where(step >= 300, 3e-3, 1e-3) * (1.0 - step / 700)
    event = {"step": 300, "kind": "schedule", "expected": {"train/learning_rate": "up x3"}}
    assert replay(run(**{"train/learning_rate": rate}), events=[event]) == []


def test_step_of_drops_that_comes_back_is_no_change_of_setting():
    drops = noisy(np.full(600, 0.05), 0.1)
    drops[300:320] *= 3.0
    assert "undeclared_change" not in rules(replay(run(**{"moe/drop_fraction": drops})))
    drops[320:] *= 3.0
    (alert,) = replay(run(**{"moe/drop_fraction": drops}))
    assert (alert.rule, alert.metric) == ("undeclared_change", "moe/drop_fraction")
    assert 340 <= alert.step <= 350


@pytest.mark.parametrize(
    ("expected", "held"),
    [
        ({"moe/drop_fraction": "down"}, True),
        ({"moe/drop_fraction": "down x5"}, True),
        ({"moe/drop_fraction": "up"}, False),
        ({"moe/drop_fraction": "down 20%"}, False),
        ({"moe/drop_fraction": "none"}, False),
        ({"train/loss": "none"}, True),
        ({"train/loss": "down 0.05"}, False),
        ({"eval/loss": "down 0.1"}, False),
    ],
)
def test_effect_is_held_against_what_was_declared(expected: dict[str, str], held: bool):
    step = np.arange(600)
    drops = noisy(np.where(step >= 300, 0.01, 0.05), 0.1)
    evaluated = np.where(step % 50 == 0, 2.6, np.nan)
    event = {"step": 300, "kind": "transport", "expected": expected}
    alerts = replay(run(**{"moe/drop_fraction": drops, "eval/loss": evaluated}), events=[event])
    if held:
        assert alerts == []
    else:
        (alert,) = [alert for alert in alerts if alert.rule == "unexpected_effect"]
        assert (alert.since, alert.metric) == (300, next(iter(expected)))
        assert alert.step <= 350


@pytest.fixture
def registered(ladder, hero, curves) -> Forecast:
    runs, plan = ladder(4), hero(4).plan
    forecast = forecast_final(ladder_points(runs), plan)
    return forecast.with_curve(forecast_curve(curves(runs, "eval/loss"), plan, final=forecast))


def test_comparisons_that_no_longer_hold_are_marked_and_not_made(hero, registered: Forecast):
    table = hero(4).trajectory.copy()
    table.loc[table["step"] > 600, ["train/loss", "eval/loss"]] += 1.0
    (miss,) = [alert for alert in replay(table, registered) if alert.rule == "forecast_miss"]
    assert miss.state in OPEN_STATES
    assert miss.updated > 600
    monitor = Monitor(registered, events=[{"step": 600, "kind": "context"}])
    monitor.extend(table)
    (miss,) = [alert for alert in monitor.alerts if alert.rule == "forecast_miss"]
    assert (miss.state, miss.updated) == ("resolved", 600)
    assert miss.explanation.endswith("no longer comparable after the declared context change at step 600")
    assert "eval/loss is no longer compared with forecast and rungs after the declared context change at step 600" in (
        monitor.marked
    )
    planned = Monitor(registered, events=[{"step": 600, "kind": "context", "planned": True}])
    planned.extend(table)
    (miss,) = [alert for alert in planned.alerts if alert.rule == "forecast_miss"]
    assert miss.updated > 600
    assert planned.marked == []


def test_alert_names_the_event_before_it_its_carrier_and_how_the_ladder_fared():
    def spiked(at: int, **columns: np.ndarray) -> pd.DataFrame:
        table = run(600, **columns)
        table["tokens"] = 1000.0 * (table["step"] + 1)
        table.loc[at : at + 8, "train/loss"] += 0.5
        return table

    norm = np.where(np.arange(600) >= 300, 4.0, 1.0)
    hero = spiked(310, **{"grad_norm/head": noisy(norm, 0.05), "grad_norm/embed": noisy(np.full(600, 1.0), 0.05)})
    rungs = pd.concat(
        [spiked(200).assign(run="small"), run(600, tokens=1000.0 * np.arange(1, 601)).assign(run="large")]
    )
    (alert,) = [
        alert
        for alert in replay(hero, peers=rungs, events=[{"step": 270, "kind": "precision", "note": "fp8 head"}])
        if alert.rule == "loss_spike"
    ]
    assert alert.event == "the declared precision change at step 270"
    assert "it began 40 steps after" in alert.explanation
    assert "fp8 head" in alert.explanation
    assert alert.carrier == "head"
    assert alert.precedent is not None
    assert "small had it at 33% of its run, over by step" in alert.precedent
    assert "finished at loss 2.4960" in alert.precedent
    (lone,) = [alert for alert in replay(hero, peers=rungs.loc[rungs["run"] == "large"]) if alert.rule == "loss_spike"]
    assert lone.precedent == "none of 1 rungs had this in its own past"


def forgetting(evaluations: int = 60, *, at: int = 30, rise: float = 0.08) -> pd.DataFrame:
    """Training goes on with another text from evaluation `at` on: the loss on the old one rises by `rise`, in all of 12
    evaluations, and stays there."""
    rng = np.random.default_rng(3)
    index = np.arange(evaluations)
    lost = rise * (1.0 - np.exp(-np.maximum(index - at, 0) / 4.0))
    old = 2.8 - 0.1 * np.minimum(index, at) / at + lost + 0.002 * rng.standard_normal(evaluations)
    return pd.DataFrame({"step": 10 * index, "eval/loss": old + 0.2 * lost, "eval/books/loss": old})


@pytest.mark.parametrize("metric", ["eval/loss", "eval/*", "eval/books/loss"])
def test_declared_forgetting_moves_the_best_that_evaluation_is_held_against(metric: str):
    change = {"step": 300, "kind": "mixture"}
    undeclared = replay(forgetting(), events=[change])
    assert "eval_drift" in rules(undeclared)
    assert "eval_drift" not in rules(replay(forgetting(), events=[change | {"expected": {metric: "up"}}]))


def test_rise_after_a_declared_change_has_settled_is_found_again():
    change = {"step": 300, "kind": "mixture", "expected": {"eval/*": "up"}}
    table = forgetting(90)
    late = np.arange(90) >= 60
    table.loc[late, ["eval/loss", "eval/books/loss"]] += 0.12
    found = [alert.step for alert in replay(table, events=[change]) if alert.rule == "eval_drift"]
    assert found
    assert 600 <= found[0] <= 640


def test_effect_on_a_subset_is_one_on_the_mean():
    change = Change.of({"step": 3, "kind": "mixture", "expected": {"eval/books/loss": "up 0.03"}})
    assert change.moves("eval/loss")
    assert change.allows_rise("eval/loss")
    assert not change.moves("eval/code/loss")
    both = {"eval/books/loss": "up", "eval/code/loss": "down"}
    assert Change.of({"step": 3, "kind": "mixture", "expected": both}).effect("eval/loss") == Effect(direction="either")
    assert not Change.of({"step": 3, "kind": "mixture", "expected": {"eval/books/loss": "none"}}).moves("eval/loss")
