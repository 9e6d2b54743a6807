import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.ladder.text.batches import count_windows, held_out_windows, uniform_batches
from rungwise.ladder.text.corpus import Corpus, Document, Record, choose_held_out, load_corpus
from rungwise.ladder.text.tokenizer import Tokens, byte_tokenizer, tokenize

GOLDEN = {0: "cffd7cfcc13ac08a", 1000: "c9e4feec38031fc2"}
"""step → start of sha256 of `batch(step)`: shipped corpus, bytes, 16 × 257, seed 0, on every Python and jax.
A new value ends comparability with older runs: right only with a new corpus or shuffle."""
GOLDEN_HELD_OUT = "ea3ef4e4da469633"

few = settings(max_examples=25)
"""Grain's shuffle takes milliseconds an item where there are only a dozen."""
lengths = st.lists(st.integers(1, 90), min_size=2, max_size=40)
seeds = st.integers(0, 2**40)


def digest(array: np.ndarray) -> str:
    assert array.dtype == np.int32
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def tokens_of(sizes: list[int]) -> Tokens:
    """Document i is its own character, `sizes[i]` times; three subsets."""
    records = [Record(f"doc-{i}", "abc"[i % 3], chr(0x21 + i) * size) for i, size in enumerate(sizes)]
    held = choose_held_out(records)
    documents = (Document(r.id, r.subset, "held_out" if r.id in held else "train", r.text) for r in records)
    return tokenize(Corpus("small", tuple(documents), "", ""), byte_tokenizer())


def twelve_windows() -> Tokens:
    """Twelve windows of four tokens."""
    text = "".join(chr(0x21 + i) for i in range(48))
    held = Document("h", "a", "held_out", "held out text")
    documents = (Document("t", "a", "train", text), held)
    return tokenize(Corpus("twelve", documents, "", ""), byte_tokenizer())


@pytest.fixture(scope="module")
def shipped() -> Tokens:
    return tokenize(load_corpus("python-docs"), byte_tokenizer())


def test_batch_of_the_shipped_corpus_is_the_recorded_one(shipped: Tokens) -> None:
    batches = uniform_batches(shipped, seq_len=256, batch_size=16, seed=0)
    assert {step: digest(batches.batch(step)) for step in GOLDEN} == GOLDEN
    assert batches.parts[0].num_blocks == (40_701,)
    assert digest(held_out_windows(shipped, seq_len=256, count=512).windows) == GOLDEN_HELD_OUT


def test_batch_is_the_same_in_another_process() -> None:
    script = (
        "import hashlib\n"
        "from rungwise.ladder.text.batches import uniform_batches\n"
        "from rungwise.ladder.text.corpus import load_corpus\n"
        "from rungwise.ladder.text.tokenizer import byte_tokenizer, tokenize\n"
        "tokens = tokenize(load_corpus('python-docs'), byte_tokenizer())\n"
        "batch = uniform_batches(tokens, seq_len=256, batch_size=16, seed=0).batch(1000)\n"
        "print(hashlib.sha256(batch.tobytes()).hexdigest()[:16])\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    child = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == GOLDEN[1000]


def test_batch_never_holds_held_out_text_of_the_shipped_corpus(shipped: Tokens) -> None:
    """Every training window lies in the training stream, which holds training documents only."""
    corpus = load_corpus("python-docs")
    decode = byte_tokenizer().decode
    trained = decode(shipped.train.tokens)
    assert trained.split("\0")[1:] == [
        decode(shipped.train.tokens[begin + 1 : end])
        for begin, end in zip(shipped.train.starts, shipped.train.starts[1:], strict=False)
    ]
    assert set(trained.split("\0")[1:]) == {document.text for document in corpus.split("train")}
    assert not any(document.text in trained for document in corpus.split("held_out"))


@few
@given(lengths, st.integers(1, 8), seeds)
def test_batch_never_holds_held_out_text(sizes: list[int], seq_len: int, seed: int) -> None:
    tokens = tokens_of(sizes)
    if count_windows(tokens.train.num_tokens, seq_len=seq_len) == 0:
        return
    batches = uniform_batches(tokens, seq_len=seq_len, batch_size=1, seed=seed)
    seen = np.concatenate([batches.batch(step) for step in range(batches.parts[0].num_blocks[0])])
    assert not (set(seen.ravel().tolist()) & set(tokens.held_out.tokens.tolist())) - {0}


@few
@given(lengths, st.integers(1, 8), st.integers(1, 5), seeds)
def test_batch_shows_each_target_once_an_epoch(sizes: list[int], seq_len: int, batch_size: int, seed: int) -> None:
    tokens = tokens_of(sizes)
    num_windows = count_windows(tokens.train.num_tokens, seq_len=seq_len)
    if num_windows == 0:
        return
    batches = uniform_batches(tokens, seq_len=seq_len, batch_size=batch_size, seed=seed, max_epochs=9)
    steps = -(-3 * num_windows // batch_size)
    order = np.concatenate([batches.window_starts(step) // seq_len for step in range(steps)])[: 3 * num_windows]
    for epoch in order.reshape(3, num_windows):
        assert sorted(epoch.tolist()) == list(range(num_windows))
    windows = np.concatenate([batches.batch(step) for step in range(steps)])[:num_windows]
    stream = windows[np.argsort(order[:num_windows])]
    assert stream[:, :-1].ravel().tolist() == tokens.train.tokens[: num_windows * seq_len].tolist()
    assert stream[:, 1:].ravel().tolist() == tokens.train.tokens[1 : num_windows * seq_len + 1].tolist()


@few
@given(st.integers(1, 6), st.integers(1, 6), seeds)
def test_batch_order_does_not_depend_on_batch_size(one: int, other: int, seed: int) -> None:
    tokens = twelve_windows()
    orders = [
        np.concatenate([batches.window_starts(step) for step in range(24 // batches.parts[0].stretch.batch_size)])
        for batches in (uniform_batches(tokens, seq_len=4, batch_size=b, seed=seed, max_epochs=2) for b in (one, other))
    ]
    shared = min(map(len, orders))
    assert orders[0][:shared].tolist() == orders[1][:shared].tolist()


def test_batch_order_differs_between_seeds_and_epochs(shipped: Tokens) -> None:
    """Also across both: seed 1 must not begin with the second epoch of seed 0."""
    orders = {}
    for seed in range(4):
        batches = uniform_batches(shipped, seq_len=4096, batch_size=1, seed=seed, max_epochs=3)
        (num_windows,) = batches.parts[0].num_blocks
        for epoch in range(3):
            steps = range(epoch * num_windows, epoch * num_windows + 20)
            orders[seed, epoch] = tuple(int(batches.window_starts(step)[0]) for step in steps)
    assert len(set(orders.values())) == len(orders)


def test_batch_continues_after_a_resume_in_the_middle_of_the_second_epoch() -> None:
    """Twelve windows in batches of two, a crash after step 7: step 8 is the third batch of epoch 1.

    Not the third of epoch 0 (the epoch counter reset) and not the first of epoch 0 (the loader restarted).
    """
    straight, resumed = (
        uniform_batches(twelve_windows(), seq_len=4, batch_size=2, seed=3, max_epochs=2) for _ in range(2)
    )
    ids = [straight.window_starts(step).tolist() for step in range(12)]
    first, second = np.concatenate(ids[:6]).tolist(), np.concatenate(ids[6:]).tolist()
    assert sorted(first) == sorted(second) == list(range(0, 48, 4))
    assert first != second

    assert [resumed.window_starts(step).tolist() for step in range(8, 12)] == ids[8:]
    assert ids[8] == second[4:6]
    assert ids[8] not in (first[4:6], first[0:2])
    for step in range(8, 12):
        assert np.array_equal(resumed.batch(step), straight.batch(step))
    halves = [straight.batch(8)[:1], straight.batch(8)[1:]]  # two hosts take rows; one host takes both
    assert np.array_equal(np.concatenate(halves), resumed.batch(8))


def test_budget_of_more_than_an_epoch_is_refused_with_its_number_of_epochs() -> None:
    batches = uniform_batches(twelve_windows(), seq_len=4, batch_size=2, seed=0)
    batches.check_budget(6)
    assert batches.epochs(9) == (1.5,)
    with pytest.raises(ValueError, match=r"steps 9: 1\.500 epochs of 12 windows.*raise max_epochs"):
        batches.check_budget(9)
    with pytest.raises(ValueError, match="epochs of 12 windows"):
        batches.batch(6)
    uniform_batches(twelve_windows(), seq_len=4, batch_size=2, seed=0, max_epochs=1.5).check_budget(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len 0: must be at least 1"),
        ({"batch_size": 0}, "batch_size 0: must be at least 1"),
        ({"seed": -1}, "seed -1: must be at least 0"),
        ({"seq_len": 49}, "the training text, 49 tokens, has no window"),
    ],
)
def test_batches_refuse_what_they_cannot_give(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        uniform_batches(twelve_windows(), **{"seq_len": 4, "batch_size": 2, "seed": 0} | change)
    with pytest.raises(ValueError, match="step -1"):
        uniform_batches(twelve_windows(), seq_len=4, batch_size=2, seed=0).batch(-1)


@few
@given(lengths, st.integers(1, 40))
def test_documents_per_window_counts_those_its_inputs_touch(sizes: list[int], seq_len: int) -> None:
    tokens = tokens_of(sizes)
    num_windows = count_windows(tokens.train.num_tokens, seq_len=seq_len)
    if num_windows == 0:
        return
    starts = tokens.train.starts
    documents = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    touched = [len(set(documents[i * seq_len : (i + 1) * seq_len].tolist())) for i in range(num_windows)]
    batches = uniform_batches(tokens, seq_len=seq_len, batch_size=1, seed=0)
    assert batches.documents_per_window() == pytest.approx(np.mean(touched))


@few
@given(lengths, st.integers(1, 20))
def test_source_fractions_weigh_the_targets_of_each_subset(sizes: list[int], seq_len: int) -> None:
    tokens = tokens_of(sizes)
    if count_windows(tokens.train.num_tokens, seq_len=seq_len) == 0:
        return
    batches = uniform_batches(tokens, seq_len=seq_len, batch_size=2, seed=1, max_epochs=2)
    targets = [int(token) for token in batches.batch(0)[:, 1:].ravel()]
    fractions = batches.source_fractions(0)
    assert sum(fractions.values()) == pytest.approx(1)
    separators = targets.count(0) / len(targets)  # they open a document of their own subset: at most that far off
    for subset, fraction in fractions.items():
        counted = sum(token > 0 and "abc"[(token - 0x21) % 3] == subset for token in targets) / len(targets)
        assert counted <= fraction + 1e-9 <= counted + separators + 2e-9


def test_held_out_windows_are_pure_and_evenly_spread(shipped: Tokens) -> None:
    everything = held_out_windows(shipped, seq_len=256)
    some = held_out_windows(shipped, seq_len=256, count=128)
    again = held_out_windows(shipped, seq_len=256, count=128)
    assert np.array_equal(some.windows, again.windows)
    assert everything.subsets == some.subsets == shipped.held_out.subsets
    share = [np.bincount(held.subset_ids) / len(held.windows) for held in (everything, some)]
    assert np.abs(share[0] - share[1]).max() < 1 / 128
    assert len(np.unique(some.windows, axis=0)) == 128
    texts = dict.fromkeys(shipped.held_out.subsets, "")
    for document in sorted(load_corpus("python-docs").split("held_out"), key=lambda d: d.subset):
        texts[document.subset] += "\0" + document.text
    decode = byte_tokenizer().decode
    for window, subset in zip(some.windows, some.subset_ids, strict=True):
        assert decode(window).strip("\ufffd") in texts[some.subsets[subset]]


def test_held_out_windows_know_their_bytes(shipped: Tokens) -> None:
    held = held_out_windows(shipped, seq_len=64, count=10)
    assert held.num_bytes.tolist() == [64] * 10
    assert held.bytes_per_token == 1.0


@pytest.mark.parametrize(
    ("seq_len", "count", "message"),
    [
        (14, None, "the held-out text, 14 tokens, has no window"),
        (4, 4, "the held-out text has 3 windows"),
        (4, 0, "held-out count 0"),
        (0, None, "seq_len 0"),
    ],
)
def test_held_out_windows_refuse_more_than_there_is(seq_len: int, count: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        held_out_windows(twelve_windows(), seq_len=seq_len, count=count)
