"""What a model *is*: the shape of one member of the family. Imports no jax, so that planning stays instant.

How it is trained (tokens, batch, optimizer, transport) belongs to `ladder/family.py`.
"""

import hashlib
import json
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Frozen, keyword-only, unknown keys refused. Variants are made by `replace`, which checks again."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def replace(self, **changes: object) -> Self:
        """The same record with some fields changed, validated like a new one."""
        return type(self).model_validate({**self.model_dump(), **changes})

    @property
    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON of every field: the record's identity in tags and checkpoints."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


class ModelConfig(Record):
    """One decoder-only MoE transformer of the family.

    Every block adds an attention branch and a MoE branch to a residual stream of width `hidden_dim`.
    Layers differ only in data: every `global_every`-th layer and the last see the whole sequence without rotary
    positions; the others see `window` tokens with rotary positions on `rotary_fraction` of each head.

    Source: the shape of Marin's 535B-A23B family (marin-community/marin #8435, experiments/grug/moe_hero_ep).
    """

    vocab_size: int = Field(ge=2)
    seq_len: int = Field(ge=2, description="tokens of context in one training sequence")
    hidden_dim: int = Field(ge=2)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    window: int = Field(ge=1, description="tokens a local layer attends to, itself included")
    global_every: int = Field(ge=1)
    rotary_fraction: float = Field(ge=0, le=1)
    rotary_theta: float = Field(gt=0)
    query_key_multiplier: float = Field(gt=0, description="on top of 1/√head_dim, after query/key RMSNorm")
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    num_shared_experts: int = Field(ge=0)
    expert_dim: int = Field(ge=1, description="inner width of one expert")
    latent_dim: int = Field(ge=1, description="width in which routed experts work and tokens travel")
    gate_sum: float = Field(gt=0, description="what a token's chosen gates are renormalised to")
    balance: Literal["quantile", "none"]
    logit_z_loss_weight: float = Field(ge=0)
    init_scale: float = Field(gt=0, description="standard deviation of a matrix is init_scale / √fan_in")
    norm_epsilon: float = Field(gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}; lower top_k")
        if self.balance == "quantile" and self.top_k == self.num_experts:
            raise ValueError(
                f"balance 'quantile' needs a rejected expert, but top_k {self.top_k} takes all of them;"
                " set balance = 'none'"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; change one of them"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} of head_dim {self.head_dim} gives {self.rotary_dim} rotary"
                " dimensions; rotary turns pairs, so choose an even number"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that rotary positions turn."""
        return round(self.rotary_fraction * self.head_dim)

    def is_global(self, layer: int) -> bool:
        """Whether a layer sees the whole sequence, without rotary positions."""
        return (layer + 1) % self.global_every == 0 or layer == self.num_layers - 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens each layer attends to, itself included."""
        return tuple(
            self.seq_len if self.is_global(layer) else min(self.window, self.seq_len)
            for layer in range(self.num_layers)
        )
