"""Other people's metric names: which of theirs is which of ours, and in which unit."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rungwise.analysis.vocabulary import METRICS, is_metric_name

_WRITTEN = re.compile(r"(?P<ours>[^=]+)=(?P<theirs>.+?)(?:\*(?P<factor>[0-9.eE+-]+))?")


@dataclass(frozen=True)
class Source:
    """A metric as somebody else logs it: ours = factor × theirs."""

    theirs: str
    factor: float = 1.0


@dataclass(frozen=True)
class MetricNames:
    """Our metric name → theirs. Their metrics under a name of ours count as well, unless another is named for it."""

    sources: Mapping[str, Source]

    def ours(self, theirs: str) -> tuple[str, float] | None:
        """Our name and the factor for one of theirs; None for what we have no word for."""
        for name, source in self.sources.items():
            if source.theirs == theirs:
                return name, source.factor
        return (theirs, 1.0) if theirs not in self.sources and is_metric_name(theirs) else None

    def missing(self, present: Iterable[str]) -> list[str]:
        """Their names that are mapped and not among those present."""
        return sorted({source.theirs for source in self.sources.values()} - set(present))


def load_metric_names(written: Iterable[str] = (), file: Path | None = None) -> MetricNames:
    """Names from a TOML or JSON file, and from words `ours=theirs` or `ours=theirs*factor`, which win.

    In a file: `"train/loss" = "my_loss"`, or `"train/loss" = { name = "loss_bits", factor = 0.6931 }`; in TOML
    under `[metrics]` or at the top.

    Raises:
        ValueError: not such a word or file, a name that is none of ours, or a factor that is not positive.

    >>> load_metric_names(["train/loss=loss_bits*0.6931"]).ours("loss_bits")
    ('train/loss', 0.6931)
    """
    sources = {} if file is None else dict(_read(file))
    for word in written:
        found = _WRITTEN.fullmatch(word)
        if found is None:
            raise ValueError(f"metric {word!r} is not of the form ours=theirs or ours=theirs*factor")
        sources[found["ours"].strip()] = Source(found["theirs"].strip(), _factor(found["factor"] or 1.0, word))
    for ours in sources:
        if not is_metric_name(ours):
            near = difflib.get_close_matches(ours, METRICS, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"metric {ours!r} is none of ours{hint} (write ours=theirs)")
    return MetricNames(sources)


def _read(file: Path) -> Iterable[tuple[str, Source]]:
    try:
        text = file.read_text(encoding="utf-8")
        document = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{file}: is neither TOML nor JSON ({error}); correct it") from error
    table = document.get("metrics", document) if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f'{file}: holds no table of names; write "train/loss" = "their name"')
    for ours, entry in table.items():
        body = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(body, dict) or not isinstance(body.get("name"), str) or set(body) - {"name", "factor"}:
            raise ValueError(f"{file}: {ours!r} must be a name, or {{ name = …, factor = … }}; correct it")
        yield str(ours), Source(body["name"], _factor(body.get("factor", 1.0), ours))


def _factor(value: object, where: str) -> float:
    try:
        factor = float(str(value))
    except ValueError:
        factor = -1.0
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"metric {where!r}: factor {value!r} must be a positive number")
    return factor
