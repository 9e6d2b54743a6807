"""Routes drawn from a model of a router, for studies without one. NumPy only; imports no jax.

Experts differ in popularity, the same for all ranks (a symmetric Dirichlet's typical weights, in random order). A rank
tilts them (log-normal), and so does each document again, so that tokens of one document resemble one another. A token
draws `top_k` distinct experts one after the other: the law of Gumbel top-k.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_STEPS = 1 << 16
"""Popularities are multiples of 1 / 65,536, at least one each: 16 random bits then draw an expert from a table."""

_QUANTILE_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Everything the drop fraction depends on besides the transport.

    Attributes:
        concentration: α of the symmetric Dirichlet; infinite where all experts are equally popular.
        rank_tilt: standard deviation of log popularity between ranks.
        documents_per_rank: pieces of equal length whose tokens are alike; 0: none are.
        document_tilt: standard deviation of log popularity between documents.
        popularity: measured weights of the experts, instead of drawn ones.
    """

    num_ranks: int
    tokens_per_rank: int
    num_experts: int
    top_k: int
    concentration: float = np.inf
    rank_tilt: float = 0.0
    documents_per_rank: int = 0
    document_tilt: float = 0.0
    seed: int = 0
    popularity: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("num_ranks", "tokens_per_rank", "num_experts", "top_k"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is below 1; set at least 1")
        if self.top_k > self.num_experts or self.num_experts > 1 << 12:
            raise ValueError(
                f"top_k {self.top_k} of num_experts {self.num_experts}; at most 4096 experts, top_k of them"
            )
        if not self.concentration > 0:
            raise ValueError(f"concentration {self.concentration} is not above 0; give inf for equal popularity")
        for field in ("rank_tilt", "document_tilt"):
            if not 0 <= getattr(self, field) < np.inf:
                raise ValueError(f"{field} {getattr(self, field)} is not 0 or above; set 0 for none")
        if self.documents_per_rank < 0 or self.documents_per_rank > self.tokens_per_rank:
            raise ValueError(
                f"documents_per_rank {self.documents_per_rank} is not within 0..{self.tokens_per_rank}; 0 means none"
            )
        if self.popularity is not None and len(self.popularity) != self.num_experts:
            raise ValueError(
                f"popularity has {len(self.popularity)} weights for {self.num_experts} experts; give one each"
            )


def balanced(traffic: Traffic) -> Traffic:
    """The same traffic where every sequence spreads its routes evenly: what still drops is sampling alone."""
    return dataclasses.replace(traffic, concentration=np.inf, rank_tilt=0.0, document_tilt=0.0, popularity=None)


def draw_routes(traffic: Traffic) -> Iterator[np.ndarray]:
    """Chosen experts of each rank in turn, [tokens, top_k] uint16, a token's choices distinct."""
    log_weights = np.log(_popularity(traffic))
    for rank in range(traffic.num_ranks):
        yield _draw_rank(traffic, log_weights, rank)


def _random(traffic: Traffic, *purpose: int) -> np.random.Generator:
    """Random numbers of their own for each purpose, so that another skew leaves the others as they are."""
    return np.random.default_rng([traffic.seed, *purpose])


def _popularity(traffic: Traffic) -> np.ndarray:
    """Weights of the experts. Quantiles of the gamma law in random order: a Dirichlet draw without its own luck, so
    that drop fractions move smoothly with the concentration."""
    if traffic.popularity is not None:
        return np.maximum(np.asarray(traffic.popularity, float), 1e-12)
    if np.isinf(traffic.concentration):
        return np.ones(traffic.num_experts)
    fixed = np.random.default_rng(0).gamma(traffic.concentration, size=traffic.num_experts * _QUANTILE_DRAWS)
    quantiles = np.sort(fixed)[_QUANTILE_DRAWS // 2 :: _QUANTILE_DRAWS]
    return _random(traffic, 0).permutation(np.maximum(quantiles, 1e-12))


def _draw_rank(traffic: Traffic, log_weights: np.ndarray, rank: int) -> np.ndarray:
    tilt, random = _random(traffic, 1, rank), _random(traffic, 2, rank)
    log_weights = log_weights + traffic.rank_tilt * tilt.normal(size=traffic.num_experts)
    documents = max(1, traffic.documents_per_rank)
    likeness = traffic.document_tilt if traffic.documents_per_rank else 0.0
    tilts = likeness * tilt.normal(size=(documents, traffic.num_experts))
    table = np.concatenate([_table(log_weights + tilt) for tilt in tilts])
    document = np.repeat(np.arange(documents, dtype=np.int32), _lengths(traffic.tokens_per_rank, documents))
    offset = document * _STEPS

    def draw(tokens: np.ndarray | slice) -> np.ndarray:
        where = offset[tokens]
        return table[where + random.integers(_STEPS, size=len(where), dtype=np.uint16)]

    choices = np.empty((traffic.top_k, traffic.tokens_per_rank), np.uint16)
    for k in range(traffic.top_k):
        choices[k] = draw(slice(None))
        again = np.flatnonzero((choices[:k] == choices[k]).any(axis=0))
        while len(again):
            choices[k, again] = draw(again)
            again = again[(choices[:k, again] == choices[k, again]).any(axis=0)]
    return np.ascontiguousarray(choices.T)


def _lengths(num_tokens: int, documents: int) -> np.ndarray:
    """Tokens of each document: equal, the first ones longer by one where they do not divide."""
    return num_tokens // documents + (np.arange(documents) < num_tokens % documents)


def _table(log_weights: np.ndarray) -> np.ndarray:
    """65,536 entries, each expert as often as its share says."""
    weights = np.exp(log_weights - log_weights.max())
    spare = _STEPS - len(weights)
    edges = np.round(np.cumsum(weights) / weights.sum() * spare).astype(np.int64)
    return np.repeat(np.arange(len(weights), dtype=np.uint16), 1 + np.diff(edges, prepend=0))
