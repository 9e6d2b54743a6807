"""Which text is trained on and which is held out: loading, content hash, split.

Ships one, the Python documentation (`corpora/SOURCE.md`); a path brings the user's own, held in memory.
Tokens are the business of `tokenizer.py`, windows that of `batches.py`. Imports neither jax nor Grain.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

HELD_OUT_FRACTION: Final = 0.05
"""Chance of a document to be held out."""

SPLIT_SALT: Final = "held-out-828"
"""Hashed with a document's id. Of 3,000 salts the one that splits the shipped corpus most evenly."""

LARGE_SUBSET: Final = 0.02
"""A subset with this share of the text, and two documents, has a document on each side."""

DEFAULT_SUBSET: Final = "text"
"""Subset of a user's document that names none."""

Split = Literal["train", "held_out"]


class Shipped(NamedTuple):
    file: str
    sha256: str
    licence: str


SHIPPED: Final = {
    "python-docs": Shipped(
        "python-docs.jsonl.xz",
        "74229dc451fbed5c41c5d7b59c63163f5ad5a067c92e57738ecf27c373703c1e",
        "PSF-2.0, examples also 0BSD",
    ),
}

_SUBSET = re.compile(r"[A-Za-z0-9_.-]+")


class Record(NamedTuple):
    """A document before the split."""

    id: str
    subset: str
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    subset: str
    split: Split
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents sorted by id.

    Args:
        sha256: hash over ids, subsets and texts, whatever file or order they came in.
        num_left_out: documents without text, or with the text of another one.
        is_mixed: subsets are sources, whose training text is kept apart.
    """

    name: str
    documents: tuple[Document, ...] = field(repr=False)
    sha256: str
    licence: str
    num_left_out: int = 0
    is_mixed: bool = False

    def split(self, split: Split) -> tuple[Document, ...]:
        return tuple(document for document in self.documents if document.split == split)

    def num_bytes(self, split: Split) -> dict[str, int]:
        """UTF-8 bytes by subset; a subset without documents on that side has 0."""
        totals = dict.fromkeys(sorted({document.subset for document in self.documents}), 0)
        for document in self.split(split):
            totals[document.subset] += len(document.text.encode())
        return totals


def load_corpus(spec: str | Path) -> Corpus:
    """The shipped corpus of that name, else the user's text at that path.

    A folder: each file in it, hidden ones excepted, is a document (UTF-8); its topmost folder is the subset.
    `.jsonl`, `.jsonl.gz`, `.jsonl.xz`: an object a line; `.parquet`: a row. Both have `text`, and optionally
    `id` (default: hash of the text) and `subset` (default: `DEFAULT_SUBSET`).

    Raises:
        ValueError: nothing there, unreadable, a missing column, a repeated id, a zero byte, fewer than two
            documents, or (for a shipped corpus) another hash than the one recorded here.
    """
    shipped = SHIPPED.get(str(spec))
    if shipped is None:
        own = Path(spec).expanduser()
        return _build_corpus(own.name, _read_records(own), licence="the user's own")
    path = Path(__file__).with_name("corpora") / shipped.file
    corpus = _build_corpus(str(spec), _read_records(path), licence=shipped.licence)
    if corpus.sha256 != shipped.sha256:
        raise ValueError(
            f"corpus {spec}: hash {corpus.sha256}, not {shipped.sha256}: the file changed; reinstall rungwise"
        )
    return corpus


def mix_corpora(sources: Iterable[tuple[str, Corpus, tuple[str, ...]]]) -> Corpus:
    """Sources as one corpus: each document's subset is its source's name, and what was held out stays held out.

    Args:
        sources: name, corpus, and the subsets of it that belong to the source (none: all).
    Raises:
        ValueError: an unknown subset, a source without text to train on, or a text that one source holds out and
            another trains on.
    """
    documents: list[Document] = []
    digest = hashlib.sha256()
    for name, corpus, subsets in sorted(sources, key=lambda source: source[0]):
        known = sorted({document.subset for document in corpus.documents})
        for subset in subsets:
            if subset not in known:
                raise ValueError(
                    f"source {name}: corpus {corpus.name} has no subset {subset!r}, only {', '.join(known)}"
                )
        chosen = [document for document in corpus.documents if not subsets or document.subset in subsets]
        if not any(document.split == "train" for document in chosen):
            raise ValueError(f"source {name}: no document to train on; give it more text")
        digest.update(f"{name}\0{corpus.sha256}\0{','.join(sorted(subsets))}\0".encode())
        documents += [replace(document, subset=name) for document in chosen]
    held_out = {document.text: document for document in documents if document.split == "held_out"}
    for document in documents:
        other = held_out.get(document.text)
        if document.split == "train" and other is not None:
            raise ValueError(
                f"source {document.subset} trains on document {document.id!r}, which source {other.subset} holds out as"
                f" {other.id!r}; take it out of one of them"
            )
    return Corpus("mixed", tuple(documents), digest.hexdigest(), "of its sources", is_mixed=True)


def hash_records(records: Iterable[Record]) -> str:
    """sha256 over id, subset and text of each record in order of id, each followed by a zero byte."""
    digest = hashlib.sha256()
    for record in sorted(records):
        for word in record:
            digest.update(word.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def split_score(document_id: str) -> float:
    """Uniform in [0, 1), a function of the id alone, so that adding documents moves no other."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{document_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def choose_held_out(records: Iterable[Record]) -> frozenset[str]:
    """Ids of the documents that are never trained on: those whose score is below `HELD_OUT_FRACTION`.

    Where that leaves the corpus, or a large subset, no document on one side, the lowest score is held out
    (the highest trained on). Only these few can change sides when documents are added.
    """
    everything = list(records)
    held = {record.id for record in everything if split_score(record.id) < HELD_OUT_FRACTION}
    by_subset: defaultdict[str, list[Record]] = defaultdict(list)
    for record in everything:
        by_subset[record.subset].append(record)
    total = sum(len(record.text) for record in everything)
    for members in (*by_subset.values(), everything):
        if len(members) >= 2 and sum(len(record.text) for record in members) >= LARGE_SUBSET * total:
            ranked = sorted((record.id for record in members), key=split_score)
            if held.isdisjoint(ranked):
                held.add(ranked[0])
            elif held.issuperset(ranked):
                held.remove(ranked[-1])
    return frozenset(held)


def _build_corpus(name: str, records: Iterable[Record], *, licence: str) -> Corpus:
    kept: dict[str, Record] = {}
    num_read = 0
    previous = Record("", "", "")
    for record in sorted(records):
        _check_record(record, name=name)
        if record.id == previous.id and record.text != previous.text:
            raise ValueError(f"corpus {name}: two documents have the id {record.id!r}; make ids unique")
        previous = record
        num_read += 1
        if record.text.strip():
            kept.setdefault(record.text, record)
    if len(kept) < 2:
        raise ValueError(
            f"corpus {name}: {len(kept)} documents with text of their own; give two or more, one is held out"
        )
    held = choose_held_out(kept.values())
    documents = tuple(
        Document(record.id, record.subset, "held_out" if record.id in held else "train", record.text)
        for record in kept.values()
    )
    return Corpus(name, documents, hash_records(kept.values()), licence, num_left_out=num_read - len(kept))


def _check_record(record: Record, *, name: str) -> None:
    where = f"corpus {name}, document {record.id!r}"
    if "\0" in record.text or "\0" in record.id:
        raise ValueError(f"{where}: contains a zero byte, which separates documents; remove it")
    if not _SUBSET.fullmatch(record.subset):
        raise ValueError(f"{where}: subset {record.subset!r} names a metric; use letters, digits and _ . -")
    try:
        (record.id + record.text).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half a surrogate pair, not valid in UTF-8; remove it") from None


def _read_records(path: Path) -> list[Record]:
    """Readers raise whatever they meet; it leaves here as one line that names the path."""
    try:
        return list(_reader_of(path)(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path}: not UTF-8 text (byte {error.start}); convert it") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"corpus {path}: cannot be read ({error}); check the file") from error


def _reader_of(path: Path) -> Callable[[Path], Iterator[Record]]:
    if path.is_dir():
        return _read_folder
    if not path.exists():
        known = ", ".join(SHIPPED)
        raise ValueError(f"corpus {path}: neither a shipped corpus ({known}) nor an existing path")
    for suffix, reader in _READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise ValueError(f"corpus {path}: unknown kind of file; give a folder or one of {', '.join(_READERS)}")


def _read_folder(folder: Path) -> Iterator[Record]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            parts = path.relative_to(folder).parts
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError as error:
                where = f"corpus {folder}, document {'/'.join(parts)!r}"
                raise ValueError(f"{where}: not UTF-8 (byte {error.start}); convert or remove it") from None
            yield Record("/".join(parts), parts[0] if len(parts) > 1 else DEFAULT_SUBSET, text)


def _read_jsonl(path: Path) -> Iterator[Record]:
    opener: Callable[..., IO[str]] = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                where = f"corpus {path}, line {number}"
                raise ValueError(f"{where}: not JSON ({error.msg}); write one object a line") from None
            yield _from_row(row, path, number)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow  # here and not above: other kinds of corpus do not pay for it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in ("id", "subset", "text") if name in file.schema_arrow.names]
            rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield _from_row(row, path, number)
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"corpus {path}: not a Parquet file ({reason}); check it") from error


def _from_row(row: Any, path: Path, number: int) -> Record:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"corpus {path}, record {number}: no column 'text' holding a string; add or rename it")
    document_id, subset = row.get("id"), row.get("subset")
    if document_id is None:
        document_id = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return Record(str(document_id), DEFAULT_SUBSET if subset is None else str(subset), text)


_READERS: Final[dict[str, Callable[[Path], Iterator[Record]]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.xz": _read_jsonl,
    ".parquet": _read_parquet,
}
