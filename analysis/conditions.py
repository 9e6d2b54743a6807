"""What a forecast takes for granted: each setting known of rungs and hero, and whether the hero's lies outside.

Sizes and their costs are what the law extrapolates over; every other setting, steps and batch included, is a condition.
Which broken condition matters is said by `forecast.py` (before training) and `watch` (while it lasts).
"""

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from rungwise.analysis.rows import shared_counts

MAX_RATIO_SPREAD: Final = 0.10
"""Tokens per active parameter may differ by this much before compute alone says nothing about the loss."""

MAX_EPOCH_SPREAD: Final = 0.02
"""Passes over a source may differ by this share between a rung and the hero: phases begin at whole steps."""

MAX_RECIPE_EXCESS: Final = 0.005
"""Loss a rung's recipe may cost against its swept optimum: as much as a rung may lie off its law (intervals.py)."""
STANDARD: Final[Mapping[str, tuple[str, ...]]] = {
    "tokens per active parameter": ("tokens_per_active_param",),
    "steps": ("steps",),
    "batch tokens": ("tokens_per_step", "batch_tokens"),
    "optimizer": ("optimizer",),
    "learning-rate law": ("learning_rate_law", "lr_schedule", "schedule"),
    "context": ("seq_len",),
    "mixture": ("mixture", "source_fraction"),
    "epochs per source": ("epochs",),
    "transport": ("transport",),
    "capacity": ("capacity",),
    "precision": ("precision",),
    "horizon": ("tokens",),
    "dropless evaluation": ("dropless",),
}
"""What a forecast should state of rungs and hero, and the column names that state it."""

_IDENTITY: Final = "run rung seed name role config_hash"
_OUTCOME: Final = (
    "loss metric loss_rule loss_correction loss_error state progress decay_complete recipe_excess recipe_at_edge"
)
_SHAPE: Final = "hidden_dim num_layers num_heads num_kv_heads head_dim expert_dim latent_dim"
_SIZE: Final = (
    "num_params num_params_with_bias num_params_without_embedding num_active_params num_active_params_with_gates "
    "num_active_params_everything"
)
_COST: Final = (
    "flops flops_with_head flops_causal flops_causal_with_head flops_everything flops_everything_causal data_replicas"
)
_NOT_CONDITIONS: Final = frozenset(f"{_IDENTITY} {_OUTCOME} {_SHAPE} {_SIZE} {_COST}".split())


def compare_conditions(table: pd.DataFrame, target: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each setting known on both sides: the rungs' range or values, the hero's value, whether it lies outside."""
    rungs = {str(key): table[key].dropna().tolist() for key in table.columns if key not in _NOT_CONDITIONS}
    hero = {key: target[key] for key in rungs if target.get(key) is not None}
    counts = shared_counts(table.columns, target)
    if counts and "tokens" in table.columns and target.get("tokens"):
        size = counts[0]
        known = table[[size, "tokens"]].dropna().astype(float)
        rungs["tokens_per_active_param"] = (known["tokens"] / known[size]).tolist()
        hero["tokens_per_active_param"] = float(target["tokens"]) / float(target[size])
    judges = {"epochs": _epochs_condition}
    return {key: judges.get(key, _condition)(rungs[key], hero[key]) for key in sorted(hero) if rungs[key]}


def parse_epochs(said: str) -> dict[str, float]:
    """Passes over each source from a run's plan.

    >>> parse_epochs("books 0.42, web 1.3")
    {'books': 0.42, 'web': 1.3}
    """
    pairs = (part.rpartition(" ") for part in said.split(", "))
    return {name: float(value) for name, _, value in pairs}


def _epochs_condition(values: list[Any], hero: Any) -> dict[str, Any]:
    """Outside where a rung reads a source another number of times than the hero: text seen again teaches less.

    Up to one pass nothing comes twice, and one number is as good as another.
    """

    def passes(said: Any) -> dict[str, float]:
        return {name: max(1.0, epochs) for name, epochs in parse_epochs(str(said)).items()}

    own = passes(hero)
    same = [
        set(other) == set(own) and all(abs(other[name] - own[name]) <= MAX_EPOCH_SPREAD * own[name] for name in own)
        for other in map(passes, values)
    ]
    return {"rungs": sorted({str(value) for value in values}), "hero": str(hero), "outside": not all(same)}


def _condition(values: list[Any], hero: Any) -> dict[str, Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in [*values, hero]):
        low, high = float(min(values)), float(max(values))
        outside = not low - 0.01 * abs(low) <= float(hero) <= high + 0.01 * abs(high)
        return {"rungs": [low, high], "hero": float(hero), "outside": outside}
    distinct = sorted({str(value) for value in values})
    return {"rungs": distinct, "hero": str(hero), "outside": str(hero) not in distinct}


def ratio_spread(conditions: Mapping[str, Mapping[str, Any]]) -> float:
    """By what share tokens per active parameter differ over rungs and hero; 0 where they are not known."""
    ratio = conditions.get("tokens_per_active_param")
    if ratio is None:
        return 0.0
    values = [*ratio["rungs"], ratio["hero"]]
    return max(values) / min(values) - 1.0


def refuse_ratio(conditions: Mapping[str, Mapping[str, Any]], *, why: str | None = None) -> None:
    """Refuses a law in compute alone where tokens per active parameter differ; `why` no law in both helps here.

    Raises:
        ValueError: the ratio spreads by more than `MAX_RATIO_SPREAD` over rungs and hero.
    """
    if ratio_spread(conditions) <= MAX_RATIO_SPREAD:
        return
    ratio = conditions["tokens_per_active_param"]
    values = [*ratio["rungs"], ratio["hero"]]
    also = f" ({why})" if why else ""
    raise ValueError(
        f"tokens per active parameter run from {min(values):.4g} to {max(values):.4g} over rungs and hero; "
        f"a law in compute alone needs them within {MAX_RATIO_SPREAD:.0%}: train the ladder at the hero's ratio{also}"
    )


def recipe_warnings(table: pd.DataFrame) -> list[str]:
    """Runs whose recipe is off its swept optimum: columns recipe_excess (relative loss above it), recipe_at_edge."""
    found = []
    for row in table.to_dict("records"):
        excess, name = row.get("recipe_excess"), row.get("run")
        if isinstance(excess, int | float) and excess > MAX_RECIPE_EXCESS:
            found.append(
                f"the recipe of {name} costs {excess:.2%} of loss against its swept optimum "
                f"(more than {MAX_RECIPE_EXCESS:.1%}): the law then mixes scale with recipe"
            )
        if row.get("recipe_at_edge") is True or str(row.get("recipe_at_edge")).lower() == "true":
            found.append(f"the optimum of {name} lies at its grid's edge: the true one may be beyond")
    return found


def unstated_conditions(conditions: Mapping[str, Any]) -> list[str]:
    """Standard conditions that rungs or hero do not state, so that nothing is known about them."""
    known = " ".join(conditions)
    return [label for label, keys in STANDARD.items() if not any(key in known for key in keys)]
