"""What a forecast takes for granted: each setting known of rungs and hero, and whether the hero's lies outside.

Sizes and their costs are what the law extrapolates over; every other setting, steps and batch included, is a condition.
Which broken condition matters is said by `forecast.py` (before training) and `watch` (while it lasts).
"""

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

MAX_RATIO_SPREAD: Final = 0.10
"""Tokens per active parameter may differ by this much before compute alone says nothing about the loss."""

_IDENTITY: Final = "run rung seed name role config_hash"
_OUTCOME: Final = "loss metric loss_rule"
_SHAPE: Final = "hidden_dim num_layers num_heads num_kv_heads head_dim expert_dim latent_dim"
_SIZE: Final = "num_params num_active_params"
_COST: Final = "flops flops_with_head flops_causal flops_causal_with_head data_replicas"
_NOT_CONDITIONS: Final = frozenset(f"{_IDENTITY} {_OUTCOME} {_SHAPE} {_SIZE} {_COST}".split())


def compare_conditions(table: pd.DataFrame, target: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each setting known on both sides: the rungs' range or values, the hero's value, whether it lies outside."""
    rungs = {str(key): table[key].dropna().tolist() for key in table.columns if key not in _NOT_CONDITIONS}
    hero = {key: target[key] for key in rungs if target.get(key) is not None}
    active = "num_active_params"
    size = active if active in table.columns and target.get(active) else "num_params"
    if size in table.columns and "tokens" in table.columns and target.get(size) and target.get("tokens"):
        known = table[[size, "tokens"]].dropna().astype(float)
        rungs["tokens_per_active_param"] = (known["tokens"] / known[size]).tolist()
        hero["tokens_per_active_param"] = float(target["tokens"]) / float(target[size])
    return {key: _condition(rungs[key], hero[key]) for key in sorted(hero) if rungs[key]}


def _condition(values: list[Any], hero: Any) -> dict[str, Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in [*values, hero]):
        low, high = float(min(values)), float(max(values))
        outside = not low - 0.01 * abs(low) <= float(hero) <= high + 0.01 * abs(high)
        return {"rungs": [low, high], "hero": float(hero), "outside": outside}
    distinct = sorted({str(value) for value in values})
    return {"rungs": distinct, "hero": str(hero), "outside": str(hero) not in distinct}


def refuse_ratio(conditions: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a ladder whose tokens per active parameter are not the hero's.

    Raises:
        ValueError: the ratio spreads by more than `MAX_RATIO_SPREAD` over rungs and hero.
    """
    ratio = conditions.get("tokens_per_active_param")
    if ratio is None:
        return
    values = [*ratio["rungs"], ratio["hero"]]
    if max(values) > min(values) * (1.0 + MAX_RATIO_SPREAD):
        raise ValueError(
            f"tokens per active parameter run from {min(values):.4g} to {max(values):.4g} over rungs and hero; "
            f"a law in compute alone needs them within {MAX_RATIO_SPREAD:.0%}: train the ladder at the hero's ratio"
        )
