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
        return type(self).model_validate({**dict(self), **changes})

    @property
    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON of every field: the record's identity in tags and checkpoints."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


ShortConvSite = Literal["key", "value", "attention", "moe"]
"""Key and value projections; outputs of the attention and MoE branches."""


class Architecture(Record):
    """What all members of a family share, whatever their width. `ModelConfig` adds one member's own sizes.

    Options that are off by default cost nothing where they are off: no parameter, no operation.

    Source: Marin's 535B-A23B family (marin-community/marin #8435, experiments/grug/moe_hero_ep/model.py), which uses
    all of them; the modules that implement a part name its own source.
    """

    vocab_size: int = Field(ge=2)
    seq_len: int = Field(ge=2, description="tokens of context in one training sequence")
    global_every: int = Field(ge=1)
    rotary_fraction: float = Field(ge=0, le=1)
    rotary_theta: float = Field(gt=0)
    query_key_multiplier: float = Field(gt=0, description="on top of 1/√head_dim, after query/key RMSNorm")
    learned_query_key_norm: bool = Field(default=True, description="query/key RMSNorm has a gain per dimension")
    attention_gate: bool = Field(default=False, description="each head's output times 2σ(x · w), w starting at zero")
    exclusive_attention: bool = Field(
        default=False, description="each head's output loses its part along its own value"
    )
    gated_norm_rank: int = Field(default=0, ge=0, description="every block norm followed by a low-rank gate; 0: none")
    embed_norm: bool = Field(default=False, description="RMSNorm (and gate) right after the embedding")
    short_conv_kernel: int = Field(default=0, ge=0, description="taps of causal depthwise convolutions; 0: none")
    short_conv_sites: tuple[ShortConvSite, ...] = Field(default=(), description="what is convolved")
    tied_head: bool = Field(default=False, description="the head is the transposed embedding")
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    num_shared_experts: int = Field(ge=0)
    gate: Literal["sigmoid", "softmax", "topk_softmax"] = "sigmoid"
    gate_sum: float = Field(gt=0, description="what gates are renormalised to; with softmax, times the probability")
    routing: Literal["learned", "random", "uniform"] = Field(
        default="learned", description="random and uniform replace the choice of experts, for benchmarks"
    )
    balance: Literal["quantile", "loss_free_bias", "auxiliary_loss", "none"]
    quantile_estimator: Literal["exact", "topk", "histogram"] = "exact"
    balance_step: float = Field(default=1e-3, gt=0, description="loss_free_bias: how far a bias moves in one step")
    balance_loss_weight: float = Field(
        default=0.0, ge=0, description="auxiliary_loss: weight in the objective, per layer"
    )
    balance_scope: Literal["local", "global", "sequence"] = Field(
        default="global", description="auxiliary_loss: tokens whose routes are compared: a rank's, all, one sequence's"
    )
    logit_z_loss_weight: float = Field(ge=0)
    router_z_loss_weight: float = Field(default=0.0, ge=0, description="per layer; 0: logged only")
    init_scale: float = Field(gt=0, description="standard deviation of a matrix is init_scale / √fan_in")
    norm_epsilon: float = Field(gt=0)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}; lower top_k")
        if self.balance == "quantile" and self.top_k == self.num_experts:
            raise ValueError(
                f"balance 'quantile' needs a rejected expert, but top_k {self.top_k} takes all of them;"
                " set balance = 'none'"
            )
        if self.routing != "learned" and self.balance != "none":
            raise ValueError(
                f"routing {self.routing!r} with balance {self.balance!r}: there is nothing to balance;"
                " set balance = 'none'"
            )
        if (self.balance == "auxiliary_loss") != (self.balance_loss_weight > 0):
            raise ValueError(
                f"balance_loss_weight {self.balance_loss_weight} with balance {self.balance!r}: a weight above 0 and"
                " 'auxiliary_loss' go together; set both or neither"
            )
        if bool(self.short_conv_kernel) != bool(self.short_conv_sites):
            raise ValueError(
                f"short_conv_kernel {self.short_conv_kernel} with short_conv_sites {self.short_conv_sites}: set both or"
                " neither"
            )
        if len(set(self.short_conv_sites)) < len(self.short_conv_sites):
            raise ValueError(f"short_conv_sites {self.short_conv_sites} names a site twice; name each once")
        return self


class ModelConfig(Architecture):
    """One decoder-only MoE transformer of the family.

    Every block adds an attention branch and a MoE branch to a residual stream of width `hidden_dim`.
    Layers differ only in data: every `global_every`-th layer and the last see the whole sequence without rotary
    positions; the others see `window` tokens with rotary positions on `rotary_fraction` of each head.
    """

    hidden_dim: int = Field(ge=2)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1, description="stored key/value heads; local layers use all of them")
    global_kv_heads: int | None = Field(
        default=None, ge=1, description="key/value heads global layers use, the first ones stored; absent: all"
    )
    head_dim: int = Field(ge=2)
    window: int = Field(ge=1, description="tokens a local layer attends to, itself included")
    expert_dim: int = Field(ge=1, description="inner width of one expert")
    latent_dim: int | None = Field(
        default=None, ge=1, description="width in which routed experts work and tokens travel; absent: hidden_dim"
    )

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; change one of them"
            )
        if self.global_kv_heads is not None and self.num_kv_heads % self.global_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} is not a multiple of global_kv_heads {self.global_kv_heads};"
                " change one of them"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} of head_dim {self.head_dim} gives {self.rotary_dim} rotary"
                " dimensions; rotary turns pairs, so choose an even number"
            )
        return self

    @property
    def routed_dim(self) -> int:
        """Width in which routed experts work."""
        return self.latent_dim or self.hidden_dim

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
