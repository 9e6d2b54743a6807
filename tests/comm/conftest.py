"""A small MoE layer on several ranks, and the slow reference it is compared with. Also imported by `mesh_child.py`."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.capacity import capacity
from rungwise.comm.config import TransportConfig
from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.ranks import Ranks, over_ranks
from rungwise.comm.transports import route


@dataclass(frozen=True)
class Layer:
    """All ranks: tokens [ranks, T, H], ids and gates [ranks, T, K], weights [ranks, local experts, …]."""

    config: TransportConfig
    tokens: Any
    expert_ids: Any
    gates: Any
    weights: tuple[Any, Any]
    valid: Any

    def run(self, tokens, gates, weights, *, mesh=None, wrap=lambda fn: fn):
        """`TransportResult` of all ranks."""
        ranks = Ranks(size=self.config.num_ranks, mesh=mesh)

        def one_rank(tokens, expert_ids, gates, weights, valid):
            def experts(rows, group_expert=None):
                hidden = jnp.tanh(grouped_matmul(rows, weights[0], group_expert))
                return grouped_matmul(hidden, weights[1], group_expert)

            return route(tokens, expert_ids, gates, experts, axis=ranks.axis, config=self.config, valid=valid)

        return over_ranks(wrap(one_rank), ranks)(tokens, self.expert_ids, gates, weights, self.valid)

    def result(self, **options):
        """Jitted forward pass."""
        return jax.jit(lambda *args: self.run(*args, **options))(self.tokens, self.gates, self.weights)

    def gradients(self, **options):
        """Gradients of Σ output · fixed weights by tokens, gates and expert weights."""

        def loss(tokens, gates, weights):
            output = self.run(tokens, gates, weights, **options).output
            return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=output.dtype).reshape(output.shape)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(self.tokens, self.gates, self.weights)

    def expected_output(self, kept=None):
        """Dense float64 reference: every kept assignment computed one by one."""
        tokens, gates = np.asarray(self.tokens, np.float64), np.asarray(self.gates, np.float64)
        up, down = (np.asarray(part, np.float64).reshape(-1, *part.shape[2:]) for part in self.weights)
        kept = np.ones(gates.shape, bool) if kept is None else np.asarray(kept)
        output = np.zeros(tokens.shape)
        for rank, token, k in np.argwhere(kept):
            expert = int(self.expert_ids[rank, token, k])
            hidden = np.tanh(tokens[rank, token] @ up[expert])
            output[rank, token] += gates[rank, token, k] * (hidden @ down[expert])
        return output

    def expected_drops(self):
        """The rule of `pooled_wave` written as loops: which assignments are sent, and which of them are kept."""
        config, waves = self.config, self.config.num_waves
        ids, valid = np.asarray(self.expert_ids), np.asarray(self.valid)
        usable = valid[..., None] & (ids >= 0) & (ids < config.num_experts)
        num_ranks, num_items = ids.shape[0], ids[0].size
        sent, arrivals = np.zeros(ids.shape, bool), defaultdict(list)
        for rank in range(num_ranks):
            limit = _limit(usable[rank].sum(), num_ranks * waves, config.sender_capacity_factor)
            limit = min(
                limit,
                capacity(num_items, num_bins=num_ranks * waves, capacity_factor=config.sender_capacity_factor),
            )
            seen: dict[int, int] = defaultdict(int)
            for token, k in np.argwhere(usable[rank]):
                destination = int(ids[rank, token, k]) // config.experts_per_rank
                wave, slot = seen[destination] % waves, seen[destination] // waves
                seen[destination] += 1
                if slot < limit:
                    sent[rank, token, k] = True
                    arrivals[int(ids[rank, token, k]), wave].append((slot, rank, token, k))
        kept = np.zeros(ids.shape, bool)
        limit = _limit(usable.sum(), config.num_experts * waves, config.receiver_capacity_factor)
        for queue in arrivals.values():
            for _, rank, token, k in sorted(queue)[:limit]:
                kept[rank, token, k] = True
        return usable, sent, kept


def _limit(num_valid, num_bins, factor):
    return capacity(int(num_valid), num_bins=num_bins, capacity_factor=factor) if num_valid else 1


def make_layer(
    name="pooled_wave",
    *,
    num_ranks=4,
    num_experts=8,
    top_k=2,
    num_tokens=16,
    width=8,
    num_waves=1,
    factor=1.15,
    receiver_factor=None,
    skew=1.0,
    seed=0,
    dtype=np.float32,
    expert_ids=None,
    valid=None,
):
    """A random layer whose experts differ in popularity by `skew`; a token's choices are distinct."""
    random = np.random.default_rng(seed)
    score = random.gumbel(size=(num_ranks, num_tokens, num_experts)) + skew * random.normal(size=num_experts)
    drawn = np.argsort(-score, axis=-1)[..., :top_k]
    config = TransportConfig(
        name=name,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        num_waves=num_waves,
        sender_capacity_factor=factor,
        receiver_capacity_factor=receiver_factor or factor,
    )
    local = num_experts // num_ranks
    return Layer(
        config,
        random.normal(size=(num_ranks, num_tokens, width)).astype(dtype),
        (drawn if expert_ids is None else np.asarray(expert_ids)).astype(np.int32),
        random.uniform(0.5, 1.5, size=(num_ranks, num_tokens, top_k)).astype(dtype),
        (
            random.normal(size=(num_ranks, local, width, 2 * width)).astype(dtype) / 3,
            random.normal(size=(num_ranks, local, 2 * width, width)).astype(dtype) / 3,
        ),
        np.ones((num_ranks, num_tokens), bool) if valid is None else np.asarray(valid),
    )


def regroup(layer, name, num_ranks):
    """The same tokens and experts as one layer of another transport and number of ranks."""
    config = TransportConfig(
        name=name,
        num_experts=layer.config.num_experts,
        top_k=layer.config.top_k,
        num_ranks=num_ranks,
        num_waves=layer.config.num_waves,
        sender_capacity_factor=layer.config.sender_capacity_factor,
        receiver_capacity_factor=layer.config.receiver_capacity_factor,
    )

    def split(values):
        return values.reshape(num_ranks, -1, *values.shape[2:])

    return Layer(
        config,
        *jax.tree.map(split, (layer.tokens, layer.expert_ids, layer.gates, layer.weights, layer.valid)),
    )


def flat(values):
    """All ranks' values, one after the other, in float64 where they are floats."""
    array = np.asarray(values)
    return array.reshape(-1, *array.shape[2:])


@pytest.fixture(scope="session")
def moe():
    """The builders of this file, for tests (which cannot import one another)."""
    return type(
        "moe",
        (),
        {"layer": staticmethod(make_layer), "regroup": staticmethod(regroup), "flat": staticmethod(flat)},
    )
