"""What a run's transport will drop at another context length, from what it drops at its own. Imports no jax.

Fewer, longer documents a rank even out less, and so more is dropped. How alike tokens of a document are is read off the
run: the likeness with which the model of `comm/routing.py` drops what the run does.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_study import calibrate, concentration_of, simulate
from rungwise.comm.routing import Traffic
from rungwise.ladder.family import RunConfig

MOST_ASSIGNMENTS = 1 << 21
"""Routes of one layer and data replica up to which a prediction takes moments, and a trainer may wait for it."""


def traffic_of(config: RunConfig, deviation: float) -> Traffic:
    """One layer's traffic at a run's own length; a sequence stands for a document.

    Args:
        deviation: of the layer's expert loads, `moe/frequency_deviation`.
    """
    transport = config.transport
    tokens_per_rank = config.sequences_per_rank * config.model.seq_len
    assignments = config.data_replicas * transport.num_ranks * tokens_per_rank * transport.top_k
    return Traffic(
        num_ranks=transport.num_ranks,
        tokens_per_rank=tokens_per_rank,
        num_experts=transport.num_experts,
        top_k=transport.top_k,
        concentration=concentration_of(deviation, num_experts=transport.num_experts, assignments=assignments),
        documents_per_rank=config.sequences_per_rank,
        seed=config.seed,
    )


def likeness(traffics: Sequence[Traffic], transport: TransportConfig, drop_fraction: float) -> float:
    """The document tilt at which a run's transport drops what it did; 0 where popularity alone drops as much."""
    try:
        return calibrate(traffics, transport, drop_fraction, by="document_tilt", low=0.02, high=3.0)
    except ValueError:
        return 0.0


def predict_drops(
    before: RunConfig, after: RunConfig, *, deviations: Sequence[float], drop_fraction: float, draws: int = 4
) -> float:
    """Drop fraction under `after`'s transport and documents a rank, mean over layers and draws.

    Args:
        deviations: of expert loads under `before`, a layer each.
        drop_fraction: measured under `before`, mean over layers.
    """
    own = [traffic_of(before, deviation) for deviation in deviations]
    own = [dataclasses.replace(one, seed=one.seed + draw) for one in own for draw in range(draws)]
    tilt = likeness(own, before.transport, drop_fraction)
    longer = (dataclasses.replace(t, document_tilt=tilt, documents_per_rank=after.sequences_per_rank) for t in own)
    return float(np.mean([simulate(traffic, [after.transport])[0].fraction for traffic in longer]))


def is_quick(config: RunConfig) -> bool:
    """Whether a prediction takes moments."""
    tokens = config.transport.num_ranks * config.sequences_per_rank * config.model.seq_len
    return tokens * config.transport.top_k <= MOST_ASSIGNMENTS
