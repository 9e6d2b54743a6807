"""Which window of tokens is seen at which step, and the fixed held-out windows of evaluation.

A window is `seq_len` inputs and, shifted by one, their targets. Windows tile each source's text, so each token is a
target once an epoch. A batch is a function of (seed, step): resuming needs no loader state. The shuffle is Grain's.

Where the length changes on the way, text is laid out in blocks of the longest one from the start (`mixture.py`).
A shorter length cuts blocks into windows and mixes those of a group of blocks; the next length goes on with blocks not
begun.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from rungwise.ladder.text.mixture import Part, Stretch, check_budget, epochs_read, group_size, lay_out, part_at
from rungwise.ladder.text.tokenizer import Stream, Tokens


class SourceOrder:
    """One source's blocks in the order in which a run reads them, without end: epoch after epoch.

    Args:
        begin: where the source's text begins in the stream.
        block: tokens of a block.
    """

    def __init__(self, begin: int, num_blocks: int, *, block: int, seed: int) -> None:
        import grain  # here and not above: it loads jax (1.3 s), and planning needs only the counts

        self._begin, self._block, self._num_blocks = begin, block, num_blocks
        # Grain shuffles epoch e with seed + e: spread seeds, or seed 1 would begin with seed 0's second epoch
        self._spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order: Any = grain.MapDataset.range(num_blocks).shuffle(seed=self._spread)

    def start(self, ordinal: int, *, first_block: int, seq_len: int) -> int:
        """Position in the stream of a stretch's window number `ordinal`.

        Args:
            first_block: where the stretch begins in this order.
        """
        per_block = self._block // seq_len
        if per_block == 1:
            return self._begin + self._order[first_block + ordinal] * self._block
        left = self._num_blocks - first_block % self._num_blocks
        if ordinal >= left * per_block:  # whole epochs follow the rest of the one begun
            whole, ordinal = divmod(ordinal - left * per_block, self._num_blocks * per_block)
            first_block, left = first_block + left + whole * self._num_blocks, self._num_blocks
        size = group_size(self._num_blocks)
        group, within = divmod(ordinal, size * per_block)
        first_block, size = first_block + group * size, min(size, left - group * size)
        lanes, pieces = _group_order(self._spread, first_block, size, per_block)
        turn, place = divmod(within, size)
        lane = int(lanes[turn, place])
        return self._begin + self._order[first_block + lane] * self._block + int(pieces[lane, turn]) * seq_len


@lru_cache(maxsize=64)
def _group_order(
    seed: int, first_block: int, size: int, per_block: int
) -> tuple[Int[np.ndarray, "turns blocks"], Int[np.ndarray, "blocks turns"]]:
    """Windows of a group of blocks: in each turn every block comes once, in another order, with another piece of it."""
    generator = np.random.default_rng([seed, first_block, per_block])
    lanes = generator.permuted(np.tile(np.arange(size), (per_block, 1)), axis=1)
    return lanes, generator.permuted(np.tile(np.arange(per_block), (size, 1)), axis=1)


class Batches:
    """Training batches by random access, over all stretches of a run.

    In a run without phases step s reads windows [s·batch_size, (s+1)·batch_size) of one order: a permutation of all
    windows, another one for each epoch and seed. It does not depend on `batch_size`: runs that share seed and `seq_len`
    read the same windows in the same order. A batch may span the end of an epoch.

    Args:
        stretches: in order, the first from step 0. Batch sizes are of whole steps, over all ranks; a rank takes rows.
        max_epochs: passes over each source that are allowed; text is repeated on request, never by accident.
        block, share: as `lay_out`.
    Raises:
        ValueError: a count below 1, a negative seed, or as `lay_out`.
    """

    def __init__(
        self,
        tokens: Tokens,
        stretches: Sequence[Stretch],
        *,
        seed: int,
        max_epochs: float = 1.0,
        block: int | None = None,
        share: float = 1.0,
    ) -> None:
        _check_at_least(0, seed=seed)
        for stretch in stretches:
            _check_at_least(1, seq_len=stretch.seq_len, batch_size=stretch.batch_size)
        self._stream, self._seed, self.max_epochs = tokens.train, seed, max_epochs
        ranges = source_ranges(tokens.train, len(stretches[0].weights))
        self.parts = lay_out(stretches, [end - begin for begin, end in ranges], block=block, share=share)
        self._starts: dict[int, Int[np.ndarray, " batch"]] = {}
        foreseen = self.parts[0].block
        self._orders = {
            part.block: [  # a block that was not foreseen has an order of its own
                SourceOrder(begin, count, block=part.block, seed=seed + (part.block - foreseen) * 2**40)
                for (begin, _), count in zip(ranges, part.num_blocks, strict=True)
            ]
            for part in self.parts
        }

    def part_at(self, step: int) -> Part:
        """The stretch that a step belongs to, and its place in the text."""
        return part_at(self.parts, step)

    def batch(self, step: int) -> Int[np.ndarray, "batch seq_len+1"]:
        """int32 ids of the batch that optimizer step `step` (from 0) consumes.

        Raises:
            ValueError: a negative step, or one past `max_epochs`.
        """
        starts = self.window_starts(step)
        offsets = np.arange(self.part_at(step).stretch.seq_len + 1)
        return self._stream.tokens[starts[:, None] + offsets].astype(np.int32)

    def window_starts(self, step: int) -> Int[np.ndarray, " batch"]:
        """Position of each of the batch's windows in the training stream, in tokens.

        Several sources come in an order drawn for the step: a rank takes the same rows each time, and not one source.
        """
        if step not in self._starts:
            if len(self._starts) == 2:  # the step that is computed and the one that is recorded meanwhile
                del self._starts[min(self._starts)]
            self._starts[step] = self._find_starts(step)
        return self._starts[step]

    def _find_starts(self, step: int) -> Int[np.ndarray, " batch"]:
        _check_at_least(0, step=step)
        self.check_budget(step + 1)
        part = self.part_at(step)
        orders, seq_len = self._orders[part.block], part.stretch.seq_len
        starts = np.array(
            [
                orders[source].start(ordinal, first_block=part.first_blocks[source], seq_len=seq_len)
                for source, ordinal in part.slots(step)
            ],
            np.int64,
        )
        return starts if len(orders) == 1 else np.random.default_rng([self._seed, step]).permutation(starts)

    def epochs(self, steps: int) -> tuple[float, ...]:
        """Passes over each source that `steps` steps make."""
        return epochs_read(self.parts, steps=steps)

    def check_budget(self, steps: int) -> None:
        """
        Raises:
            ValueError: `steps` steps take more than `max_epochs` epochs of a source; says how many.
        """
        names = self._stream.subsets if len(self.parts[0].num_blocks) > 1 else ("text",)
        check_budget(self.parts, steps=steps, max_epochs=self.max_epochs, names=names)

    def source_fractions(self, step: int) -> dict[str, float]:
        """Share of the batch's target tokens that comes from each subset; they sum to 1."""
        starts, seq_len = self.window_starts(step), self.part_at(step).stretch.seq_len
        first, last = (self._documents(starts + offset) for offset in (1, seq_len))
        whole = first == last  # most windows lie in one document
        others = self._documents((starts[~whole, None] + np.arange(1, seq_len + 1)).ravel())
        names, ids = self._stream.subsets, self._stream.subset_ids
        counts = seq_len * np.bincount(ids[first[whole]], minlength=len(names))
        counts = counts + np.bincount(ids[others], minlength=len(names))
        return dict(zip(names, (counts / (len(starts) * seq_len)).tolist(), strict=True))

    def _documents(self, positions: Int[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"]:
        """The document that each position of the stream lies in."""
        return np.searchsorted(self._stream.starts, positions, side="right") - 1

    def documents_per_window(self, step: int = 0) -> float:
        """Mean number of documents that a window's inputs touch: routing skew, and so drops, depend on it."""
        return mean_documents(self._stream, seq_len=self.part_at(step).stretch.seq_len)


def uniform_batches(tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, max_epochs: float = 1.0) -> Batches:
    """Batches of a run without phases, from all text alike."""
    return Batches(tokens, [Stretch(0, seq_len, batch_size)], seed=seed, max_epochs=max_epochs)


def source_ranges(stream: Stream, num_sources: int) -> list[tuple[int, int]]:
    """Where each source's text begins and ends: one is everything; several are the subsets, which lie one by one.

    Raises:
        ValueError: other than `num_sources` subsets have text to train on.
    """
    if num_sources == 1:
        return [(0, stream.num_tokens)]
    if len(stream.subsets) != num_sources:
        raise ValueError(f"sources: {num_sources} are mixed, but text to train on has only {', '.join(stream.subsets)}")
    ranges = []
    for subset in range(num_sources):
        (documents,) = np.nonzero(stream.subset_ids == subset)
        ranges.append((int(stream.starts[documents[0]]), int(stream.starts[documents[-1] + 1])))
    return ranges


@dataclass(frozen=True)
class HeldOut:
    """The evaluation set.

    Args:
        windows: int32 ids; no window holds two subsets.
        subset_ids: index into `subsets` by window. A subset too small for a window is not among `subsets`.
        num_bytes: UTF-8 bytes that each window's targets stand for; a separator counts as one.
    """

    windows: Int[np.ndarray, "windows seq_len+1"] = field(repr=False)
    subset_ids: Int[np.ndarray, " windows"] = field(repr=False)
    subsets: tuple[str, ...]
    num_bytes: Int[np.ndarray, " windows"] = field(repr=False)

    @property
    def bytes_per_token(self) -> float:
        return float(self.num_bytes.mean() / (self.windows.shape[1] - 1))


def held_out_windows(tokens: Tokens, *, seq_len: int, count: int | None = None) -> HeldOut:
    """The same windows for every rung, seed and batch size: all there are, or `count` of them evenly spaced.

    Windows tile each subset's held-out documents; a tail shorter than a window is left out.

    Raises:
        ValueError: the held-out text has no window, or fewer than `count`.
    """
    _check_at_least(1, seq_len=seq_len)
    stream = tokens.held_out
    starts, subset_ids = [], []
    for subset in range(len(stream.subsets)):
        documents = np.flatnonzero(stream.subset_ids == subset)  # adjacent: `tokenize` orders them by subset
        begin, end = stream.starts[documents[0]], stream.starts[documents[-1] + 1]
        num_windows = count_windows(int(end - begin), seq_len=seq_len)
        starts.append(begin + seq_len * np.arange(num_windows))
        subset_ids.append(np.full(num_windows, subset))
    starts, subset_ids = np.concatenate(starts), np.concatenate(subset_ids)
    if len(starts) == 0:
        raise ValueError(_too_short("held-out", stream.num_tokens, seq_len))
    count = len(starts) if count is None else count
    if not 1 <= count <= len(starts):
        raise ValueError(f"held-out count {count}: the held-out text has {len(starts)} windows; ask for 1 to that many")
    chosen = (2 * np.arange(count) + 1) * len(starts) // (2 * count)
    windows = stream.tokens[starts[chosen, None] + np.arange(seq_len + 1)].astype(np.int32)
    present, subset_ids = np.unique(subset_ids[chosen], return_inverse=True)
    return HeldOut(
        windows=windows,
        subset_ids=subset_ids.astype(np.int32),
        subsets=tuple(stream.subsets[subset] for subset in present),
        num_bytes=tokens.tokenizer.token_bytes[windows[:, 1:]].sum(axis=1),
    )


def count_windows(num_tokens: int, *, seq_len: int) -> int:
    """Windows that a stream holds, each beginning on the final target of the one before.

    >>> count_windows(257, seq_len=256), count_windows(256, seq_len=256)
    (1, 0)
    """
    return max(0, num_tokens - 1) // seq_len


def mean_documents(stream: Stream, *, seq_len: int) -> float:
    """Mean number of documents that a window's inputs touch: 1 + documents begun inside ÷ windows."""
    num_windows = count_windows(stream.num_tokens, seq_len=seq_len)
    begins = stream.starts[stream.starts < num_windows * seq_len]
    return 1.0 + np.count_nonzero(begins % seq_len) / num_windows


def _check_at_least(least: int, **fields: int) -> None:
    for name, value in fields.items():
        if value < least:
            raise ValueError(f"{name} {value}: must be at least {least}")


def _too_short(which: str, num_tokens: int, seq_len: int) -> str:
    return f"seq_len {seq_len}: the {which} text, {num_tokens} tokens, has no window; lower it or add text"
