"""What the report's page is made of: cards, and sections of text, pictures and tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rungwise.ladder.reporting.report_figures import Picture

Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One of the four things the page opens with."""

    name: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: list[str]
    rows: Cells
    wordy: bool = False
    """Cells hold words rather than numbers: aligned left and wrapped."""


@dataclass(frozen=True, kw_only=True)
class Section:
    id: str
    title: str
    text: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    note: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.pictures or self.tables)
