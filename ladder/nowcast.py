"""The hero's nowcast: what its own first part makes of the registered forecast, and whether that still applies.

The numbers are `rungwise.analysis.nowcast`. Here runs are gathered, and it is said why there is none. Nothing is
written, least of all the forecast.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import pandas as pd

from rungwise.analysis.events import Change, place_of_renewal
from rungwise.analysis.forecast import Forecast
from rungwise.analysis.nowcast import Nowcast, TooShort, nowcast_forecast, nowcast_history, worth_in_compute
from rungwise.ladder.predict import FamilyRuns, hero_outcome, rung_curves

BEARABLE: Final = (
    "transport", "sender_capacity_factor", "receiver_capacity_factor", "num_ranks", "data_replicas", "tokens_per_rank",
)  # fmt: skip
"""Conditions about how tokens cross ranks: they move drops, and the loss by far less than a band (`events.BREAKS`)."""
GONE: Final = "the registered curve no longer applies"
SIZES: Final = ("hidden_dim", "num_layers", "num_params", "num_active_params")


@dataclass(frozen=True, kw_only=True, eq=False)
class HeroNowcast:
    """A nowcast of the hero beside what is registered. Losses in nats per token."""

    run: str
    metric: str
    forecast: str
    """Hash of the registered forecast, the last of its successors."""
    step: int
    steps: int
    registered: Mapping[str, float]
    made: Nowcast
    worth: Mapping[str, float | None]
    """`worth_in_compute` of the updated loss; empty for a metric other than the forecast's."""

    @property
    def updated(self) -> dict[str, float]:
        return end_of(self.made)

    @property
    def change(self) -> float:
        """Updated minus registered, nats: positive is worse."""
        return self.updated["point"] - self.registered["point"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without how it came about."""
        return {
            "run": self.run,
            "metric": self.metric,
            "forecast": self.forecast,
            "step": self.step,
            "steps": self.steps,
            "progress": self.made.progress,
            "level": self.made.level,
            "registered": dict(self.registered),
            "updated": self.updated,
            "change": self.change,
            "compute_factor": None,
            "compute_factor_low": None,
            "compute_factor_high": None,
            **self.worth,
            "width_ratio": self.made.width_ratio,
            "surprise": self.made.surprise,
        }


def nowcast_hero(runs: FamilyRuns, *, metric: str | None = None) -> HeroNowcast:
    """The hero's final loss by its registered forecast and by the part it has run.

    Args:
        metric: another registered loss; its evaluations or its per-step values are held against its own curve alone.
    Raises:
        ValueError: nothing is registered, the hero has not begun or its part is too short, or it is no longer the run
            that was forecast.
    """
    forecast, hero = runs.registered, runs.hero
    if forecast is None:
        raise ValueError(
            f"no forecast of {runs.family} is registered, so nothing can be updated; run `ladder forecast"
            f" {runs.family} --register` before the hero starts"
        )
    if hero is None or not hero.attempts:
        raise ValueError(f"the hero of {runs.family} has not begun; a nowcast needs its first part")
    name = metric or forecast.metric
    if (reason := no_longer_forecast(forecast, hero.plan, hero.events, name)) is not None:
        raise ValueError(reason)
    return make_nowcast(forecast, rung_curves([hero], name), run=hero.run, steps=hero.plan["steps"], metric=name)


def make_nowcast(forecast: Forecast, observed: pd.DataFrame, *, run: str, steps: int, metric: str) -> HeroNowcast:
    """The nowcast from rows (progress, loss) of one metric.

    Raises:
        ValueError: the forecast has no curve of the metric, or the rows end before it begins.
    """
    try:
        made = nowcast_forecast(forecast, observed, metric=metric)
    except TooShort as error:
        reached = f"has {len(observed)} values of {metric}, the last at {observed['progress'].max():.1%} of the run"
        raise ValueError(
            f"{run} {reached if len(observed) else f'has logged no {metric} yet'}: too short for a nowcast ({error})"
        ) from error
    final = metric == forecast.metric and forecast.low is not None
    ends = {"point": forecast.point, "low": forecast.low, "high": forecast.high} if final else _registered_end(made)
    return HeroNowcast(
        run=run,
        metric=metric,
        forecast=forecast.hash,
        step=round(made.progress * steps),
        steps=steps,
        registered={key: float(value) for key, value in ends.items() if value is not None},
        made=made,
        worth=worth_in_compute(forecast, made.final["loss"]) if final else {},
    )


def nowcast_record(runs: FamilyRuns) -> dict[str, Any]:
    """The object `ladder forecast --nowcast --json` prints: the nowcast, how it moved, and the outcome where it is in.

    Raises:
        ValueError: as `nowcast_hero`.
    """
    current, outcome = nowcast_hero(runs), hero_outcome(runs)
    return {
        **current.to_dict(),
        "history": history_rows(runs, current.metric),
        "outcome": None if outcome is None else asdict(outcome),
    }


def history_rows(runs: FamilyRuns, metric: str) -> list[dict[str, float]]:
    """The nowcasts at 10, 20, 40, 60 and 80 % of the hero, from what it had shown by then: plain values, a row each."""
    assert runs.registered is not None
    assert runs.hero is not None
    made = nowcast_history(runs.registered, rung_curves([runs.hero], metric), metric=metric)
    return [
        {"progress": each.progress, **end_of(each), "width_ratio": each.width_ratio, "surprise": each.surprise}
        for each in made
    ]


def no_longer_forecast(
    forecast: Forecast, plan: Mapping[str, Any], events: Iterable[Mapping[str, Any]], metric: str
) -> str | None:
    """Why a run's curve of `metric` can no longer be held against the registered one; None where it can.

    A replan that registered a successor has made the curve anew: schedules declared up to it no longer count.
    """
    for name in ("steps", "tokens"):
        promised, actual = forecast.target.get(name), plan.get(name)
        if promised and actual and promised != actual:
            return (
                f"the hero's horizon is {actual:,} {name}, the registered forecast's {promised:,}, and no successor is"
                f" registered for it: {GONE}"
            )
    for name in (*SIZES, *forecast.conditions):
        promised = forecast.target.get(name)
        if name not in BEARABLE and promised is not None and plan.get(name, promised) != promised:
            return f"the forecast is for {name} {promised}, the run has {plan[name]}: {GONE}"
    events = sorted(events, key=lambda event: event["step"])
    renewed = place_of_renewal(events, forecast.hash)
    for place, event in enumerate(events):
        change = Change.of(event)
        if change.breaks(metric) and not (change.kind == "schedule" and place <= renewed):
            return f"{metric} is no longer comparable after {change}: {GONE}"
    return None


def end_of(made: Nowcast) -> dict[str, float]:
    """Point, low and high of the final loss, updated."""
    return {"point": made.final["loss"], "low": made.final["low"], "high": made.final["high"]}


def _registered_end(made: Nowcast) -> dict[str, float]:
    end = made.registered_final
    return {"point": end["loss"], "low": end["low"], "high": end["high"]}
