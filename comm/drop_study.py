"""Drop fractions at any scale, without devices: routes are drawn and the transports' rules applied. Imports no jax."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_rules import accept, bin_size, claim_slots, rank_within, receiver_limit, sender_limit
from rungwise.comm.routing import Traffic, draw_routes


@dataclass(frozen=True)
class Drops:
    """Assignments of all ranks. Fractions are of valid assignments, so that sender and receiver add up."""

    valid: int
    sender_dropped: int
    receiver_dropped: int
    spilled: int

    @property
    def sender_fraction(self) -> float:
        return self.sender_dropped / self.valid

    @property
    def receiver_fraction(self) -> float:
        return self.receiver_dropped / self.valid

    @property
    def fraction(self) -> float:
        """Dropped at either side over valid."""
        return (self.sender_dropped + self.receiver_dropped) / self.valid


@dataclass
class _Tally:
    """What one transport needs to remember of the ranks seen so far."""

    config: TransportConfig
    num_tokens: int
    sender_dropped: int = 0
    spilled: int = 0
    arrived: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    requested: list[np.ndarray] = field(default_factory=list)

    def add(self, expert: np.ndarray, load: np.ndarray, ranks: Callable[[int], np.ndarray]) -> None:
        """One more rank's items, all valid. `ranks(size)` is `rank_within` for bins of `size` experts."""
        config = self.config
        if config.name == "ragged":
            self.requested.append(load)
            return
        if config.name == "dropless":
            return
        limit = sender_limit(config, len(expert), num_tokens=self.num_tokens)
        if config.name == "expert_cell" and not config.spill:
            self.sender_dropped += int(np.maximum(load - limit, 0).sum())
            return
        claims = claim_slots(expert, config, limit, rank=ranks(bin_size(config)))
        self.sender_dropped += int(len(expert) - np.count_nonzero(claims.placed))
        if claims.turn is not None:
            self.spilled += int(np.count_nonzero(claims.turn))
        if config.name == "pooled_wave":
            bins = claims.expert.astype(np.int32) * config.num_waves + claims.rank % config.num_waves
            arrived = np.bincount(bins[claims.placed], minlength=config.num_experts * config.num_waves)
            self.arrived = arrived + (self.arrived if len(self.arrived) else 0)

    def drops(self, num_valid: int) -> Drops:
        config, sender, receiver = self.config, self.sender_dropped, 0
        if config.name in ("ragged", "pooled_wave"):
            limit = receiver_limit(config, num_valid, num_tokens=self.num_tokens)
            if config.name == "ragged":
                requested = np.stack(self.requested)
                sender = int((requested - accept(requested, config, limit)).sum())
            else:
                receiver = int(np.maximum(self.arrived - limit, 0).sum())
        return Drops(num_valid, sender, receiver, self.spilled)


def count_drops(routes: Iterable[np.ndarray], configs: Sequence[TransportConfig]) -> list[Drops]:
    """Drops of several transports on the same routes, seen rank by rank.

    Args:
        routes: [tokens, top_k] experts of each rank in turn, all valid.
    Raises:
        ValueError: not as many ranks as a configuration has, or another top_k.
    """
    tallies: list[_Tally] = []
    num_valid = num_ranks = 0
    for chosen in routes:
        tallies = tallies or [_Tally(config, len(chosen)) for config in configs]
        expert = chosen.reshape(-1)
        num_valid, num_ranks = num_valid + len(expert), num_ranks + 1
        load = np.bincount(expert, minlength=max(config.num_experts for config in configs))
        ranks = _remembered(expert, configs)
        for tally in tallies:
            tally.add(expert, load, ranks)
    for config in configs:
        if config.num_ranks != num_ranks:
            raise ValueError(
                f"num_ranks {config.num_ranks} of transport {config.name!r} and {num_ranks} ranks of routes"
            )
    return [tally.drops(num_valid) for tally in tallies]


def _remembered(expert: np.ndarray, configs: Sequence[TransportConfig]) -> Callable[[int], np.ndarray]:
    """`rank_within` by bin size, computed once: transports that differ in capacity share it."""
    known: dict[int, np.ndarray] = {}
    num_experts = configs[0].num_experts

    def ranks(size: int) -> np.ndarray:
        if size not in known:
            known[size] = rank_within(expert // np.uint16(size), num_experts // size)
        return known[size]

    return ranks


def simulate(traffic: Traffic, configs: Sequence[TransportConfig]) -> list[Drops]:
    """Drops of several transports on the same drawn routes.

    Raises:
        ValueError: a configuration's ranks, experts or top_k are not the traffic's.
    """
    for config in configs:
        for name in ("num_ranks", "num_experts", "top_k"):
            if getattr(config, name) != getattr(traffic, name):
                raise ValueError(
                    f"{name} {getattr(config, name)} of transport {config.name!r} is not the traffic's"
                    f" {getattr(traffic, name)}; make them equal"
                )
    return count_drops(draw_routes(traffic), configs)


def concentration_of(deviation: float, *, num_experts: int, assignments: float = np.inf) -> float:
    """Dirichlet concentration under which expert loads deviate as measured: α = ((E − 1) / c² − 1) / E.

    Args:
        deviation: coefficient of variation of the experts' loads, the metric `moe/frequency_deviation`.
        assignments: routes counted for it, whose sampling alone gives c² = E / assignments; taken off.
    Returns:
        inf where sampling explains all of it.
    """
    squared = deviation**2 - num_experts / assignments
    if squared <= 0:
        return np.inf
    return max(((num_experts - 1) / squared - 1) / num_experts, 1e-3)


def calibrate(
    traffics: Sequence[Traffic],
    config: TransportConfig,
    target: float,
    *,
    by: str,
    low: float,
    high: float,
    steps: int = 12,
) -> float:
    """The value of the traffics' field `by` at which a transport drops the fraction `target`, on their average.

    Bisection on the logarithm, with the same random numbers at every step, so that one curve is searched.

    Args:
        by: `concentration`, `rank_tilt` or `document_tilt`.
    Raises:
        ValueError: the target lies outside what the two ends give.
    """

    def dropped(value: float) -> float:
        made = (dataclasses.replace(traffic, **{by: value}) for traffic in traffics)
        return float(np.mean([simulate(traffic, [config])[0].fraction for traffic in made]))

    ends = [dropped(low), dropped(high)]
    if not min(ends) <= target <= max(ends):
        raise ValueError(
            f"target drop fraction {target:.4g} is outside {min(ends):.4g}..{max(ends):.4g}, what {by} from {low:g} to"
            f" {high:g} gives; widen the range"
        )
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        if (dropped(middle) > target) == (ends[1] > ends[0]):
            high = middle
        else:
            low = middle
    return float(np.sqrt(low * high))
