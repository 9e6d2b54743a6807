"""Exact parameter and FLOP counts of a `ModelConfig`, from its numbers alone. Imports no jax.

Conventions, stated once:
* `num_params` counts every weight; balancing biases are state, not parameters.
* `num_active_params` is what one token's forward pass multiplies by, without embedding and head (the reference's
  "A23B" counts so): of the routed experts only `top_k` are active.
* FLOPs are 2 per multiply-add. Training is three times forward (one backward product for inputs, one for weights).
  Norms, softmax, embedding look-up and optimizer are not counted.
* `flops` counts each layer's whole window (12 × attention width × window a token in training), as the reference
  run does; `causal` counts only the keys a token may see.

Source: marin-community/marin, experiments/grug/moe_hero_ep/plot_scaling_ladder.py, for the convention.
"""

from dataclasses import dataclass

from rungwise.model.config import ModelConfig

TRAINING_FLOPS_PER_FORWARD = 3


def attention_params(config: ModelConfig) -> int:
    """Weights of one attention branch: query, key, value, output, query/key norms."""
    query_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    return config.hidden_dim * (2 * query_dim + 2 * kv_dim) + 2 * config.head_dim


def routed_expert_params(config: ModelConfig) -> int:
    """Weights of one routed SwiGLU expert in the latent width."""
    return 3 * config.latent_dim * config.expert_dim


def shared_expert_params(config: ModelConfig) -> int:
    """Weights of all shared SwiGLU experts of one layer, at full width."""
    return config.num_shared_experts * 3 * config.hidden_dim * config.expert_dim


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Weights by part, whole model."""

    embed: int
    attention: int
    router: int
    latent: int
    experts: int
    shared: int
    norms: int
    head: int
    active_experts: int

    @property
    def total(self) -> int:
        """Every weight of the model."""
        return (
            self.embed
            + self.attention
            + self.router
            + self.latent
            + self.experts
            + self.shared
            + self.norms
            + self.head
        )

    @property
    def active(self) -> int:
        """Weights one token uses, without embedding and head."""
        return self.total - self.embed - self.head - self.experts + self.active_experts


def count_params(config: ModelConfig) -> ParameterCount:
    """Counts the weights of every part."""
    layers, width = config.num_layers, config.hidden_dim
    expert = routed_expert_params(config)
    return ParameterCount(
        embed=config.vocab_size * width,
        attention=layers * attention_params(config),
        router=layers * width * config.num_experts,
        latent=layers * (2 * width * config.latent_dim + config.latent_dim),
        experts=layers * config.num_experts * expert,
        active_experts=layers * config.top_k * expert,
        shared=layers * shared_expert_params(config),
        norms=(2 * layers + 1) * width,
        head=width * config.vocab_size,
    )


def attended_keys(seq_len: int, window: int, *, causal: bool) -> float:
    """Keys an average token of a sequence is multiplied with.

    Whole window: `window`. Causal: mean over positions i of min(i + 1, window).

    >>> attended_keys(4, 2, causal=True), attended_keys(4, 2, causal=False)
    (1.75, 2.0)
    """
    if not causal:
        return float(window)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Training FLOPs per token."""

    matmul: float
    attention: float
    attention_causal: float
    head: float

    def total(self, *, head: bool, causal: bool = False) -> float:
        """Training FLOPs per token with or without the output head, whole-window or causal attention."""
        attention = self.attention_causal if causal else self.attention
        return self.matmul + attention + (self.head if head else 0.0)


def count_flops(config: ModelConfig) -> FlopCount:
    """Training FLOPs per token: weights multiplied, attention scores and their use, head."""
    counts = count_params(config)
    norm_weights = counts.norms + config.num_layers * (config.latent_dim + 2 * config.head_dim)
    query_dim = config.num_heads * config.head_dim
    scores = {
        causal: sum(attended_keys(config.seq_len, window, causal=causal) for window in config.windows)
        for causal in (False, True)
    }
    per_key = TRAINING_FLOPS_PER_FORWARD * 2 * 2 * query_dim  # scores and their weighted sum of values
    return FlopCount(
        matmul=TRAINING_FLOPS_PER_FORWARD * 2.0 * (counts.active - norm_weights),
        attention=per_key * scores[False],
        attention_causal=per_key * scores[True],
        head=TRAINING_FLOPS_PER_FORWARD * 2.0 * counts.head,
    )
