"""A small MoE layer on several ranks, and the slow reference it is compared with. Also imported by `mesh_child.py`."""

import dataclasses
import faulthandler
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    def expected_output(self, kept=None, turn=None):
        """Dense float64 reference: every kept assignment computed one by one, `turn` choices further."""
        tokens, gates = np.asarray(self.tokens, np.float64), np.asarray(self.gates, np.float64)
        up, down = (np.asarray(part, np.float64).reshape(-1, *part.shape[2:]) for part in self.weights)
        kept = np.ones(gates.shape, bool) if kept is None else np.asarray(kept)
        output = np.zeros(tokens.shape)
        for rank, token, k in np.argwhere(kept):
            choice = (k + (0 if turn is None else turn[rank, token, k])) % gates.shape[-1]
            expert = int(self.expert_ids[rank, token, choice])
            hidden = np.tanh(tokens[rank, token] @ up[expert])
            output[rank, token] += gates[rank, token, choice] * (hidden @ down[expert])
        return output

    def expected_drops(self):
        """The rule of the transport written as loops."""
        return expected_drops(self)


class Expected(NamedTuple):
    """Which assignments are valid, sent and computed [ranks, T, K], and by the expert of which later choice."""

    usable: Any
    sent: Any
    kept: Any
    turn: Any


def expected_drops(layer):
    """What a transport keeps, assignment by assignment."""
    config, ids = layer.config, np.asarray(layer.expert_ids)
    usable = np.asarray(layer.valid)[..., None] & (ids >= 0) & (ids < config.num_experts)
    if config.name == "dropless":
        return Expected(usable, usable, usable, np.zeros(ids.shape, int))
    if config.name == "ragged":
        kept = _ragged_kept(config, ids, usable)
        return Expected(usable, kept, kept, np.zeros(ids.shape, int))
    bin_size = config.experts_per_rank if config.name == "pooled_wave" else 1
    waves = config.num_waves if config.name == "pooled_wave" else 1
    num_bins = config.num_experts // bin_size * waves
    sent, turn, arrivals = np.zeros(ids.shape, bool), np.zeros(ids.shape, int), defaultdict(list)
    for rank in range(ids.shape[0]):
        limit = waves * _limit(usable[rank].sum(), num_bins, config.sender_capacity_factor)
        held = defaultdict(int)
        for step in range(config.spill + 1):
            for token, k in np.argwhere(usable[rank] & ~sent[rank]):
                other = (k + step) % config.top_k
                expert = int(ids[rank, token, other])
                if usable[rank, token, other] and held[expert // bin_size] < limit:
                    position = held[expert // bin_size]
                    held[expert // bin_size] += 1
                    sent[rank, token, k], turn[rank, token, k] = True, step
                    arrivals[expert, position % waves].append((position // waves, rank, token, k))
    if config.name == "expert_cell":
        return Expected(usable, sent, sent, turn)
    kept = np.zeros(ids.shape, bool)
    limit = _limit(usable.sum(), config.num_experts * waves, config.receiver_capacity_factor)
    for queue in arrivals.values():
        for _, rank, token, k in sorted(queue)[:limit]:
            kept[rank, token, k] = True
    return Expected(usable, sent, kept, turn)


def _ragged_kept(config, ids, usable):
    kept = np.zeros(ids.shape, bool)
    limit = _limit(usable.sum(), ids.shape[0], config.receiver_capacity_factor)
    for destination in range(config.num_ranks):
        room = limit
        for expert in range(destination * config.experts_per_rank, (destination + 1) * config.experts_per_rank):
            for rank, token, k in np.argwhere(usable & (ids == expert))[: max(room, 0)]:
                kept[rank, token, k] = True
                room -= 1
    return kept


def _limit(num_valid, num_bins, factor):
    return capacity(int(num_valid), num_bins=num_bins, capacity_factor=factor) if num_valid else 1


def check_against_rule(layer):
    """Kept sets and counters exactly those of the rule written as loops, values those of the kept assignments."""
    usable, sent, kept, turn = layer.expected_drops()
    result = layer.result()
    np.testing.assert_array_equal(result.kept, kept)
    counts = jax.tree.map(np.asarray, result.counts)
    np.testing.assert_array_equal(counts.valid, usable.sum((1, 2)))
    np.testing.assert_array_equal(counts.sender_dropped, (usable & ~sent).sum((1, 2)))
    np.testing.assert_array_equal(counts.receiver_dropped, (sent & ~kept).sum((1, 2)))
    np.testing.assert_array_equal(counts.spilled, (kept & (turn > 0)).sum((1, 2)))
    np.testing.assert_array_equal(counts.tokens_lost_all_routes, (layer.valid & ~kept.any(-1)).sum(1))
    np.testing.assert_array_equal(counts.valid - counts.sender_dropped - counts.receiver_dropped, kept.sum((1, 2)))
    load = np.bincount(layer.expert_ids[usable], minlength=layer.config.num_experts)
    np.testing.assert_array_equal(counts.expert_load.sum(0), load)
    np.testing.assert_array_equal(counts.rank_load.sum(0), load.reshape(layer.config.num_ranks, -1).sum(-1))
    np.testing.assert_allclose(result.output, layer.expected_output(kept, turn), rtol=1e-5, atol=1e-5)
    return counts


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
    **options,
):
    """A random layer whose experts differ in popularity by `skew`; a token's choices are distinct.

    Further options are fields of `TransportConfig`.
    """
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
        **options,
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
    config = dataclasses.replace(layer.config, name=name, num_ranks=num_ranks, spill=0, payload="compute")

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


@pytest.fixture(autouse=True)
def time_limit():
    """A test that hangs, in a collective say, ends the run after ten minutes and shows where."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def moe():
    """The builders of this file, for tests (which cannot import one another)."""
    return type(
        "moe",
        (),
        {
            "layer": staticmethod(make_layer),
            "regroup": staticmethod(regroup),
            "flat": staticmethod(flat),
            "check": staticmethod(check_against_rule),
        },
    )
