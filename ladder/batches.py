"""Which window of tokens is seen at which step, and the fixed held-out windows of evaluation.

A window is `seq_len` inputs and, shifted by one, their targets. They tile the stream (stride `seq_len`), so
each token is a target once an epoch. A batch is a function of (seed, step): resuming needs no loader state.
The shuffle is Grain's.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from rungwise.ladder.tokenizer import Stream, Tokens


class Batches:
    """Training batches by random access: step s reads windows [s·batch_size, (s+1)·batch_size) of one order.

    The order is a permutation of all windows, another one for each epoch and seed. It does not depend on
    `batch_size`: runs that share seed and `seq_len` read the same windows in the same order. A batch may span
    the end of an epoch.

    Args:
        batch_size: sequences of the whole step, over all ranks; a rank takes its rows.
        max_epochs: passes over the text that are allowed; text is repeated on request, never by accident.
    Raises:
        ValueError: a count below 1, a negative seed, or a corpus shorter than one window.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, max_epochs: float = 1.0) -> None:
        _check_at_least(1, seq_len=seq_len, batch_size=batch_size)
        _check_at_least(0, seed=seed)
        import grain  # here and not above: it loads jax (1.3 s), and planning needs only the counts

        self._stream = tokens.train
        self._offsets = np.arange(seq_len + 1)
        self.seq_len, self.batch_size, self.max_epochs = seq_len, batch_size, max_epochs
        self.num_windows = count_windows(tokens.train.num_tokens, seq_len=seq_len)
        if self.num_windows < 1:
            raise ValueError(_too_short("training", tokens.train.num_tokens, seq_len))
        # Grain shuffles epoch e with seed + e: spread seeds, or seed 1 would begin with seed 0's second epoch
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = grain.MapDataset.range(self.num_windows).shuffle(seed=spread)

    def batch(self, step: int) -> Int[np.ndarray, "batch seq_len+1"]:
        """int32 ids of the batch that optimizer step `step` (from 0) consumes.

        Raises:
            ValueError: a negative step, or one past `max_epochs`.
        """
        starts = self.window_indices(step) * self.seq_len
        return self._stream.tokens[starts[:, None] + self._offsets].astype(np.int32)

    def window_indices(self, step: int) -> Int[np.ndarray, " batch"]:
        """Place of each of the batch's windows in the training stream, in windows."""
        _check_at_least(0, step=step)
        self.check_budget(step + 1)
        first = step * self.batch_size
        return np.array([self._order[i] for i in range(first, first + self.batch_size)], np.int64)

    def epochs(self, steps: int) -> float:
        """Passes over the training text that `steps` steps make."""
        return steps * self.batch_size / self.num_windows

    def check_budget(self, steps: int) -> None:
        """
        Raises:
            ValueError: `steps` steps are more than `max_epochs` epochs.
        """
        check_budget(self.num_windows, steps=steps, batch_size=self.batch_size, max_epochs=self.max_epochs)

    def source_fractions(self, step: int) -> dict[str, float]:
        """Share of the batch's target tokens that comes from each subset; they sum to 1."""
        targets = self.window_indices(step)[:, None] * self.seq_len + self._offsets[1:]
        documents = np.searchsorted(self._stream.starts, targets.ravel(), side="right") - 1
        counts = np.bincount(self._stream.subset_ids[documents], minlength=len(self._stream.subsets))
        return dict(zip(self._stream.subsets, (counts / targets.size).tolist(), strict=True))

    @property
    def documents_per_window(self) -> float:
        """Mean number of documents that a window's inputs touch: routing skew, and so drops, depend on it."""
        return mean_documents(self._stream, seq_len=self.seq_len)


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


def check_budget(num_windows: int, *, steps: int, batch_size: int, max_epochs: float) -> None:
    """
    Raises:
        ValueError: `steps` steps are more than `max_epochs` epochs; says how many they are.
    """
    if steps * batch_size > max_epochs * num_windows:
        raise ValueError(
            f"steps {steps}: {steps * batch_size / max(num_windows, 1):.3f} epochs of {num_windows} windows, more than "
            f"max_epochs {max_epochs:g}; train on fewer tokens, add text, or raise max_epochs"
        )


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
