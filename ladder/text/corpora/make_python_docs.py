"""Makes python-docs.jsonl.xz from the `_sources` folder of the Python 3.11 documentation.

    python make_python_docs.py /usr/share/doc/python3.11/html/_sources

Where that folder comes from and what is changed: SOURCE.md. The result depends on the sources only, up to the
compressor's version: `rungwise.ladder.corpus` checks a hash over the text, not over this file's bytes.
"""

import json
import lzma
import sys
from pathlib import Path

SUBSETS = {
    "c-api": "c-api",
    "extending": "c-api",
    "howto": "howto",
    "faq": "howto",
    "library": "library",
    "reference": "reference",
    "glossary": "reference",
    "tutorial": "tutorial",
    "whatsnew": "whatsnew",
    "distributing": "setup",
    "distutils": "setup",
    "install": "setup",
    "installing": "setup",
    "using": "setup",
}
"""First part of a page's path → subset. Pages elsewhere (licence, contents, about) are left out."""

MIN_BYTES = 1_000
"""Shorter pages are lists of links to other pages."""

SUFFIX = ".rst.txt"


def clean(raw: bytes) -> str:
    """UTF-8, `\\n` newlines, no trailing blanks, at most two empty lines in a row, one newline at the end."""
    text = "\n".join(line.rstrip() for line in raw.decode("utf-8").splitlines())
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text.strip("\n") + "\n"


def make_documents(sources: Path) -> list[dict[str, str]]:
    """One record per page, sorted by id; of pages with the same text, the first."""
    documents, seen = [], set()
    for path in sorted(sources.rglob(f"*{SUFFIX}")):
        page = path.relative_to(sources).as_posix().removesuffix(SUFFIX)
        subset, text = SUBSETS.get(page.split("/")[0]), clean(path.read_bytes())
        if subset and len(text.encode()) >= MIN_BYTES and text not in seen:
            seen.add(text)
            documents.append({"id": page, "subset": subset, "text": text})
    return sorted(documents, key=lambda document: document["id"])


def main(sources: str) -> None:
    documents = make_documents(Path(sources))
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    target = Path(__file__).with_name("python-docs.jsonl.xz")
    target.write_bytes(lzma.compress(lines.encode(), preset=6 | lzma.PRESET_EXTREME))
    total = sum(len(document["text"].encode()) for document in documents)
    print(f"{target.name}: {len(documents)} documents, {total:,} bytes, {target.stat().st_size:,} compressed")


if __name__ == "__main__":
    main(sys.argv[1])
