"""The text of a run, ready to train on: corpus, tokenizer, batches and held-out windows together. Imports no jax."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rungwise.ladder.changing.phases import longest_context, planned_stretches, source_names
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import make_folder
from rungwise.ladder.text.batches import Batches, HeldOut, held_out_windows, source_ranges
from rungwise.ladder.text.mixture import Stretch, check_budget, lay_out
from rungwise.ladder.text.sources import build_corpus
from rungwise.ladder.text.tokenizer import Tokens, build_tokenizer, tokenize


class RunData(NamedTuple):
    """Text of a run, ready to train on."""

    tokens: Tokens
    batches: Batches
    held_out: HeldOut
    corpus_hash: str


def load_tokens(config: RunConfig, cache: Path) -> Tokens:
    """The run's corpus in its tokenizer's ids."""
    corpus = build_corpus(config.data)
    tokenizer = build_tokenizer(
        corpus, kind=config.data.tokenizer, vocab_size=config.model.vocab_size, cache=make_folder(cache)
    )
    return tokenize(corpus, tokenizer, cache=cache)


def load_data(config: RunConfig, cache: Path) -> RunData:
    """Batches and held-out windows of a run.

    Raises:
        ValueError: the corpus is empty, or shorter than the token budget allows.
    """
    tokens = load_tokens(config, cache)
    batches = make_batches(config, tokens)
    batches.check_budget(config.steps)
    held_out = held_out_windows(tokens, seq_len=config.model.seq_len, count=config.evaluation.num_sequences)
    return RunData(tokens, batches, held_out, tokens.corpus_hash)


def make_batches(config: RunConfig, tokens: Tokens, stretches: Sequence[Stretch] | None = None) -> Batches:
    """Training batches of a run, in its own order.

    Args:
        stretches: how batches are made from which step on; absent: as the run's phases are planned.
    """
    return Batches(
        tokens,
        stretches or planned_stretches(config),
        seed=config.seed,
        max_epochs=config.data.max_epochs,
        block=longest_context(config),
        share=config.text_share,
    )


def check_budgets(runs: Iterable[RunConfig], cache: Path) -> None:
    """Refuses a token budget that the text does not hold, before anything starts.

    Raises:
        ValueError: a run would see more epochs than its `max_epochs`; names the run.
    """
    known: dict[tuple[object, ...], list[int]] = {}
    for run in runs:
        names = source_names(run)
        key = (run.data.path, run.data.sources, run.data.tokenizer, run.model.vocab_size)
        if key not in known:
            ranges = source_ranges(load_tokens(run, cache).train, len(names))
            known[key] = [end - begin for begin, end in ranges]
        try:
            parts = lay_out(planned_stretches(run), known[key], block=longest_context(run), share=run.text_share)
            check_budget(parts, steps=run.steps, max_epochs=run.data.max_epochs, names=names)
        except ValueError as error:
            raise ValueError(f"run {run.run}: {error}") from error
