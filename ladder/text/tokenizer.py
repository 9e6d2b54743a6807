"""Text to token ids and back: bytes, or byte-level BPE learnt from the training split, with a cache on disk.

Both cover every UTF-8 text exactly, know how many bytes each token stands for, and open a document with the
token of the zero byte, which no text contains. Windows and batches are the business of `batches.py`.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from rungwise.analysis.vocabulary import canonical_json
from rungwise.ladder.text.corpus import SPLIT_SALT, Corpus, Document, split_score

NUM_BYTES: Final = 256

_LAYOUT: Final = "1"
"""Part of a cached stream's key: change it with the order or separation of documents."""


@dataclass(frozen=True)
class Tokenizer:
    """What models and metrics need to know of a tokenizer; made by `byte_tokenizer` and `bpe_tokenizer`.

    Args:
        separator: id that opens each document.
        hash: identity, for caches and checkpoints.
        token_bytes: UTF-8 bytes each token stands for.
        encode: text → ids.
        decode: its inverse; bytes that are not UTF-8 (a character cut in two) become U+FFFD.
    """

    vocab_size: int
    separator: int
    hash: str
    token_bytes: Int[np.ndarray, " vocab"] = field(repr=False, compare=False)
    encode: Callable[[str], Int[np.ndarray, " tokens"]] = field(repr=False, compare=False)
    decode: Callable[[np.ndarray], str] = field(repr=False, compare=False)


def byte_tokenizer() -> Tokenizer:
    """A token is a byte.

    >>> byte_tokenizer().encode("é").tolist()
    [195, 169]
    """
    return Tokenizer(
        vocab_size=NUM_BYTES,
        separator=0,
        hash="bytes",
        token_bytes=np.ones(NUM_BYTES, np.int32),
        encode=lambda text: np.frombuffer(text.encode(), np.uint8),
        decode=lambda tokens: np.asarray(tokens, np.uint8).tobytes().decode(errors="replace"),
    )


def bpe_tokenizer(model: tokenizers.Tokenizer) -> Tokenizer:
    """Byte-level BPE: its alphabet is the 256 bytes, one character each, so that nothing is ever unknown."""
    vocabulary = model.get_vocab()
    merges = json.loads(model.to_str())["model"]["merges"]
    token_bytes = np.zeros(len(vocabulary), np.int32)
    for token, index in vocabulary.items():
        token_bytes[index] = len(token)
    dtype = smallest_dtype(len(vocabulary))
    return Tokenizer(
        vocab_size=len(vocabulary),
        separator=vocabulary["Ā"],  # how the byte-level alphabet writes zero
        hash=hashlib.sha256(canonical_json([vocabulary, merges]).encode()).hexdigest(),
        token_bytes=token_bytes,
        encode=lambda text: np.asarray(model.encode(text).ids, dtype),
        decode=lambda tokens: model.decode(np.asarray(tokens).tolist()),
    )


@dataclass(frozen=True)
class Stream:
    """Documents back to back, each opened by a separator.

    Args:
        tokens: ids, in the smallest unsigned type that holds the vocabulary.
        starts: where each document begins, and the stream's length.
        subset_ids: index into `subsets` by document.
    """

    tokens: Int[np.ndarray, " tokens"] = field(repr=False)
    starts: Int[np.ndarray, " documents+1"] = field(repr=False)
    subset_ids: Int[np.ndarray, " documents"] = field(repr=False)
    subsets: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Tokens:
    """A corpus in one tokenizer's ids: the stream that is trained on and the one that never is."""

    train: Stream
    held_out: Stream
    tokenizer: Tokenizer
    corpus_hash: str


def build_tokenizer(
    corpus: Corpus, *, kind: Literal["bytes", "bpe"], vocab_size: int = NUM_BYTES, cache: Path | None = None
) -> Tokenizer:
    """The tokenizer a family names. A BPE is learnt once per corpus and vocabulary, then read from `cache`.

    Raises:
        ValueError: a vocabulary other than 256 for bytes, or as `train_bpe`.
    """
    if kind == "bytes":
        if vocab_size != NUM_BYTES:
            raise ValueError(f"vocab_size {vocab_size}: bytes have {NUM_BYTES}; set that, or tokenizer 'bpe'")
        return byte_tokenizer()
    path = cache and cache / f"bpe-{vocab_size}-{corpus.sha256[:16]}.json"
    if path and path.exists():
        return bpe_tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    model = train_bpe(corpus, vocab_size=vocab_size)
    if path:
        _write_whole(path, lambda file: file.write(model.to_str().encode()))
    return bpe_tokenizer(model)


def train_bpe(corpus: Corpus, *, vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens from the training split, the same for the same corpus.

    Raises:
        ValueError: `vocab_size` below 256, or more than the corpus has repeated pairs for.
    Source: GPT-2's byte-level BPE and its rule for where a word begins, as in Hugging Face tokenizers.
    """
    if vocab_size < NUM_BYTES:
        raise ValueError(f"vocab_size {vocab_size}: byte-level BPE starts from {NUM_BYTES} bytes; raise it")
    model: Any = tokenizers.Tokenizer(BPE())
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteLevelDecoder()
    options: dict[str, Any] = {"vocab_size": vocab_size, "initial_alphabet": ByteLevel.alphabet()}
    trainer = BpeTrainer(show_progress=False, **options)
    model.train_from_iterator((document.text for document in corpus.split("train")), trainer)
    found = model.get_vocab_size()
    if found < vocab_size:
        raise ValueError(f"vocab_size {vocab_size}: corpus {corpus.name} yields {found} tokens; lower it")
    return model


def tokenize(corpus: Corpus, tokenizer: Tokenizer, *, cache: Path | None = None) -> Tokens:
    """Both splits as token streams; with `cache`, encoded once per corpus and tokenizer, then memory-mapped.

    Training documents follow in order of `split_score`, as good as shuffled, in a mixed corpus source by source;
    held-out ones subset by subset.
    """
    train = sorted(corpus.split("train"), key=lambda document: split_score(document.id))
    if corpus.is_mixed:
        train.sort(key=lambda document: document.subset)
    held_out = sorted(corpus.split("held_out"), key=lambda document: document.subset)
    tokens, lengths = _encode_cached([*train, *held_out], corpus, tokenizer, cache)
    border = int(lengths[: len(train)].sum())
    return Tokens(
        train=_build_stream(train, tokens[:border], lengths[: len(train)]),
        held_out=_build_stream(held_out, tokens[border:], lengths[len(train) :]),
        tokenizer=tokenizer,
        corpus_hash=corpus.sha256,
    )


def bits_per_byte(loss: float, *, bytes_per_token: float) -> float:
    """Loss in bits per UTF-8 byte of text, comparable across tokenizers.

    bits = loss / (ln 2 · bytes_per_token)

    Args:
        loss: nats per token.
        bytes_per_token: of the text the loss was measured on (`HeldOut.bytes_per_token`).

    >>> round(bits_per_byte(math.log(256), bytes_per_token=1.0), 6)
    8.0
    """
    return loss / (math.log(2) * bytes_per_token)


def smallest_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """
    >>> smallest_dtype(256), smallest_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.min_scalar_type(vocab_size - 1)


def _build_stream(documents: Sequence[Document], tokens: np.ndarray, lengths: np.ndarray) -> Stream:
    subsets = tuple(sorted({document.subset for document in documents}))
    index = {subset: position for position, subset in enumerate(subsets)}
    return Stream(
        tokens=tokens,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        subset_ids=np.array([index[document.subset] for document in documents], np.int32),
        subsets=subsets,
    )


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All documents in one array, and the tokens of each, separator included."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    separator = np.array([tokenizer.separator], dtype)
    pieces = [np.concatenate([separator, tokenizer.encode(document.text)]) for document in documents]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return np.concatenate(pieces).astype(dtype, copy=False), lengths


def _encode_cached(
    documents: Sequence[Document], corpus: Corpus, tokenizer: Tokenizer, cache: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    if cache is None or tokenizer == byte_tokenizer():  # bytes are read as fast from the corpus
        return _encode(documents, tokenizer)
    identity = "/".join((_LAYOUT, SPLIT_SALT, corpus.sha256, tokenizer.hash))
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    tokens_path, lengths_path = cache / f"tokens-{key}.npy", cache / f"lengths-{key}.npy"
    if not lengths_path.exists():  # written last, so that its presence vouches for both
        tokens, lengths = _encode(documents, tokenizer)
        _write_whole(tokens_path, lambda file: np.save(file, tokens))
        _write_whole(lengths_path, lambda file: np.save(file, lengths))
    tokens, lengths = np.asarray(np.load(tokens_path, mmap_mode="r")), np.load(lengths_path)
    if len(lengths) != len(documents) or lengths.sum() != len(tokens):
        raise ValueError(f"token cache {tokens_path}: not of corpus {corpus.name}; delete it and {lengths_path}")
    return tokens, lengths


def _write_whole(path: Path, write: Any) -> None:
    """A file that is either absent or complete, also when several runs write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        write(file)
    unfinished.replace(path)
