"""A run's sources: their text as one corpus, and how many tokens each has to train on.

Counts bytes in plain Python, so that a plan can say how often a source is read. Imports neither jax nor NumPy.
"""

from functools import lru_cache
from pathlib import Path

from rungwise.ladder.home import make_folder, resolve_home
from rungwise.ladder.text.corpus import SHIPPED, Corpus, load_corpus, mix_corpora
from rungwise.ladder.text.data_config import DataConfig

DEFAULT_CORPUS = "python-docs"


def build_corpus(data: DataConfig) -> Corpus:
    """The one corpus that a run names, or its sources as one, each a subset.

    Raises:
        ValueError: as `load_corpus` and `mix_corpora`.
    """
    if not data.sources:
        return load_corpus(data.path or DEFAULT_CORPUS)
    paths = [source.path or DEFAULT_CORPUS for source in data.sources]
    corpora = {path: load_corpus(path) for path in set(paths)}
    return mix_corpora(
        (source.name, corpora[path], source.subsets) for source, path in zip(data.sources, paths, strict=True)
    )


def text_is_here(data: DataConfig) -> bool:
    """Whether every source can be read on this machine; a forecast may be made on another."""
    paths = [source.path or DEFAULT_CORPUS for source in data.sources]
    return all(path in SHIPPED or Path(path).expanduser().exists() for path in paths)


@lru_cache(maxsize=8)
def count_source_tokens(data: DataConfig, vocab_size: int) -> tuple[int, ...]:
    """Training tokens by source, in order of name, a separator a document included.

    Bytes are counted as they are; another tokenizer reads its text once, into the cache of the default home.
    """
    if data.tokenizer != "bytes":
        return _count_encoded(data, vocab_size)
    counts = dict.fromkeys(sorted(source.name for source in data.sources), 0)
    for document in build_corpus(data).split("train"):
        counts[document.subset] += 1 + len(document.text.encode())
    return tuple(counts.values())


def _count_encoded(data: DataConfig, vocab_size: int) -> tuple[int, ...]:
    from rungwise.ladder.text.batches import source_ranges  # here and not above: they load NumPy
    from rungwise.ladder.text.tokenizer import build_tokenizer, tokenize

    corpus, cache = build_corpus(data), make_folder(resolve_home(None) / "cache")
    tokenizer = build_tokenizer(corpus, kind=data.tokenizer, vocab_size=vocab_size, cache=cache)
    ranges = source_ranges(tokenize(corpus, tokenizer, cache=cache).train, len(data.sources))
    return tuple(end - begin for begin, end in ranges)
