"""Sources and lengths by phase: exact weights, no token twice before its epoch is over, random access, a fixed past."""

from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungwise.ladder.text.batches import Batches, held_out_windows, uniform_batches
from rungwise.ladder.text.corpus import Corpus, Document, Record, choose_held_out, load_corpus, mix_corpora
from rungwise.ladder.text.mixture import Stretch, cycle_of, epochs_read, lay_out, part_at
from rungwise.ladder.text.tokenizer import Tokens, byte_tokenizer, tokenize

few = settings(max_examples=20, deadline=None)
weights_of_three = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))

PHASES = (
    Stretch(0, 4, 16, (4, 1)),
    Stretch(6, 8, 8, (4, 1)),
    Stretch(10, 8, 8, (1, 4)),
    Stretch(13, 32, 2, (1, 4)),
)
"""64 tokens a step throughout: 4 → 8 → 32 tokens of context, and another mixture from step 10 on."""


def two_sources(first: int = 1601, second: int = 1601) -> Tokens:
    """Sources `a` and `b` whose tokens are all different within 200 and 200 values: bytes 1–200 in turn."""
    texts = {name: "".join(chr(1 + i % 100) for i in range(size - 1)) for name, size in (("a", first), ("b", second))}
    documents = [Document(name, name, "train", text + name) for name, text in texts.items()]
    documents += [Document(f"held-{name}", name, "held_out", name * 200) for name in texts]
    return tokenize(Corpus("two", tuple(documents), "", "", is_mixed=True), byte_tokenizer())


def drawn(batches: Batches, step: int) -> Counter[str]:
    """Sequences of a step by source, by where they lie in the stream."""
    border = 1602  # source a: a separator and 1,601 bytes
    return Counter("a" if start < border else "b" for start in batches.window_starts(step).tolist())


@given(weights_of_three)
def test_any_run_of_as_many_sequences_as_weights_add_up_to_holds_each_source_exactly(weights: tuple[int, ...]) -> None:
    cycle = cycle_of(weights)
    total = len(cycle.sources)
    sources = [cycle.sources[k % total] for k in range(3 * total)]
    for begin in range(2 * total):
        counts = Counter(sources[begin : begin + total])
        assert [counts[source] for source in range(3)] == list(cycle.weights)
    assert [w * sum(cycle.weights) for w in weights] == [w * sum(weights) for w in cycle.weights]


@given(st.integers(0, 60), st.integers(1, 60))
def test_no_beginning_of_a_cycle_of_two_is_off_by_a_whole_sequence(first: int, second: int) -> None:
    cycle = cycle_of((first, second))
    share = first / (first + second)
    for count, had in enumerate(accumulate(source == 0 for source in cycle.sources), 1):
        assert abs(had - share * count) < 1
        assert cycle.drawn(count, 0) == had


@given(weights_of_three, st.integers(0, 500))
def test_place_in_a_source_is_the_number_of_its_earlier_sequences(weights: tuple[int, ...], step: int) -> None:
    (part,) = lay_out([Stretch(0, 4, 3, weights)], [4001, 4001, 4001])
    for row, (source, ordinal) in enumerate(part.slots(step)):
        cycle = cycle_of(weights)
        assert ordinal == cycle.drawn(3 * step + row, source)


def test_weights_hold_in_each_window_of_steps_and_by_the_journal_s_figures() -> None:
    batches = Batches(two_sources(), PHASES, seed=0)
    for first, last, expected in ((0, 5, (64, 16)), (5, 10, None), (11, 16, None)):
        counts = sum((drawn(batches, step) for step in range(first, last)), Counter())
        if expected is not None:  # 80 sequences, whole cycles of five
            assert (counts["a"], counts["b"]) == expected
    for step in range(16):
        fractions, counts = batches.source_fractions(step), drawn(batches, step)
        total = counts["a"] + counts["b"]
        assert fractions["a"] == pytest.approx(counts["a"] / total, abs=0.02)  # a window's last target may be b's first
    assert sum(batches.source_fractions(step)["b"] for step in range(10, 13)) / 3 == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("seed", [0, 7])
def test_no_token_comes_twice_before_its_source_is_read_through_whatever_the_length(seed: int) -> None:
    """TRN-10 across context phases: inputs of all windows of an epoch are disjoint."""
    batches = Batches(two_sources(), PHASES, seed=seed)
    seen: list[int] = []
    for step in range(16):
        length = batches.part_at(step).stretch.seq_len
        for start in batches.window_starts(step).tolist():
            seen += range(start, start + length)
    assert len(seen) == 16 * 64
    assert len(set(seen)) == len(seen)


def test_an_epoch_of_short_windows_shows_each_of_them_once() -> None:
    """Blocks of 32 cut into windows of 4: all 400 of a source come before any comes again."""
    tokens = two_sources()
    stretches = [Stretch(0, 4, 8, (1, 1))]
    batches = Batches(tokens, stretches, seed=3, max_epochs=2, block=32)
    starts = np.concatenate([batches.window_starts(step) for step in range(200)])
    for low, high in ((0, 1602), (1602, 4000)):
        mine = starts[(starts >= low) & (starts < high)] - low
        assert len(mine) == 800
        assert sorted(mine[:400].tolist()) == sorted(mine[400:].tolist()) == list(range(0, 1600, 4))
        assert mine[:400].tolist() != mine[400:].tolist()


def test_batches_before_a_change_do_not_depend_on_what_comes_after_it() -> None:
    """A refused phase, a replan or a declared change leaves the past as it was: batches are a function of it."""
    tokens = two_sources()
    planned = Batches(tokens, PHASES, seed=1)
    other = Batches(tokens, [*PHASES[:2], Stretch(12, 4, 16, (1, 0))], seed=1, block=32)
    for step in range(10):
        assert np.array_equal(planned.batch(step), other.batch(step))
    assert not np.array_equal(planned.batch(12)[:, :4], other.batch(12)[:8, :4])
    backwards = [planned.batch(step).tolist() for step in reversed(range(16))]
    afresh = Batches(tokens, PHASES, seed=1)
    assert backwards[::-1] == [afresh.batch(step).tolist() for step in range(16)]


def test_one_source_of_one_length_is_the_plain_order() -> None:
    tokens = two_sources()
    plain = uniform_batches(tokens, seq_len=8, batch_size=4, seed=5)
    split = Batches(tokens, [Stretch(0, 8, 4), Stretch(3, 8, 2)], seed=5)
    for step in range(3):
        assert np.array_equal(plain.batch(step), split.batch(step))
    assert np.array_equal(plain.batch(3), np.concatenate([split.batch(3), split.batch(4)]))


def test_ranks_do_not_each_have_a_source_of_their_own() -> None:
    """Three to one over four ranks: without shuffling the rows the fourth rank would read all of source b."""
    batches = Batches(two_sources(), [Stretch(0, 4, 4, (3, 1))], seed=0)
    rows = {int(np.flatnonzero(batches.window_starts(step) >= 1602)[0]) for step in range(40)}
    assert rows == {0, 1, 2, 3}


def test_a_longer_context_than_was_foreseen_is_laid_out_anew_and_a_length_that_does_not_divide_is_refused() -> None:
    batches = Batches(two_sources(), [Stretch(0, 8, 8, (1, 1)), Stretch(2, 64, 1, (1, 1))], seed=0, block=8)
    assert batches.batch(2).shape == (1, 65)
    assert [part.block for part in batches.parts] == [8, 64]
    with pytest.raises(ValueError, match=r"seq_len 12 from step 2 does not divide 32, the longest context"):
        lay_out([Stretch(0, 32, 1), Stretch(2, 12, 1)], [4001])


@few
@given(st.floats(0.05, 0.9), st.integers(1, 40))
def test_a_share_of_the_text_is_read_as_often_as_the_whole_by_a_longer_run(share: float, steps: int) -> None:
    """Simulated epoching: steps and text cut by the same factor leave the epochs as they are, to a block."""
    stretches = [Stretch(0, 32, 10, (4, 1))]
    whole = lay_out(stretches, [640_001, 160_001])
    part = lay_out(stretches, [640_001, 160_001], share=share)
    hero_steps = round(steps / share)
    hero, rung = epochs_read(whole, steps=hero_steps), epochs_read(part, steps=steps)
    for own, wanted in zip(rung, hero, strict=True):
        assert own == pytest.approx(wanted, rel=0.51 / (share * hero_steps) + 1 / (share * 5000) + 0.01)
    assert part_at(part, 0).num_blocks == tuple(round(count * share) for count in whole[0].num_blocks)


def test_budget_names_the_source_that_is_read_too_often() -> None:
    batches = Batches(two_sources(), [Stretch(0, 32, 10, (4, 1))], seed=0)
    batches.check_budget(6)
    with pytest.raises(ValueError, match=r"steps 7: 1\.120 epochs of 50 windows of source a, more than max_epochs 1"):
        batches.check_budget(7)


def test_sources_keep_what_each_corpus_holds_out_and_become_subsets() -> None:
    corpus = load_corpus("python-docs")
    mixed = mix_corpora([("guides", corpus, ("howto", "tutorial")), ("api", corpus, ("c-api",))])
    assert {document.subset for document in mixed.documents} == {"api", "guides"}
    assert {d.id for d in mixed.split("held_out")} == {
        d.id for d in corpus.split("held_out") if d.subset in ("howto", "tutorial", "c-api")
    }
    tokens = tokenize(mixed, byte_tokenizer())
    assert tokens.train.subsets == ("api", "guides")
    assert np.all(np.diff(tokens.train.subset_ids) >= 0)  # source by source
    assert held_out_windows(tokens, seq_len=64, count=32).subsets == ("api", "guides")


def test_a_text_trained_on_in_one_source_and_held_out_in_another_is_refused() -> None:
    records = [Record(f"doc-{i}", "text", f"text number {i}") for i in range(40)]
    held = choose_held_out(records)
    documents = tuple(Document(r.id, r.subset, "held_out" if r.id in held else "train", r.text) for r in records)
    secret = next(document for document in documents if document.split == "held_out")
    one, copy = Corpus("one", documents, "1", ""), Document("copy", "text", "train", secret.text)
    other = Corpus("other", (copy, Document("x", "text", "held_out", "x")), "2", "")
    with pytest.raises(
        ValueError, match=rf"source leak trains on document 'copy', which source own holds out as '{secret.id}'"
    ):
        mix_corpora([("own", one, ()), ("leak", other, ())])
    with pytest.raises(ValueError, match=r"source own: corpus one has no subset 'txt', only text"):
        mix_corpora([("own", one, ("txt",))])
