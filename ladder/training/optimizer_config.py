"""The optimizer of a family as its file states it, and of a run with every number resolved. Imports no jax."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rungwise.analysis.vocabulary import PARAMETER_GROUPS
from rungwise.model.config import Record

DECAYED_BY_MUONH = ("embed", "router", "norms", "gates")
"""Groups in which MuonH leaves something to Adam that a weight decay can move."""


class LearningRateLaw(Record):
    """peak = coefficient · tokens^tokens_exponent · hidden_dim^hidden_exponent · tokens_per_step^batch_exponent.

    The peak is the matrices'; what Adam moves beside Muon or MuonH has it over `matrix_ratio`.
    """

    coefficient: float = Field(gt=0)
    tokens_exponent: float
    hidden_exponent: float
    batch_exponent: float
    max: float | None = Field(default=None, gt=0, description="no run's peak is above it; absent: no cap")

    def peak(self, *, tokens: int, hidden_dim: int, tokens_per_step: int) -> float:
        """Learning rate at the end of warm-up."""
        rate = (
            self.coefficient
            * tokens**self.tokens_exponent
            * hidden_dim**self.hidden_exponent
            * tokens_per_step**self.batch_exponent
        )
        return rate if self.max is None else min(self.max, rate)


class Beta2Law(Record):
    """beta2 = base^(tokens_per_step / reference_tokens), kept within [low, high].

    Within the bounds, Adam's second moment remembers a number of tokens, whatever the batch.
    """

    base: float = Field(gt=0, lt=1)
    reference_tokens: int = Field(ge=1)
    low: float = Field(ge=0, lt=1)
    high: float = Field(ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} exceeds high {self.high}; swap them")
        return self

    def beta2(self, *, tokens_per_step: int) -> float:
        """Decay of Adam's second moment for one batch size."""
        return max(self.low, min(self.high, self.base ** (tokens_per_step / self.reference_tokens)))


class EpsilonLaw(Record):
    """epsilon = per_root_step · √steps."""

    per_root_step: float = Field(gt=0)

    def epsilon(self, *, steps: int) -> float:
        """Adam's epsilon for one horizon."""
        return self.per_root_step * math.sqrt(steps)


class GroupDecay(Record):
    """Weight decay of named parameter groups, in place of `weight_decay` there: p loses rate · decay · p each step."""

    decays: tuple[tuple[str, float], ...] = Field(min_length=1, description="table: parameter group = decay")
    start_step: int = Field(default=0, ge=0, description="no decay in the steps before this many are done")
    anneal: bool = Field(default=False, description="times (1 − step/steps), down to nothing at the end of the run")

    @field_validator("decays", mode="before")
    @classmethod
    def _table(cls, decays: Any) -> Any:
        return tuple(sorted(decays.items())) if isinstance(decays, Mapping) else decays

    @field_validator("decays")
    @classmethod
    def _known(cls, decays: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        for group, decay in decays:
            if group not in PARAMETER_GROUPS:
                raise ValueError(f"{group!r} is no parameter group; known: {', '.join(PARAMETER_GROUPS)}")
            if decay < 0:
                raise ValueError(f"decay {decay} of group {group!r} is negative; give 0 or more")
        return decays


class OptimizerRule(Record):
    """What the optimizers of a family's runs share. `OptimizerConfig` adds what may depend on the run."""

    name: Literal["adamw", "muon", "muonh"]
    matrix_ratio: float = Field(gt=0, description="matrices' learning rate over Adam's; adamw has one rate for all")
    beta1: float = Field(ge=0, lt=1)
    momentum: float = Field(ge=0, lt=1, description="of Muon and MuonH")
    newton_schulz_steps: int = Field(ge=1)
    newton_schulz: Literal["standard", "quintic"] = Field(
        default="standard", description="one polynomial at every step, or five tuned one after the other"
    )
    weight_decay: float = Field(ge=0, description="on matrices only, times the learning rate")
    group_decay: GroupDecay | None = Field(default=None, description="absent: weight_decay alone")
    clip_norm: float | None = Field(default=None, gt=0, description="global gradient norm; absent: no clipping")
    warmup_fraction: float = Field(ge=0, lt=1, description="of the run's steps, in ten-thousandths")
    final_fraction: float = Field(ge=0, le=1, description="learning rate at the last step over the peak")

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        if self.newton_schulz == "quintic" and self.newton_schulz_steps != 5:
            raise ValueError(
                f"newton_schulz_steps {self.newton_schulz_steps} with newton_schulz 'quintic', which has five tuned"
                " steps; set 5, or 'standard'"
            )
        if abs(self.warmup_fraction * 10_000 - round(self.warmup_fraction * 10_000)) > 1e-6:
            raise ValueError(f"warmup_fraction {self.warmup_fraction} has more than four decimals; round it")
        if self.name == "muonh" and self.weight_decay:
            raise ValueError(
                f"weight_decay {self.weight_decay} with name 'muonh', which keeps the norm of every matrix; set 0, or"
                " decay groups of its Adam part in group_decay"
            )
        if self.name == "muonh" and self.group_decay is not None:
            for group, _ in self.group_decay.decays:
                if group not in DECAYED_BY_MUONH:
                    raise ValueError(
                        f"group_decay of {group!r} with name 'muonh', which keeps the norm of its matrices; decay one"
                        f" of {', '.join(DECAYED_BY_MUONH)}"
                    )
        return self


class OptimizerConfig(OptimizerRule):
    """Everything an update depends on besides the gradient; nothing is left to a library's default."""

    beta2: float = Field(ge=0, lt=1)
    epsilon: float = Field(gt=0, description="of Adam")


class OptimizerSection(OptimizerRule):
    """A family's optimizer: fixed numbers, or laws that give each run its own."""

    beta2: float | None = Field(default=None, ge=0, lt=1)
    beta2_law: Beta2Law | None = None
    epsilon: float | None = Field(default=None, gt=0)
    epsilon_law: EpsilonLaw | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for fixed, law in (("beta2", "beta2_law"), ("epsilon", "epsilon_law")):
            if (getattr(self, fixed) is None) == (getattr(self, law) is None):
                raise ValueError(f"{fixed} and {law}: give exactly one of the two")
        return self

    def resolve(self, *, steps: int, tokens_per_step: int) -> OptimizerConfig:
        """The optimizer of one run."""
        shared = {name: getattr(self, name) for name in OptimizerRule.model_fields}
        beta2 = self.beta2 if self.beta2_law is None else self.beta2_law.beta2(tokens_per_step=tokens_per_step)
        epsilon = self.epsilon if self.epsilon_law is None else self.epsilon_law.epsilon(steps=steps)
        return OptimizerConfig.model_validate({**shared, "beta2": beta2, "epsilon": epsilon})
