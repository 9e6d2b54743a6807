"""Exact parameter and FLOP counts of a `ModelConfig`, from its numbers alone. Imports no jax.

Conventions, stated once:
* `total` counts every weight; balancing biases are state, not parameters (`balancing_bias` counts them apart).
* `active` is what one token's forward pass reads, of the routed experts only `top_k`. As the reference publishes it, it
  leaves out embedding and head ("A23B"), and gates and convolutions; `active_with_gates` has the latter two,
  `active_everything` has all.
* FLOPs are 2 per multiply-add. Training is three times forward: one backward product for inputs, one for weights.
  Recomputed activations, padded expert buffers, norms, softmax, embedding look-up and optimizer are not counted.
* The reference's published FLOPs (`total`) are matrix products of `active` weights and attention, by choice with the
  head. Gates and convolutions are parts beside them, which only `everything=True` adds.
* Attention over a whole window multiplies each token with `window` keys (12 × attention width × window a token and
  layer in training): the reference's convention. Causal, the area under the mask: half of a full square.
* A tied head is one matrix less to store and the same product to compute.

Source: marin-community/marin, experiments/grug/moe_hero_ep/plot_scaling_ladder.py for the convention, model.py for the
parts; maxtext #678 and #4017 for what such counts get wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rungwise.model.config import ModelConfig

TRAINING_FLOPS_PER_FORWARD = 3


def attention_params(config: ModelConfig) -> int:
    """Matrix weights of one attention branch: query, key, value, output."""
    query_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    return config.hidden_dim * (2 * query_dim + 2 * kv_dim)


def latent_params(config: ModelConfig) -> int:
    """Matrix weights of one layer's projections to and from the latent width; 0 where experts work at full width."""
    return 2 * config.hidden_dim * config.latent_dim if config.latent_dim else 0


def routed_expert_params(config: ModelConfig) -> int:
    """Weights of one routed SwiGLU expert."""
    return 3 * config.routed_dim * config.expert_dim


def shared_expert_params(config: ModelConfig) -> int:
    """Weights of all shared SwiGLU experts of one layer, at full width."""
    return config.num_shared_experts * 3 * config.hidden_dim * config.expert_dim


def gate_params(config: ModelConfig) -> int:
    """Weights of the whole model's gates: attention gates of each layer, low-rank gates behind norms.

    A low-rank gate, [hidden, rank] and [rank, hidden], stands behind both norms of a block, the final norm and the
    embedding norm.
    """
    per_head = config.num_layers * config.hidden_dim * config.num_heads if config.attention_gate else 0
    num_gated_norms = 2 * config.num_layers + 1 + config.embed_norm
    return per_head + num_gated_norms * 2 * config.hidden_dim * config.gated_norm_rank


def short_conv_params(config: ModelConfig) -> int:
    """Taps of one layer's depthwise convolutions: `short_conv_kernel` a channel."""
    kv_dim = config.num_kv_heads * config.head_dim
    channels = {"key": kv_dim, "value": kv_dim, "attention": config.hidden_dim, "moe": config.hidden_dim}
    return config.short_conv_kernel * sum(channels[site] for site in config.short_conv_sites)


def norm_params(config: ModelConfig) -> int:
    """Norm gains of the whole model: blocks, latent, query and key, embedding, final."""
    of_layer = 2 * config.hidden_dim + (config.latent_dim or 0)
    of_layer += 2 * config.head_dim if config.learned_query_key_norm else 0
    return config.num_layers * of_layer + (1 + config.embed_norm) * config.hidden_dim


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Weights by part, whole model. The parts add up to `total`."""

    embed: int
    attention: int
    """Query, key, value and output matrices."""
    router: int
    latent: int
    """Projections to and from the latent width."""
    experts: int
    shared: int
    norms: int
    """Gains of all norms."""
    gates: int
    """Attention gates and the low-rank gates behind norms."""
    convolutions: int
    head: int
    """0 where tied to the embedding."""
    active_experts: int
    """The part of `experts` that one token uses."""
    balancing_bias: int
    """Not a weight and in no sum: state of the balancing rules that keep a bias an expert."""

    def parts(self) -> dict[str, int]:
        """Weights by part, whole model."""
        return {name: getattr(self, name) for name in _PARTS}

    def active_parts(self) -> dict[str, int]:
        """Weights one token uses, by part, under no convention: embedding and head whole."""
        return self.parts() | {"experts": self.active_experts}

    @property
    def total(self) -> int:
        """Every weight of the model."""
        return sum(self.parts().values())

    @property
    def active(self) -> int:
        """Weights one token uses, without embedding, head, gates and convolutions."""
        return self.active_with_gates - self.gates - self.convolutions

    @property
    def active_with_gates(self) -> int:
        """Weights one token uses, without embedding and head."""
        return self.active_everything - self.embed - self.head

    @property
    def active_everything(self) -> int:
        """Weights one token uses, embedding and head whole."""
        return self.total - self.experts + self.active_experts


_PARTS = (
    "embed",
    "attention",
    "router",
    "latent",
    "experts",
    "shared",
    "norms",
    "gates",
    "convolutions",
    "head",
)


def count_params(config: ModelConfig) -> ParameterCount:
    """Counts the weights of every part."""
    layers, width = config.num_layers, config.hidden_dim
    expert = routed_expert_params(config)
    keeps_bias = config.balance in ("quantile", "loss_free_bias")
    return ParameterCount(
        embed=config.vocab_size * width,
        attention=layers * attention_params(config),
        router=layers * width * config.num_experts,
        latent=layers * latent_params(config),
        experts=layers * config.num_experts * expert,
        active_experts=layers * config.top_k * expert,
        shared=layers * shared_expert_params(config),
        norms=norm_params(config),
        gates=gate_params(config),
        convolutions=layers * short_conv_params(config),
        head=0 if config.tied_head else width * config.vocab_size,
        balancing_bias=layers * config.num_experts if keeps_bias else 0,
    )


def attended_keys(seq_len: int, window: int, *, causal: bool) -> float:
    """Keys an average token of a sequence is multiplied with.

    Whole window: `window`. Causal: mean of min(x, window) over places x in [0, seq_len], which is
    window − window² / (2 · seq_len): the area under the mask, half of a full square. A token's own key counts half in
    it; counted whole, a token has at most half a key more.

    >>> attended_keys(4, 4, causal=True), attended_keys(4, 2, causal=True), attended_keys(4, 2, causal=False)
    (2.0, 1.5, 2.0)
    """
    return window - window**2 / (2 * seq_len) if causal else float(window)


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Training FLOPs per token by part."""

    matmul: float
    """Products of active weights, without head, gates and convolutions."""
    attention: float
    attention_causal: float
    gates: float
    convolutions: float
    head: float

    def total(self, *, head: bool, causal: bool = False, everything: bool = False) -> float:
        """Training FLOPs per token.

        Args:
            head: with the product that makes logits.
            causal: keys a token may see instead of each layer's whole window.
            everything: with gates and convolutions, which the reference's figures leave out.
        """
        attention = self.attention_causal if causal else self.attention
        beside = self.gates + self.convolutions if everything else 0.0
        return self.matmul + attention + beside + (self.head if head else 0.0)

    def forward(self, *, head: bool, causal: bool = False, everything: bool = False) -> float:
        """FLOPs per token of a forward pass alone, arguments as `total`."""
        return self.total(head=head, causal=causal, everything=everything) / TRAINING_FLOPS_PER_FORWARD


def count_flops(config: ModelConfig) -> FlopCount:
    """Training FLOPs per token: weights multiplied, attention scores and their use, gates, convolutions, head."""
    counts = count_params(config)
    query_dim = config.num_heads * config.head_dim
    scores = {
        causal: sum(attended_keys(config.seq_len, window, causal=causal) for window in config.windows)
        for causal in (False, True)
    }
    per_weight = TRAINING_FLOPS_PER_FORWARD * 2.0
    per_key = per_weight * 2 * query_dim  # scores and their weighted sum of values
    return FlopCount(
        matmul=per_weight * (counts.active - counts.norms),
        attention=per_key * scores[False],
        attention_causal=per_key * scores[True],
        gates=per_weight * counts.gates,
        convolutions=per_weight * counts.convolutions,
        head=per_weight * config.hidden_dim * config.vocab_size,
    )


@dataclass(frozen=True, kw_only=True)
class ContextPrice:
    """What a token costs at one context length. FLOPs per token in training, with head."""

    seq_len: int
    flops_per_token: float
    """Whole windows."""
    flops_per_token_causal: float
    attention_share: float
    """Of `flops_per_token`."""
    relative: float
    """Over the family's own context length, whole windows."""
    relative_causal: float


def price_context(config: ModelConfig, lengths: Iterable[int]) -> tuple[ContextPrice, ...]:
    """Training FLOPs per token if the context length changed and nothing else: windows of local layers stay.

    Raises:
        ValueError: a length is below 2.
    """
    own = count_flops(config)

    def price(seq_len: int) -> ContextPrice:
        flops = count_flops(config.replace(seq_len=seq_len))
        whole, causal = (flops.total(head=True, causal=causal) for causal in (False, True))
        return ContextPrice(
            seq_len=seq_len,
            flops_per_token=whole,
            flops_per_token_causal=causal,
            attention_share=flops.attention / whole,
            relative=whole / own.total(head=True),
            relative_causal=causal / own.total(head=True, causal=True),
        )

    return tuple(price(seq_len) for seq_len in lengths)
