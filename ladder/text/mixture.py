"""Which source, and which part of its text, each sequence of a run is drawn from. Imports neither jax nor NumPy.

A *stretch* is a part of a run whose batches are made alike. Within one, sequence k belongs to slot k mod W of a fixed
cycle of W = Σ weights slots: any W sequences in a row hold each source by its weight exactly, and the place of any
sequence in its source is known without counting what came before. All in whole numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Stretch(NamedTuple):
    """A part of a run, from `first_step` (optimizer steps done before it) to the next stretch."""

    first_step: int
    seq_len: int
    batch_size: int
    weights: tuple[int, ...] = (1,)
    """By source, in the order of the text."""


class Cycle(NamedTuple):
    """Sources of W slots, and how far into its source each slot is."""

    weights: tuple[int, ...]
    """In lowest terms."""
    sources: tuple[int, ...]
    ranks: tuple[int, ...]
    """How many earlier slots of the cycle have the slot's source."""

    def drawn(self, sequences: int, source: int) -> int:
        """How many of the first `sequences` sequences come from a source."""
        whole, rest = divmod(sequences, len(self.sources))
        return whole * self.weights[source] + self.sources[:rest].count(source)


@lru_cache(maxsize=64)
def cycle_of(weights: tuple[int, ...]) -> Cycle:
    """Each slot goes to the source furthest behind: argmax of weight · (slot + 1) − W · slots had, the first on ties.

    For two sources no beginning of the cycle is off by a whole sequence.

    Source: the largest remainder of running counts, as in the smooth weighted round robin of load balancers.

    >>> cycle_of((6, 2)).sources
    (0, 0, 1, 0)
    """
    divisor = math.gcd(*weights)
    weights = tuple(weight // divisor for weight in weights)
    total, had = sum(weights), [0] * len(weights)
    sources, ranks = [], []
    for slot in range(total):
        behind = [weight * (slot + 1) - total * count for weight, count in zip(weights, had, strict=True)]
        source = behind.index(max(behind))
        sources.append(source)
        ranks.append(had[source])
        had[source] += 1
    return Cycle(weights, tuple(sources), tuple(ranks))


def group_size(num_blocks: int) -> int:
    """Blocks that are cut into shorter windows and mixed together.

    What a change of length leaves of a group is not read in this epoch, hence no more than an eighth of the source.
    """
    return min(64, max(1, num_blocks // 8))


@dataclass(frozen=True)
class Part:
    """A stretch and where it stands in each source's order of blocks.

    Args:
        block: tokens of a block.
        num_blocks: by source.
        first_blocks: position in the source's endless order, epoch after epoch, at the stretch's first step.
    """

    stretch: Stretch
    block: int
    num_blocks: tuple[int, ...]
    first_blocks: tuple[int, ...]

    @property
    def per_block(self) -> int:
        """Windows cut from a block."""
        return self.block // self.stretch.seq_len

    def slots(self, step: int) -> list[tuple[int, int]]:
        """(source, number of the window within it since the stretch began) of each sequence of a step."""
        cycle, size = cycle_of(self.stretch.weights), self.stretch.batch_size
        first = (step - self.stretch.first_step) * size
        found = []
        for slot in range(first, first + size):
            whole, place = divmod(slot, len(cycle.sources))
            source = cycle.sources[place]
            found.append((source, whole * cycle.weights[source] + cycle.ranks[place]))
        return found

    def drawn(self, step: int) -> tuple[int, ...]:
        """Windows of each source that were read when `step` steps of the run are done."""
        sequences = max(0, step - self.stretch.first_step) * self.stretch.batch_size
        return tuple(cycle_of(self.stretch.weights).drawn(sequences, source) for source in range(len(self.num_blocks)))

    def blocks_at(self, step: int) -> tuple[int, ...]:
        """Position in each source's order when `step` steps are done; a group begun counts whole.

        Groups never reach over the end of an epoch, so that no block comes twice before all have come once.
        """
        return tuple(map(self._blocks_after, self.first_blocks, self.drawn(step), self.num_blocks))

    def _blocks_after(self, first: int, windows: int, num_blocks: int) -> int:
        if self.per_block == 1 or not windows:
            return first + windows
        left = num_blocks - first % num_blocks
        while windows > left * self.per_block:
            first, windows, left = first + left, windows - left * self.per_block, num_blocks
        size = group_size(num_blocks)
        return first + min(left, -(-windows // (size * self.per_block)) * size)


def lay_out(
    stretches: Sequence[Stretch], num_tokens: Sequence[int], *, block: int | None = None, share: float = 1.0
) -> tuple[Part, ...]:
    """Where every stretch of a run begins in each source; depends on stretches before it, never on later ones.

    Args:
        num_tokens: training tokens by source.
        block: longest sequence the run may come to; absent: that of the stretches. A stretch longer still is laid out
            anew, and may meet text that was read before.
        share: part of each source that is used, from its beginning on.
    Raises:
        ValueError: a length that does not divide the longest, or a source shorter than it.
    """
    longest = block or max(stretch.seq_len for stretch in stretches)
    parts: list[Part] = []
    for stretch in stretches:
        size = max(longest, stretch.seq_len)
        if size % stretch.seq_len:
            raise ValueError(
                f"seq_len {stretch.seq_len} from step {stretch.first_step} does not divide {size}, the longest context"
                " of the run, in blocks of which its text is laid out; choose a divisor"
            )
        counts = tuple(_num_blocks(count, block=size, share=share) for count in num_tokens)
        first = (0,) * len(counts)
        for before, after in zip(parts, stretches[1:], strict=False):
            if before.block == size:
                first = before.blocks_at(after.first_step)
        parts.append(Part(stretch, size, counts, first))
    return tuple(parts)


def _num_blocks(num_tokens: int, *, block: int, share: float) -> int:
    held = max(0, num_tokens - 1) // block
    if not held:
        raise ValueError(
            f"seq_len {block}: the training text, {num_tokens} tokens, has no window; lower it or add text"
        )
    return held if share >= 1.0 else max(1, round(held * share))


def check_budget(parts: Sequence[Part], *, steps: int, max_epochs: float, names: Sequence[str]) -> None:
    """
    Raises:
        ValueError: `steps` steps take more than `max_epochs` epochs of a source; says how many.
    """
    part = part_at(parts, max(0, steps - 1))
    for done, num_blocks, name in zip(part.blocks_at(steps), part.num_blocks, names, strict=True):
        if done > max_epochs * num_blocks:
            of = f" of source {name}" if len(names) > 1 else ""
            raise ValueError(
                f"steps {steps}: {done / num_blocks:.3f} epochs of {num_blocks} windows{of}, more than "
                f"max_epochs {max_epochs:g}; train on fewer tokens, add text, or raise max_epochs"
            )


def part_at(parts: Sequence[Part], step: int) -> Part:
    """The part that a step (from 0) belongs to."""
    return next(part for part in reversed(parts) if part.stretch.first_step <= step)


def epochs_read(parts: Sequence[Part], *, steps: int) -> tuple[float, ...]:
    """Passes over what may be read of each source, by the tokens that `steps` steps are trained on."""
    totals = [0.0] * len(parts[0].num_blocks)
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        last = steps if after is None else min(steps, after.stretch.first_step)
        for source, windows in enumerate(part.drawn(last)):
            totals[source] += windows / (part.per_block * part.num_blocks[source])
    return tuple(totals)
