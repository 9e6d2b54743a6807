"""What a run's transport will drop at another context length, from what it drops at its own. Imports no jax.

Fewer, longer documents a rank even out less, and so more is dropped. How alike tokens of a document are is read off the
run: popularity and likeness together make its experts' loads deviate as they do, and its transport drop what it does.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rungwise.comm.drop_study import concentration_of, simulate
from rungwise.comm.routing import Traffic
from rungwise.ladder.family import RunConfig

MOST_ASSIGNMENTS = 1 << 21
"""Routes of one layer and data replica up to which a prediction takes moments, and a trainer may wait for it."""

MOST_STRETCH = 4.0


def traffic_of(config: RunConfig, deviation: float, *, by_documents: float = 0.0, stretch: float = 1.0) -> Traffic:
    """One layer's traffic at a run's own length; a sequence stands for a document.

    Expert loads of a whole batch deviate by c² = sampling + popularity + (exp(tilt²) − 1) / documents of the batch.

    Args:
        deviation: c, of the layer's expert loads, `moe/frequency_deviation`.
        by_documents: share of c², sampling taken off, that likeness within documents makes; popularity makes the rest.
        stretch: times the tilt that follows.
    """
    transport = config.transport
    tokens_per_rank, num_ranks = config.sequences_per_rank * config.model.seq_len, transport.num_ranks
    assignments = config.data_replicas * num_ranks * tokens_per_rank * transport.top_k
    documents = config.data_replicas * num_ranks * config.sequences_per_rank
    sampling = transport.num_experts / assignments
    beyond = max(0.0, deviation**2 - sampling)
    popularity = math.sqrt((1.0 - by_documents) * beyond + sampling)
    return Traffic(
        num_ranks=num_ranks,
        tokens_per_rank=tokens_per_rank,
        num_experts=transport.num_experts,
        top_k=transport.top_k,
        concentration=concentration_of(popularity, num_experts=transport.num_experts, assignments=assignments),
        documents_per_rank=config.sequences_per_rank,
        document_tilt=stretch * math.sqrt(math.log1p(by_documents * beyond * documents)),
        seed=config.seed,
    )


def fit_traffic(
    config: RunConfig, deviations: Sequence[float], sender_drop_fraction: float, *, draws: int = 8, steps: int = 8
) -> list[Traffic]:
    """Traffic under which a run's senders drop what they did: what of the deviation is likeness within documents.

    A sender's documents are few and a receiver's many, so it is senders' drops that tell likeness from popularity.
    Bisection on `by_documents`; where not even all of it drops enough, on `stretch`. The nearer end where the drop
    fraction lies outside what the model can make.

    Args:
        deviations: of expert loads, a layer each.
        sender_drop_fraction: mean over layers.
    Returns:
        one traffic a layer and draw.
    """

    def traffics(by_documents: float, stretch: float = 1.0) -> list[Traffic]:
        own = [traffic_of(config, one, by_documents=by_documents, stretch=stretch) for one in deviations]
        return [dataclasses.replace(one, seed=one.seed + draw) for one in own for draw in range(draws)]

    def dropped(made: list[Traffic]) -> float:
        return float(np.mean([simulate(traffic, [config.transport])[0].sender_fraction for traffic in made]))

    ends = [dropped(traffics(share)) for share in (0.0, 1.0)]
    if max(ends) < sender_drop_fraction and ends[1] >= ends[0]:
        stretched = partial(traffics, 1.0)
        return _bisected(stretched, dropped, sender_drop_fraction, 1.0, MOST_STRETCH, steps)
    return _bisected(traffics, dropped, sender_drop_fraction, 0.0, 1.0, steps)


def _bisected(
    made: Callable[[float], list[Traffic]],
    dropped: Callable[[list[Traffic]], float],
    target: float,
    low: float,
    high: float,
    steps: int,
) -> list[Traffic]:
    """Traffic nearest the target between two ends, as if drops rose or fell all the way."""
    rising = dropped(made(high)) >= dropped(made(low))
    for _ in range(steps):
        middle = 0.5 * (low + high)
        if (dropped(made(middle)) > target) == rising:
            high = middle
        else:
            low = middle
    return made(0.5 * (low + high))


def predict_drops(
    before: RunConfig, after: RunConfig, *, deviations: Sequence[float], sender_drop_fraction: float, draws: int = 8
) -> float:
    """Drop fraction under `after`'s transport and documents a rank, mean over layers and draws.

    Args:
        deviations: of expert loads under `before`, a layer each.
        sender_drop_fraction: measured under `before`, mean over layers.
    """
    own = fit_traffic(before, deviations, sender_drop_fraction, draws=draws)
    longer = (dataclasses.replace(traffic, documents_per_rank=after.sequences_per_rank) for traffic in own)
    return float(np.mean([simulate(traffic, [after.transport])[0].fraction for traffic in longer]))


def is_quick(config: RunConfig) -> bool:
    """Whether a prediction takes moments."""
    tokens = config.transport.num_ranks * config.sequences_per_rank * config.model.seq_len
    return tokens * config.transport.top_k <= MOST_ASSIGNMENTS
