"""The text of a run, ready to train on: corpus, tokenizer, batches and held-out windows together. Imports no jax."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rungwise.ladder.batches import Batches, HeldOut, check_budget, count_windows, held_out_windows
from rungwise.ladder.corpus import load_corpus
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import make_folder
from rungwise.ladder.tokenizer import Tokens, build_tokenizer, tokenize

DEFAULT_CORPUS = "python-docs"


class RunData(NamedTuple):
    """Text of a run, ready to train on."""

    batches: Batches
    held_out: HeldOut
    corpus_hash: str


def load_tokens(config: RunConfig, cache: Path) -> Tokens:
    """The run's corpus in its tokenizer's ids."""
    corpus = load_corpus(config.data.path or DEFAULT_CORPUS)
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
    return RunData(batches, held_out, tokens.corpus_hash)


def make_batches(config: RunConfig, tokens: Tokens) -> Batches:
    """Training batches of a run, in its own order."""
    return Batches(
        tokens,
        seq_len=config.model.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        max_epochs=config.data.max_epochs,
    )


def check_budgets(runs: Iterable[RunConfig], cache: Path) -> None:
    """Refuses a token budget that the text does not hold, before anything starts.

    Raises:
        ValueError: a run would see more epochs than its `max_epochs`; names the run.
    """
    known: dict[tuple[str | None, str, int], int] = {}
    for run in runs:
        key = (run.data.path, run.data.tokenizer, run.model.vocab_size)
        if key not in known:
            known[key] = load_tokens(run, cache).train.num_tokens
        try:
            check_budget(
                count_windows(known[key], seq_len=run.model.seq_len),
                steps=run.steps,
                batch_size=run.batch_size,
                max_epochs=run.data.max_epochs,
            )
        except ValueError as error:
            raise ValueError(f"run {run.run}: {error}") from error
