"""Published drop fractions of the reference runs, in the settings they belong to. Data only.

Sources: marin-community/marin, by issue, and its logbook 7279. What is not published is assumed in `what`.
"""

import dataclasses
from dataclasses import dataclass

from rungwise.comm.config import TransportConfig
from rungwise.comm.routing import Traffic


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published drop fraction and the setting it belongs to."""

    what: str
    source: str
    traffic: Traffic
    config: TransportConfig
    fraction: float
    side: str = ""
    """Of `sender` or `receiver` alone, where it says so."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Figures of one stage of training: one calibrates the skew, the others are predicted."""

    title: str
    by: str
    low: float
    high: float
    anchor: Figure
    others: tuple[Figure, ...]


_RACK = Traffic(num_ranks=64, tokens_per_rank=65_536, num_experts=384, top_k=8)
TRAINED = dataclasses.replace(_RACK, documents_per_rank=16)


def _config(name: str, sender: float, receiver: float | None = None, *, shape: Traffic, spill: int = 0):
    return TransportConfig(
        name=name,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_ranks=shape.num_ranks,
        num_waves=3 if name == "pooled_wave" else 1,
        sender_capacity_factor=sender,
        receiver_capacity_factor=receiver or sender,
        spill=spill,
    )


def _figure(what: str, source: str, fraction: float, shape: Traffic, config: TransportConfig, side: str = "") -> Figure:
    return Figure(what=what, source=source, traffic=shape, config=config, fraction=fraction, side=side)


_E192 = dataclasses.replace(_RACK, num_experts=192, top_k=4)
_E256 = dataclasses.replace(_RACK, num_experts=256)


def _cell(factor: float, fraction: float, *, shape: Traffic, source: str, spill: int = 0) -> Figure:
    spilled = f", {spill} spills" if spill else ""
    what = f"expert cell {factor:g}{spilled}, {shape.num_experts} experts top {shape.top_k}"
    return _figure(what, source, fraction, shape, _config("expert_cell", factor, shape=shape, spill=spill))


def _context(documents: int, fraction: float, what: str, source: str, name: str = "ragged") -> Figure:
    shape = dataclasses.replace(TRAINED, documents_per_rank=documents)
    return _figure(what, source, fraction, shape, _config(name, 1.15, shape=shape))


_POOLED = _context(16, 0.0267, "pooled wave 1.15/1.15, 4K context", "#8549", "pooled_wave")
_RAGGED = {
    16: _context(16, 1.86e-4, "ragged 1.15, 4K context", "#9615"),
    8: _context(8, 8.29e-4, "ragged 1.15, 8K context", "#9615"),
    4: _context(4, 2.94e-3, "ragged 1.15, 16K context", "#9615"),
}


def _alike(figure: Figure) -> Figure:
    return dataclasses.replace(figure, traffic=dataclasses.replace(figure.traffic, document_tilt=1.36))


GROUPS = (
    Group(
        title="After 200 steps: popularity of experts",
        by="concentration",
        low=1.0,
        high=100.0,
        anchor=_cell(1.3, 0.0393, shape=_E192, source="logbook 7279"),
        others=(
            _cell(1.4, 0.0289, shape=_E192, source="logbook 7279"),
            _cell(1.5, 0.0213, shape=_E192, source="logbook 7279"),
            _cell(1.6, 0.0162, shape=_E192, source="logbook 7279"),
            _cell(2.0, 0.0063, shape=_E192, source="logbook 7279"),
            _figure(
                "pooled wave 1.05/1.33, 384 experts top 8",
                "#8289",
                0.0241,
                _RACK,
                _config("pooled_wave", 1.05, 1.33, shape=_RACK),
            ),
        ),
    ),
    Group(
        title="After 25 steps: popularity of experts",
        by="concentration",
        low=1.0,
        high=100.0,
        anchor=_cell(1.0, 0.0967, shape=_E256, source="#7279"),
        others=(
            _cell(1.0625, 0.0725, shape=_E256, source="#7279"),
            _cell(1.0, 0.0588, shape=_E256, source="#7279", spill=3),
            _cell(1.0625, 0.01444, shape=_E256, source="#7780", spill=3),
            _figure("ragged 1.0, 256 experts top 8", "#7279", 0.0241, _E256, _config("ragged", 1.0, shape=_E256)),
        ),
    ),
    Group(
        title="Trained hero, from the pooled wave: likeness within documents",
        by="document_tilt",
        low=0.3,
        high=3.0,
        anchor=_POOLED,
        others=(
            dataclasses.replace(
                _POOLED, what="its sender's share", source="#8347: about 3%", fraction=0.03, side="sender"
            ),
            dataclasses.replace(
                _POOLED, what="its receiver's share", source="#8347: about 0", fraction=0.0, side="receiver"
            ),
            *_RAGGED.values(),
        ),
    ),
    Group(
        title="Trained hero, from ragged at 4K: what popularity is left, with the likeness found above",
        by="concentration",
        low=10.0,
        high=1000.0,
        anchor=_alike(_RAGGED[16]),
        others=(_alike(_RAGGED[8]), _alike(_RAGGED[4]), _alike(_POOLED)),
    ),
    Group(
        title="67B run, in the hero's shape and pooled wave 1.15/1.15 (its own are not published)",
        by="document_tilt",
        low=0.3,
        high=4.0,
        anchor=_context(16, 0.07, "4K context", "#6811", "pooled_wave"),
        others=(_context(1, 0.40, "65K context", "#6811", "pooled_wave"),),
    ),
    Group(
        title="Documents per rank, at 65,536 tokens a rank (not published)",
        by="document_tilt",
        low=0.3,
        high=4.0,
        anchor=_figure(
            "expert cell 2.5, 16 documents a rank, 192 experts top 4",
            "#8046",
            0.0027,
            dataclasses.replace(_E192, documents_per_rank=16),
            _config("expert_cell", 2.5, shape=_E192),
        ),
        others=(
            _figure(
                "expert cell 2.5, 2 documents a rank",
                "#8046",
                0.07,
                dataclasses.replace(_E192, documents_per_rank=2),
                _config("expert_cell", 2.5, shape=_E192),
            ),
        ),
    ),
)
