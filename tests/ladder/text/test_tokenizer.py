import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungwise.ladder.text.corpus import Corpus, Document, load_corpus
from rungwise.ladder.text.tokenizer import (
    bits_per_byte,
    bpe_tokenizer,
    build_tokenizer,
    byte_tokenizer,
    tokenize,
    train_bpe,
)

BPE_VOCAB = 320
BPE_HASH = "0299e61ed694cc57fd5c13016cd4de124705b20daebe70ba19c12607ceab8e4e"
"""Of `small_corpus`. A new value is right only if this corpus, or how tokenizers trains, changed."""

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def small_corpus(held_out: str = "The fourth text is held out, and never seen.") -> Corpus:
    train = [f"Document {i}: the theory of the thing, then the other things. Größe ×{i} → 二\n" for i in range(40)]
    documents = [Document(f"{i:02}", "ab"[i % 2], "train", text * 3) for i, text in enumerate(train)]
    held = [Document("h1", "a", "held_out", held_out), Document("h2", "b", "held_out", held_out[::-1])]
    return Corpus("small", (*documents, *held), sha256=str(hash(held_out)), licence="ours")


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "bpe": bpe_tokenizer(train_bpe(small_corpus(), vocab_size=BPE_VOCAB)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
def test_tokenizer_round_trip_is_exact(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
def test_tokenizer_accounts_for_every_byte_and_keeps_the_separator_free(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text)
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.separator not in tokens
    assert tokenizer.token_bytes[tokenizer.separator] == 1


def test_bpe_is_learnt_from_the_training_split_only() -> None:
    other = bpe_tokenizer(train_bpe(small_corpus("zzqq " * 500), vocab_size=BPE_VOCAB))
    assert other == TOKENIZERS["bpe"]


def test_bpe_is_the_recorded_one() -> None:
    assert TOKENIZERS["bpe"].hash == BPE_HASH
    assert TOKENIZERS["bpe"].vocab_size == BPE_VOCAB


def test_bpe_is_the_same_in_another_process() -> None:
    script = (
        "from rungwise.ladder.text.corpus import Corpus, Document\n"
        "from rungwise.ladder.text.tokenizer import bpe_tokenizer, train_bpe\n"
        "import json, sys\n"
        "documents = tuple(Document(*fields) for fields in json.load(sys.stdin))\n"
        f"print(bpe_tokenizer(train_bpe(Corpus('c', documents, '', ''), vocab_size={BPE_VOCAB})).hash)\n"
    )
    rows = json.dumps([(d.id, d.subset, d.split, d.text) for d in small_corpus().documents])
    environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-c", script]
    child = subprocess.run(command, input=rows, env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == BPE_HASH


@pytest.mark.parametrize(
    ("kind", "vocab_size", "message"),
    [
        ("bytes", 4096, "bytes have 256"),
        ("bpe", 255, "starts from 256"),
        ("bpe", 50_000, "corpus small yields .* lower it"),
    ],
)
def test_tokenizer_refuses_a_vocabulary_it_cannot_have(kind, vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(small_corpus(), kind=kind, vocab_size=vocab_size)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenize_opens_each_document_with_a_separator(kind: str) -> None:
    corpus, tokenizer = small_corpus(), TOKENIZERS[kind]
    tokens = tokenize(corpus, tokenizer)
    splits = (corpus.split("train"), tokens.train), (corpus.split("held_out"), tokens.held_out)
    for documents, stream in splits:
        assert np.flatnonzero(stream.tokens == tokenizer.separator).tolist() == stream.starts[:-1].tolist()
        assert stream.starts[-1] == stream.num_tokens
        found = {
            (stream.subsets[subset], tokenizer.decode(stream.tokens[begin + 1 : end]))
            for subset, begin, end in zip(stream.subset_ids, stream.starts, stream.starts[1:], strict=False)
        }
        assert found == {(document.subset, document.text) for document in documents}


def test_tokenize_orders_training_documents_neither_by_name_nor_by_subset() -> None:
    subsets = tokenize(small_corpus(), byte_tokenizer()).train.subset_ids
    assert 10 < np.count_nonzero(np.diff(subsets)) < 30  # of 39; sorted by subset 1, by name 39


def test_tokenize_reads_the_cache_the_second_time(tmp_path: Path) -> None:
    corpus = small_corpus()

    def build():
        tokenizer = build_tokenizer(corpus, kind="bpe", vocab_size=BPE_VOCAB, cache=tmp_path)
        return tokenizer, tokenize(corpus, tokenizer, cache=tmp_path)

    (first, written), files = build(), {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    (second, read), again = build(), {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert files == again
    assert len(files) == 3
    assert first == second
    assert np.array_equal(written.train.tokens, read.train.tokens)
    assert np.array_equal(written.held_out.tokens, tokenize(corpus, first).held_out.tokens)
    assert np.array_equal(read.train.starts, tokenize(corpus, first).train.starts)


def test_tokenize_refuses_a_cache_cut_short(tmp_path: Path) -> None:
    corpus, tokenizer = small_corpus(), TOKENIZERS["bpe"]
    tokenize(corpus, tokenizer, cache=tmp_path)
    (path,) = tmp_path.glob("tokens-*.npy")
    np.save(path, np.load(path)[:-1])
    with pytest.raises(ValueError, match=r"token cache .* delete it"):
        tokenize(corpus, tokenizer, cache=tmp_path)


def test_bits_per_byte_of_a_uniform_guess_is_the_same_in_every_tokenizer() -> None:
    """A guess that spends 8 bits on each byte costs token_bytes · 8 bits a token."""
    text = load_corpus("python-docs").documents[0].text
    for tokenizer in TOKENIZERS.values():
        lengths = tokenizer.token_bytes[tokenizer.encode(text)]
        loss = 8 * math.log(2) * lengths.mean()
        assert bits_per_byte(loss, bytes_per_token=lengths.mean()) == pytest.approx(8)
