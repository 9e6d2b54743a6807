import gzip
import importlib.util
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungwise.ladder.text import corpus as corpus_module
from rungwise.ladder.text.corpus import (
    HELD_OUT_FRACTION,
    LARGE_SUBSET,
    SHIPPED,
    Record,
    choose_held_out,
    hash_records,
    load_corpus,
    split_score,
)

ROWS = [
    {"id": "a/one", "subset": "a", "text": "One.\n"},
    {"id": "a/two", "subset": "a", "text": "Zwei: ä, 二.\r\nstill two\n"},
    {"id": "b/three", "subset": "b", "text": "Three.\u2028Same line for JSON.\n"},
    {"id": "b/four", "subset": "b", "text": "Four."},
]

records = st.lists(
    st.builds(
        Record,
        id=st.text("abcdefgh", min_size=3, max_size=6),
        subset=st.sampled_from(["a", "b", "c"]),
        text=st.integers(1, 400).map(lambda size: "x" * size),
    ),
    min_size=2,
    max_size=60,
    unique_by=lambda record: record.id,
)


def write_folder(path: Path, rows: list[dict[str, str]]) -> Path:
    for row in rows:
        file = path / "folder" / row["id"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row["text"].encode())
    return path / "folder"


def write_jsonl(path: Path, rows: list[dict[str, str]], suffix: str = ".jsonl") -> Path:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(Path(suffix).suffix, open)
    with opener(path / f"rows{suffix}", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path / f"rows{suffix}"


def write_parquet(path: Path, rows: list[dict[str, str]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "rows.parquet")
    return path / "rows.parquet"


WRITERS: dict[str, Callable[[Path, list[dict[str, str]]], Path]] = {
    "folder": write_folder,
    "jsonl": write_jsonl,
    "jsonl.gz": lambda path, rows: write_jsonl(path, rows, ".jsonl.gz"),
    "jsonl.xz": lambda path, rows: write_jsonl(path, rows, ".jsonl.xz"),
    "parquet": write_parquet,
}


def test_shipped_corpus_is_the_recorded_one() -> None:
    corpus = load_corpus("python-docs")
    assert corpus.sha256 == "74229dc451fbed5c41c5d7b59c63163f5ad5a067c92e57738ecf27c373703c1e"
    assert sum(corpus.num_bytes("train").values()) == 10_419_228
    assert sum(corpus.num_bytes("held_out").values()) == 545_310
    assert (len(corpus.documents), len(corpus.split("held_out")), corpus.num_left_out) == (441, 24, 0)


def test_shipped_corpus_holds_out_a_like_share_of_every_subset() -> None:
    corpus = load_corpus("python-docs")
    train, held_out = corpus.num_bytes("train"), corpus.num_bytes("held_out")
    shares = {subset: held_out[subset] / (held_out[subset] + train[subset]) for subset in train}
    assert all(0.025 < share < 0.085 for share in shares.values()), shares


def test_shipped_corpus_refuses_a_changed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHIPPED, "python-docs", SHIPPED["python-docs"]._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match=r"python-docs: hash 74229dc4.*reinstall"):
        load_corpus("python-docs")


@pytest.mark.parametrize("kind", WRITERS)
def test_own_text_is_the_same_corpus_in_every_format(kind: str, tmp_path: Path) -> None:
    corpus = load_corpus(WRITERS[kind](tmp_path, ROWS[::-1]))
    assert corpus.sha256 == hash_records(Record(**row) for row in ROWS)
    assert [(d.id, d.subset, d.text) for d in corpus.documents] == sorted(
        (row["id"], row["subset"], row["text"]) for row in ROWS
    )


def test_own_text_needs_neither_id_nor_subset(tmp_path: Path) -> None:
    corpus = load_corpus(write_jsonl(tmp_path, [{"text": row["text"]} for row in ROWS]))
    assert {document.subset for document in corpus.documents} == {"text"}
    assert len({document.id for document in corpus.documents}) == len(ROWS)


def test_own_text_twice_is_used_once_and_counted(tmp_path: Path) -> None:
    again = [{"id": "z", "subset": "b", "text": ROWS[0]["text"]}, {"id": "y", "subset": "b", "text": " \n"}]
    corpus = load_corpus(write_jsonl(tmp_path, ROWS + again))
    assert corpus.num_left_out == 2
    assert corpus.sha256 == hash_records(Record(**row) for row in ROWS)


def test_own_folder_passes_over_hidden_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ROWS)
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"\xff\x00")
    (folder / ".DS_Store").write_bytes(b"\xff\x00")
    assert len(load_corpus(folder).documents) == len(ROWS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"text": "one"}, {"body": "two"}], "record 2: no column 'text'"),
        ([{"text": "one"}, {"text": None}], "record 2: no column 'text'"),
        ([{"text": "one"}], "1 documents with text of their own"),
        ([], "0 documents with text of their own"),
        ([{"id": "a", "text": "one"}, {"id": "a", "text": "two"}], "two documents have the id 'a'"),
        ([{"id": "a", "text": "on\0e"}, {"id": "b", "text": "two"}], "document 'a': contains a zero byte"),
        ([{"id": "a", "text": "\ud800"}, {"id": "b", "text": "two"}], "document 'a': holds half a surrogate"),
        ([{"id": "a", "text": "one", "subset": "x y"}, {"text": "two"}], "subset 'x y' names a metric"),
    ],
)
def test_own_text_unfit_for_use_is_refused(content: list[dict[str, str]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(write_jsonl(tmp_path, content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "nor an existing path"),
        ("python-doc", None, r"neither a shipped corpus \(python-docs\)"),
        ("text.docx", b"PK", "unknown kind of file"),
        ("broken.jsonl", b'{"text": "a"}\n{"text"\n', "line 2: not JSON"),
        ("latin.jsonl", b'{"text": "\xe4"}\n', "not UTF-8"),
        ("torn.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-12], "cannot be read"),
        ("torn.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 99)[:-12], "cannot be read"),
        ("noise.jsonl.xz", b"noise", "cannot be read"),
        ("noise.parquet", b"noise noise noise", "not a Parquet file"),
    ],
)
def test_own_file_unreadable_is_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(tmp_path / name)
    assert "\n" not in str(error.value)


def test_own_folder_unreadable_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ROWS)
    (folder / "a" / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"document 'a/picture\.png': not UTF-8"):
        load_corpus(folder)
    (folder / "a" / "picture.png").unlink()
    (folder / "a" / "dangling").symlink_to(folder / "nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load_corpus(folder)


@given(records)
def test_held_out_has_both_sides_of_the_corpus_and_of_each_large_subset(documents: list[Record]) -> None:
    held = choose_held_out(documents)
    total = sum(len(record.text) for record in documents)
    for subset in (None, "a", "b", "c"):
        members = [record for record in documents if subset in (None, record.subset)]
        if len(members) >= 2 and sum(len(record.text) for record in members) >= LARGE_SUBSET * total:
            assert 0 < sum(record.id in held for record in members) < len(members)


def test_held_out_moves_no_other_document_when_some_are_added() -> None:
    documents = [Record(f"document-{i}", "abc"[i % 3], "x" * (1 + i % 97)) for i in range(900)]
    old = choose_held_out(documents[:300])
    assert old
    for count in (301, 400, 900):
        ids = {record.id for record in documents[:300]}
        assert choose_held_out(documents[:count]) & ids == old


def test_held_out_leaves_one_document_to_train_on() -> None:
    low = [f"d{i}" for i in range(200) if split_score(f"d{i}") < HELD_OUT_FRACTION]
    assert len(low) > 2
    held = choose_held_out(Record(name, "a", "text") for name in low)
    assert held == set(low) - {max(low, key=split_score)}


def test_held_out_share_is_the_one_asked_for() -> None:
    count = 20_000
    share = sum(split_score(f"document-{i}") < HELD_OUT_FRACTION for i in range(count)) / count
    assert abs(share - HELD_OUT_FRACTION) < 4 * (HELD_OUT_FRACTION / count) ** 0.5


@given(records, st.randoms(use_true_random=False))
def test_hash_ignores_order_and_sees_every_field(documents: list[Record], random: Random) -> None:
    shuffled = documents.copy()
    random.shuffle(shuffled)
    assert hash_records(shuffled) == hash_records(documents)
    first, *rest = documents
    for changed in (
        first._replace(id=first.id + "x"),
        first._replace(subset="d"),
        first._replace(text=first.text + " "),
    ):
        assert hash_records([changed, *rest]) != hash_records(documents)


def test_maker_cleans_pages_and_leaves_out_the_short(tmp_path: Path) -> None:
    path = Path(corpus_module.__file__).with_name("corpora") / "make_python_docs.py"
    spec = importlib.util.spec_from_file_location("make_python_docs", path)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    body = "word " * 300
    pages = {
        "faq/z": f"\n{body}  \r\n\r\n\r\n\r\n\r\nend",
        "library/a": body,
        "library/b": body,
        "faq/index": "short",
        "license": body + ".",
    }
    for page, text in pages.items():
        file = tmp_path / f"{page}.rst.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode())
    assert maker.make_documents(tmp_path) == [
        {"id": "faq/z", "subset": "howto", "text": body.rstrip() + "\n\n\nend\n"},
        {"id": "library/a", "subset": "library", "text": body.rstrip() + "\n"},
    ]
