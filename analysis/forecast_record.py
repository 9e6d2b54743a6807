"""The forecast as a frozen record: a number, its interval and everything it rests on, in plain values.

`forecast.py` makes it, `registry.py` freezes it, `curves.py` adds its trajectories, reports and the watch read it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
import pandas as pd

from rungwise.analysis.vocabulary import SCHEMA_VERSION, canonical_json

LATER_FIELDS: Final = ("method",)
"""Fields that forecasts registered by earlier versions do not have; left out of the content where they are None."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A final loss with its interval (nats per token) and its evidence, in plain values, so that it hashes and travels.

    low and high are None when no degree of freedom is left. `curve` rows: metric, progress, loss, low, high.
    """

    metric: str
    target: dict[str, Any]
    point: float
    low: float | None
    high: float | None
    level: float
    half_width: dict[str, float | None]
    laws: list[dict[str, Any]]
    status: str
    degrees_of_freedom: int
    extrapolation_ratio: float
    used: list[dict[str, Any]]
    refused: list[dict[str, str]]
    merged: list[dict[str, str]]
    loss_rule: str
    noise: float | None
    """Relative run-to-run spread of the final loss from repeated seeds; None without repeats."""
    conditions: dict[str, dict[str, Any]]
    warnings: list[str]
    floor: float | None
    floor_reason: str | None
    floor_profile: list[dict[str, float]]
    floor_range: dict[str, float] | None
    curve: list[dict[str, Any]]
    method: dict[str, Any] | None = None
    """How it was made: kind of law, counts fitted, laws held out and averaged, and how far the ladder can test it."""

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical content, without the hash itself."""
        return hashlib.sha256(canonical_json(self._content()).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The object `ladder forecast --json` prints and the registry stores."""
        return {**self._content(), "hash": self.hash}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a stored hash is not checked here (`registry.py` does).

        Raises:
            ValueError: another schema version, or a key too few or too many.
        """
        if record.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"forecast schema {record.get('schema')!r} is not {SCHEMA_VERSION}; upgrade rungwise or the file"
            )
        content = {key: value for key, value in record.items() if key not in ("schema", "hash")}
        known = {field.name for field in fields(cls)}
        differing = (content.keys() ^ known) - (set(LATER_FIELDS) - content.keys())
        if differing:
            raise ValueError(f"forecast keys differ by {sorted(differing)}; the file is not a whole forecast")
        return cls(**content)

    def with_curve(self, table: pd.DataFrame, *, metric: str | None = None) -> Self:
        """The same forecast with the rows of `forecast_curve` for one metric added (replacing that metric's)."""
        name = metric or self.metric
        rows = [row for row in self.curve if row["metric"] != name]
        known = ("progress", "loss", "low", "high", "low_all", "high_all", "slope_error")
        columns = [key for key in known if key in table]
        for row in zip(*(np.asarray(table[key], dtype=float).tolist() for key in columns), strict=True):
            rows.append({"metric": name, **dict(zip(columns, row, strict=True))})
        return replace(self, curve=rows)

    def curve_table(self, metric: str) -> pd.DataFrame | None:
        """Columns progress, loss, low, high of one metric's registered trajectory; None without one."""
        rows = [row for row in self.curve if row["metric"] == metric]
        return pd.DataFrame(rows).drop(columns="metric").sort_values("progress", ignore_index=True) if rows else None

    def _content(self) -> dict[str, Any]:
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        absent = [name for name in LATER_FIELDS if content[name] is None]
        return {"schema": SCHEMA_VERSION, **{key: value for key, value in content.items() if key not in absent}}
