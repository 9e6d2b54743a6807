"""Published incidents as series, judged as if live: what the watch says, when, and what a team found in the end.

The series are made from published figures: levels, steps and dates are the team's, the noise around them is ours, of
the size single published rows show. Sources: the incidents of marin-community/marin by their issues and pull requests.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from rungwise.analysis.alerts import Alert
from rungwise.analysis.divergence import Monitor

SWITCH: Final = 81_716
"""Step of the change of transport."""
VOCAB: Final = 128_256


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One series and what is right to say of it."""

    name: str
    table: pd.DataFrame
    verdict: str
    """The team's, in short."""
    rules: frozenset[str] = frozenset()
    """Rules of which one must speak; empty where nothing may."""
    between: tuple[int, int] = (0, 0)
    """Steps in which the first of them must."""
    allowed: frozenset[str] = frozenset()
    """Further rules that may speak."""
    severities: frozenset[str] = frozenset(("info", "warning", "critical"))
    events: tuple[Mapping[str, Any], ...] = ()
    monitor: Mapping[str, Any] = field(default_factory=dict)


def _noisy(values: np.ndarray, share: float, seed: int) -> np.ndarray:
    return values * np.exp(share * np.random.default_rng(seed).standard_normal(values.size))


def gradient_norm_rise(*, every: int = 25, noise: float = 0.05, end: int = 108_000, slope: float = 2.0) -> pd.DataFrame:
    """0.28 at step 58,000, 0.59 at 100,000, slope times `slope` at the switch; the head carries 95 % of the square.

    With `slope` 1 the same without a change: the quiet control.
    """
    step = np.arange(58_000, end, every)
    rate = 0.31 / ((SWITCH - 58_000) + 2.0 * (100_000 - SWITCH))
    norm = 0.28 + rate * (step - 58_000) + (slope - 1.0) * rate * np.maximum(step - SWITCH, 0)
    # The others stay where they are: sqrt(0.05) of 0.59 in all.
    others = math.sqrt(0.05) * 0.59
    head = np.sqrt(norm**2 - others**2)
    table = {"step": step, "train/grad_norm": norm, "grad_norm/head": head}
    table |= {
        f"grad_norm/{name}": np.full(step.size, others / math.sqrt(3)) for name in ("experts", "attention", "embed")
    }
    columns = {name: values if name == "step" else _noisy(values, noise, 1) for name, values in table.items()}
    loss = 1.30 * (step / 58_000) ** -0.1
    return pd.DataFrame(columns | {"train/loss": _noisy(loss, 0.012, 2)})


def mixture_change(*, every: int = 5) -> pd.DataFrame:
    """Train loss 1.2024 → 1.2330 at step 108,000, 1.2172 at 114,556; macro evaluation goes on falling."""
    step = np.arange(100_000, 114_556, every)
    before = 1.2024 + 2.0e-6 * (108_000 - step)
    after = 1.2330 - (1.2330 - 1.2172) * (step - 108_000) / 6556
    loss = _noisy(np.where(step < 108_000, before, after), 0.012, 3)
    macro = {101_999: 2.221249, 104_999: 2.206028, 107_999: 2.21507, 110_999: 2.213199, 113_999: 2.211361}
    evaluation = np.full(step.size, np.nan)
    for at, value in macro.items():
        evaluation[np.searchsorted(step, at)] = value
    norm = _noisy(np.full(step.size, 0.61), 0.13, 4)
    return pd.DataFrame({"step": step, "train/loss": loss, "eval/loss": evaluation, "train/grad_norm": norm})


def transport_swap(*, hang: bool) -> pd.DataFrame:
    """Pooled to ragged transport at step 54,000: loss −0.006, drops 3.4e-2 → 1e-4, MFU 20.5 → 23.3 %; a hang."""
    step = np.arange(53_000, 54_071 if hang else 55_500)
    new = step >= 54_000
    columns = {
        "train/loss": _noisy(np.where(new, 1.324, 1.330), 0.012, 5),
        "moe/drop_fraction": _noisy(np.where(new, 1e-4, 3.4e-2), 0.1, 6),
        "perf/mfu": _noisy(np.where(new, 0.233, 0.205), 0.01, 7),
        "perf/tokens_per_second": _noisy(np.where(new, 2.746e6, 2.494e6), 0.01, 7),
        "train/grad_norm": _noisy(np.full(step.size, 0.27), 0.13, 8),
    }
    return pd.DataFrame({"step": step, "time": 1.7e9 + np.cumsum(np.where(new, 16.8, 18.5)), **columns})


def faster_kernels() -> pd.DataFrame:
    """Loss −3.8e-5 in the mean of 194 pairs and throughput +2.6 % at step 108,778, undeclared."""
    step = np.arange(108_000, 110_000)
    new = step >= 108_778
    loss = _noisy(np.full(step.size, 1.2325), 0.012, 9) - np.where(new, 3.8e-5, 0.0)
    rate = _noisy(np.where(new, 2.783e6, 2.712e6), 0.01, 10)
    return pd.DataFrame({"step": step, "train/loss": loss, "perf/tokens_per_second": rate})


def noisy_subset() -> pd.DataFrame:
    """Macro evaluation every 3,000 steps; one of 16 subsets at 2.14 / 1.96 / 2.11 moves it, the others fall."""
    step = np.arange(59_999, 156_000, 3000)
    ptb = 2.19 + 0.06 * np.random.default_rng(11).standard_normal(step.size)
    for at, value in {101_999: 2.1430, 104_999: 1.9609, 107_999: 2.1094}.items():
        ptb[np.searchsorted(step, at)] = value
    level = 2.245 * (step / 60_000) ** -0.024
    rng = np.random.default_rng(12)
    others = {f"eval/s{k:02d}/loss": level * np.exp(0.0008 * rng.standard_normal(step.size)) for k in range(15)}
    macro = (sum(others.values()) + ptb) / 16
    return pd.DataFrame({"step": step, "eval/loss": macro, "eval/ptb/loss": ptb, **others})


def restarts() -> pd.DataFrame:
    """Restarts from checkpoints at 164, 2,359 and 11,252, each repeating up to 150 steps after 20 minutes or less."""
    parts, start, clock = [], 0, 1.7e9
    for attempt, end in enumerate((164, 2359, 11_252, 12_000), 1):
        step = np.arange(start, end, 1 if end < 1000 else 4)
        loss = 2.2 + 9.0 * np.exp(-step / 300) + 2.0 * (step + 10.0) ** -0.3
        loss = loss * np.exp(0.01 * np.random.default_rng(13).standard_normal(12_001)[step])
        parts.append(
            pd.DataFrame(
                {"step": step, "attempt": attempt, "time": clock + 4.0 * np.arange(step.size), "train/loss": loss}
            )
        )
        clock, start = clock + 4.0 * step.size + 500.0, max(end - 150, 0)
    return pd.concat(parts, ignore_index=True)


def stopped_rung() -> pd.DataFrame:
    """A rung of 20,072 steps whose last record is at 16,063."""
    step = np.arange(12_000, 16_064, 4)
    loss = _noisy(1.9 * (step / 12_000) ** -0.05, 0.01, 14)
    return pd.DataFrame({"step": step, "time": 1.7e9 + 20.0 * np.arange(step.size), "train/loss": loss})


def collapsed_head() -> pd.DataFrame:
    """The head's parameter norm falls to nothing in one update at step 24,681; the loss is pinned at 11.761 = ln V."""
    step = np.arange(23_000, 26_000)
    broken = step >= 24_681
    loss = np.where(broken, _noisy(np.full(step.size, 11.761), 1e-3, 15), _noisy(np.full(step.size, 2.9), 0.012, 15))
    head = np.where(broken, 0.02, 93.0)
    return pd.DataFrame({"step": step, "train/loss": loss, "param_norm/head": head, "train/learning_rate": 9.462e-4})


def not_finite(at: int, first: float = 9.0) -> pd.DataFrame:
    """Non-finite loss from a step on."""
    step = np.arange(0, at + 20)
    loss = 3.5 + (first - 3.5) * np.exp(-step / 100)
    return pd.DataFrame({"step": step, "train/loss": np.where(step >= at, np.nan, _noisy(loss, 0.01, 16))})


def growing_norm() -> pd.DataFrame:
    """Gradient norm that grows past 4 with the horizon: a true instability, in which large batches blew up."""
    step = np.arange(0, 15_000, 5)
    norm = 0.45 + 3.0 * np.exp(-step / 200) + 4.0 * np.maximum((step - 6000) / 9000, 0) ** 2
    loss = 2.8 + 2.5 * (step + 20.0) ** -0.3
    return pd.DataFrame({"step": step, "train/grad_norm": _noisy(norm, 0.13, 17), "train/loss": _noisy(loss, 0.01, 18)})


def context_extension() -> pd.DataFrame:
    """Context ×16 at step 39,000: gradient spike in the first 10 steps, none of the loss, drops 7 % → 40 %."""
    step = np.arange(38_000, 40_500)
    new = step >= 39_000
    norm = _noisy(np.full(step.size, 0.3), 0.13, 19) * np.where(new & (step < 39_010), 8.0, 1.0)
    drops = _noisy(np.where(new, 0.40, 0.07), 0.1, 20)
    loss = _noisy(np.where(new, 1.36, 1.42), 0.012, 21)
    return pd.DataFrame({"step": step, "train/loss": loss, "train/grad_norm": norm, "moe/drop_fraction": drops})


def norm_spikes() -> pd.DataFrame:
    """Gradient norms of 0.5 with spikes to 20 that take ten steps to settle."""
    step = np.arange(0, 2000)
    norm = _noisy(np.full(step.size, 0.5), 0.13, 22)
    for at in (900, 1300, 1500):
        norm[at : at + 10] = 20.0 * np.exp(-np.arange(10) / 4.0)
    loss = 3.0 + 2.0 * (step + 20.0) ** -0.3
    return pd.DataFrame({"step": step, "train/grad_norm": norm, "train/loss": _noisy(loss, 0.01, 23)})


def lasting_spikes() -> pd.DataFrame:
    """Update norm doubles, then the loss goes from 1.96 to 2.02 and back to 1.975 only, 5 % of the steps spiking."""
    step = np.arange(76_000, 80_000)
    rng = np.random.default_rng(24)
    loss = _noisy(np.full(step.size, 1.96), 0.008, 27)
    bad = step >= 78_000
    loss += np.where(bad, 0.015 + 0.045 * np.exp(-(step - 78_000) / 120.0), 0.0)
    loss += np.where(bad & (rng.random(step.size) < 0.05), 0.1 * rng.random(step.size), 0.0)
    update = _noisy(np.where(step >= 77_950, 0.24, 0.12), 0.05, 26)
    return pd.DataFrame({"step": step, "train/loss": loss, "train/update_norm": update})


def incidents() -> list[Incident]:
    """Every published incident with a verdict, and the controls that must stay quiet."""
    transport = {"step": SWITCH, "kind": "transport", "expected": {"moe/drop_fraction": "down"}}
    rise = frozenset(("grad_norm_rise",))
    mild = frozenset(("info", "warning"))
    news = frozenset(("nonfinite",))
    return [
        Incident(
            name="gradient norm 0.28 → 0.59, declared", table=gradient_norm_rise(), verdict="benign, of the transport",
            rules=rise, between=(SWITCH, SWITCH + 15_000), severities=frozenset(("info",)), events=(transport,),
        ),
        Incident(
            name="the same, undeclared", table=gradient_norm_rise(), verdict="benign", rules=rise,
            between=(SWITCH, SWITCH + 15_000), severities=mild,
        ),
        Incident(name="the same without a change", table=gradient_norm_rise(slope=1.0), verdict="control"),
        Incident(
            name="mixture change at 108,000, declared", table=mixture_change(), verdict="benign: not comparable",
            events=({"step": 108_000, "kind": "mixture"},),
        ),
        Incident(
            name="mixture change, undeclared", table=mixture_change(), verdict="benign",
            rules=frozenset(("loss_level",)), between=(108_000, 110_000), severities=mild,
            allowed=frozenset(("loss_spike", "eval_gap", "loss_drift")),
        ),
        Incident(
            name="transport swap at 54,000, declared", table=transport_swap(hang=False), verdict="benign",
            events=({"step": 54_000, "kind": "transport", "expected": {
                "train/loss": -0.006, "moe/drop_fraction": "down", "perf/tokens_per_second": "up 10%"}},),
        ),
        Incident(
            name="transport swap, undeclared", table=transport_swap(hang=False), verdict="benign",
            rules=frozenset(("undeclared_change",)), between=(54_000, 54_100), severities=mild,
        ),
        Incident(
            name="hang at 54,071", table=transport_swap(hang=True), verdict="software hang",
            rules=frozenset(("silence",)), between=(54_070, 54_070), events=({"step": 54_000, "kind": "transport"},),
        ),
        Incident(name="faster kernels at 108,778", table=faster_kernels(), verdict="benign"),
        Incident(name="macro moved by one noisy subset", table=noisy_subset(), verdict="false alarm"),
        Incident(name="restarts of the first days", table=restarts(), verdict="loss-neutral"),
        Incident(
            name="rung stopped at 80 %", table=stopped_rung(), verdict="missing endpoint",
            rules=frozenset(("silence",)), between=(16_060, 16_063),
        ),
        Incident(
            name="head collapsed, pinned at ln V", table=collapsed_head(), verdict="divergence, a bug",
            rules=frozenset(("undeclared_change", "loss_spike", "not_learning")), between=(24_681, 24_690),
            allowed=frozenset(("loss_level", "loss_drift")), monitor={"vocab_size": VOCAB},
        ),
        *(
            Incident(name=f"non-finite at step {at}", table=not_finite(at), verdict="divergence", rules=news,
                     between=(at, at))
            for at in (93, 114, 314, 952)
        ),
        Incident(
            name="non-finite by step 2", table=not_finite(2, 11.8062), verdict="a bug", rules=news, between=(2, 2),
        ),
        Incident(
            name="gradient norm grows past 4", table=growing_norm(), verdict="true instability",
            rules=rise | {"grad_norm", "undeclared_change"}, between=(6000, 11_000), severities=mild, allowed=rise,
        ),
        Incident(
            name="context ×16, declared", table=context_extension(), verdict="benign",
            events=({"step": 39_000, "kind": "context"},),
        ),
        Incident(
            name="gradient spikes to 20", table=norm_spikes(), verdict="instability", rules=frozenset(("grad_norm",)),
            between=(900, 910), severities=mild,
        ),
        Incident(
            name="loss 1.96 → 2.02 → 1.975, update norm doubled", table=lasting_spikes(), verdict="true instability",
            rules=frozenset(("undeclared_change", "loss_level", "loss_spike")), between=(77_950, 78_060),
            severities=mild, allowed=frozenset(("loss_drift", "loss_level", "loss_spike")),
        ),
    ]  # fmt: skip


def judge(incident: Incident) -> list[Alert]:
    """Every alert of a live watch over the series; where records have times, also an hour after the last one."""
    monitor = Monitor(events=incident.events, **incident.monitor)
    monitor.extend(incident.table)
    if "time" in incident.table:
        monitor.tick(float(incident.table["time"].iloc[-1]) + 3600.0, ended="silence" not in incident.rules)
    return monitor.alerts


def misjudged(incident: Incident, alerts: Iterable[Alert]) -> str | None:
    """What is wrong with the alerts of an incident; None where they are right."""
    alerts = list(alerts)
    wanted = [alert for alert in alerts if alert.rule in incident.rules]
    if incident.rules and not wanted:
        return f"none of {', '.join(sorted(incident.rules))} spoke"
    if other := [alert.rule for alert in alerts if alert.rule not in incident.rules | incident.allowed]:
        return f"{', '.join(sorted(set(other)))} spoke"
    if wanted and not incident.between[0] <= wanted[0].step <= incident.between[1]:
        return f"{wanted[0].rule} spoke at step {wanted[0].step}"
    if wrong := {alert.severity for alert in alerts} - incident.severities:
        return f"severity {', '.join(sorted(wrong))}"
    return None


def tables(chosen: Iterable[Incident] | None = None) -> list[tuple[str, pd.DataFrame, str]]:
    """The page's table: title, rows, note; of every incident, or those chosen."""
    rows = []
    for incident in incidents() if chosen is None else chosen:
        alerts = judge(incident)
        said = ", ".join(f"{alert.rule} at {alert.step:,} ({alert.severity})" for alert in alerts[:2])
        more = f" and {len(alerts) - 2} more" if len(alerts) > 2 else ""
        rows.append(
            {"incident": incident.name, "the team's verdict": incident.verdict,
             "the watch": f"{said}{more}" or "nothing",
             "carrier": next((alert.carrier for alert in alerts if alert.carrier), None),
             "right": "yes" if misjudged(incident, alerts) is None else "no"}
        )  # fmt: skip
    note = (
        "Series made from published figures (marin-community/marin: #9149, #9162, #8870, #9183, #8506, #8073, #8672, "
        "#8077, #8435, #9615 and the 32B retrospective); levels and steps are theirs, the noise is ours. Right: the "
        "rule that had to speak did within its limit, with a severity it may have, and no other did."
    )
    return [("Published incidents", pd.DataFrame(rows), note)]
