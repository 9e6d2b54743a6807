"""Weights that something other than the optimizer changed, on the norms a healthy run of the tiny family logged."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.alerts import Alert
from rungwise.analysis.divergence import Monitor, replay

GROUPS = ("experts", "head", "router")
AT = 300


@pytest.fixture(scope="module")
def norms() -> pd.DataFrame:
    table: Any = pd.read_csv(Path(__file__).parents[2] / "data" / "tiny_norms.csv")
    return table.assign(**{"train/loss": 3.0 - 0.001 * table["step"]})


def zeroed(table: pd.DataFrame, share: float, *, group: str = "experts", at: int = AT) -> pd.DataFrame:
    """The run had a share of one group's squared norm been set to zero before step `at`."""
    name = f"param_norm/{group}"
    return table.assign(**{name: table[name] * np.where(table["step"] >= at, np.sqrt(1.0 - share), 1.0)})


def found(alerts: list[Alert]) -> list[tuple[str, str, int, str]]:
    return [
        (each.metric, each.severity, each.step, str(each.carrier)) for each in alerts if each.rule == "weights_altered"
    ]


def test_healthy_norms_are_quiet(norms: pd.DataFrame):
    assert replay(norms) == []


def test_zeroed_expert_is_found_at_its_step(norms: pd.DataFrame):
    """One of 32 experts: its down-projection is a third of it, so 1/96 of the group's squared norm."""
    (alert,) = replay(zeroed(norms, 1 / 96))
    assert found([alert]) == [("param_norm/experts", "warning", AT, "experts")]
    assert "spreads from how updates have lain to these weights" in alert.explanation
    assert alert.state == "recovering"


@pytest.mark.parametrize(("group", "share"), [("experts", 0.05), ("head", 0.2), ("router", 0.1)])
def test_change_larger_than_the_update_is_critical(norms: pd.DataFrame, group: str, share: float):
    alerts = replay(zeroed(norms, share, group=group))
    assert found(alerts) == [(f"param_norm/{group}", "critical", AT, group)]
    assert "no update of that size can do this" in alerts[0].explanation


def test_run_without_groups_is_judged_by_its_whole(norms: pd.DataFrame):
    lost = zeroed(norms, 0.05)
    total = {"train/param_norm": lost["param_norm/experts"], "train/update_norm": lost["update_norm/experts"]}
    table = lost[["step", "train/loss"]].assign(**total)
    assert found(replay(table)) == [("train/param_norm", "critical", AT, "None")]


def restarted(norms: pd.DataFrame, *, share: float) -> Monitor:
    """Killed at `AT` and resumed from a checkpoint 40 steps before, whole or with a share of the experts lost."""
    monitor = Monitor()
    first, second = norms[norms["step"] <= AT], zeroed(norms, share, at=AT - 40)
    monitor.extend(first.assign(attempt=1))
    monitor.extend(second[second["step"] > AT - 40].assign(attempt=2))
    return monitor


def test_restart_is_held_against_the_checkpoint_it_came_from(norms: pd.DataFrame):
    assert restarted(norms, share=0.0).alerts == []
    assert found(restarted(norms, share=0.05).alerts) == [("param_norm/experts", "critical", AT - 39, "experts")]


def test_declared_restart_may_bring_other_weights_unless_said_otherwise(norms: pd.DataFrame):
    event = {"step": AT, "kind": "restart"}
    assert replay(zeroed(norms, 0.05), events=[event]) == []
    alerts = replay(zeroed(norms, 0.05), events=[event | {"expected": {"param_norm/*": "none"}}])
    assert found(alerts) == [("param_norm/experts", "critical", AT, "experts")]
    assert found(replay(zeroed(norms, 0.05), events=[event | {"kind": "mixture"}])) != []


@pytest.mark.parametrize("mark", [{"train/skipped": 1.0}, {"train/counted_tokens": 0.0}])
def test_step_that_was_left_out_moved_nothing(norms: pd.DataFrame, mark: dict[str, float]):
    """Its row holds the norm its update would have led to; the next update starts from the weights before."""
    before, after = norms[norms["step"] < AT], norms[norms["step"] >= AT]
    left_out = after.iloc[:1].assign(**{"param_norm/experts": 1.05 * after.iloc[:1]["param_norm/experts"]})
    table = pd.concat([before, left_out, after.assign(step=after["step"] + 1)], ignore_index=True)
    (name, value), at = next(iter(mark.items())), table["step"] == AT
    assert found(replay(table.assign(**{name: np.where(at, value, 1.0 - value)}))) == []
    assert found(replay(table))[0] == ("param_norm/experts", "critical", AT, "experts")


def test_rows_apart_are_not_compared(norms: pd.DataFrame):
    assert found(replay(zeroed(norms, 0.05).iloc[1::10])) == []
