"""The drop study of `ladder drops`: what transports drop, reserve and compute for given traffic, measured or assumed.

Routes are drawn by `comm/routing.py` and judged by the transports' own rules (`comm/drop_study.py`), so that any number
of ranks takes seconds. Imports no jax. Drawing results is `drops_table.py`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rungwise.analysis.reading.records import CONFIG_FILE, read_json
from rungwise.analysis.source import load_layers
from rungwise.comm.buffers import buffer_rows, row_bytes
from rungwise.comm.config import SPILLING, TRANSPORTS, TransportConfig
from rungwise.comm.drop_study import Drops, calibrate, simulate
from rungwise.comm.routing import Traffic, balanced
from rungwise.ladder.changing.course import course_of, load_events, segment_at
from rungwise.ladder.family import RunConfig
from rungwise.ladder.planning.drops_context import fit_traffic, traffic_of
from rungwise.ladder.studying.drops_published import GROUPS, TRAINED, Group

CAPACITIES = ("1.0", "1.15", "1.5")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a row costs: widths in values, bytes a value."""

    width: int = 3072
    inner: int = 3072
    itemsize: int = 2


def make_configs(
    traffic: Traffic,
    *,
    transports: Sequence[str] = TRANSPORTS,
    capacities: Sequence[str] = CAPACITIES,
    waves: int = 1,
    spill: int = 0,
    payload: str = "compute",
) -> list[TransportConfig]:
    """Every transport at every capacity; `dropless`, which has none, once.

    Args:
        capacities: "1.15", or "1.05/1.33" for sender and receiver.
        spill: of the transports that can.
    Raises:
        ValueError: not a number, or not a valid combination.
    """
    made: list[TransportConfig] = []
    for name in transports:
        for text in capacities:
            sender, receiver = _factors(text)
            config = TransportConfig(
                name=name,
                num_experts=traffic.num_experts,
                top_k=traffic.top_k,
                num_ranks=traffic.num_ranks,
                num_waves=waves if name == "pooled_wave" else 1,
                sender_capacity_factor=sender,
                receiver_capacity_factor=receiver,
                spill=spill if name in SPILLING else 0,
                payload="compute" if name == "dropless" else payload,
            )
            if name != "dropless" or all(other.name != "dropless" for other in made):
                made.append(config)
    return made


def _factors(text: str) -> tuple[float, float]:
    sender, _, receiver = text.partition("/")
    try:
        return float(sender), float(receiver or sender)
    except ValueError:
        raise ValueError(f"capacity {text!r} is not a number; write 1.15, or 1.05/1.33 for sender/receiver") from None


def label(config: TransportConfig) -> str:
    """A transport with what shapes it, short."""
    if config.name == "dropless":
        return config.name
    factors = {
        "expert_cell": f"{config.sender_capacity_factor:g}",
        "ragged": f"{config.receiver_capacity_factor:g}",
        "pooled_wave": f"{config.sender_capacity_factor:g}/{config.receiver_capacity_factor:g}",
    }[config.name]
    waves = f" in {config.num_waves}" if config.num_waves > 1 else ""
    spill = f", {config.spill} spill{'s' if config.spill > 1 else ''}" if config.spill else ""
    return f"{config.name} {factors}{waves}{spill}"


def costs(config: TransportConfig, *, num_tokens: int, sizes: Sizes) -> dict[str, float]:
    """What a transport reserves and computes on one rank for one layer, whatever the routes are.

    padded_compute: rows the experts compute over the fair share of assignments. transport_bytes: payloads out, in and
    back of one exchange. expert_bytes: rows in and out and both hidden products of what is computed at once.
    """
    rows = buffer_rows(config, num_tokens=num_tokens, width=sizes.width)
    travelling = row_bytes(config, width=sizes.width, itemsize=sizes.itemsize)
    back = rows.sent_at_once if config.name != "dropless" else rows.received // max(1, rows.sent) * rows.sent_at_once
    received = rows.received if config.name in ("dropless", "ragged") else rows.sent_at_once
    return {
        "padded_compute": rows.computed / (num_tokens * config.top_k),
        "transport_bytes": travelling * (rows.sent_at_once + received + back),
        "expert_bytes": sizes.itemsize * rows.computed_at_once * 2 * (sizes.width + sizes.inner),
    }


def study(
    traffics: Sequence[Traffic], configs: Sequence[TransportConfig], *, draws: int = 1, sizes: Sizes | None = None
) -> list[dict[str, Any]]:
    """One record a transport: drops by cause, what equal popularity would drop, memory, padded compute.

    Args:
        traffics: of one kind, layers of a run say; averaged, and the worst is given apart.
        draws: seeds from the traffic's own on.
    """
    if draws < 1:
        raise ValueError(f"draws {draws} is below 1; set at least 1")
    sizes = sizes or Sizes()
    drawn = [
        simulate(dataclasses.replace(traffic, seed=traffic.seed + draw), configs)
        for traffic in traffics
        for draw in range(draws)
    ]
    even = simulate(balanced(traffics[0]), configs)
    records = []
    for position, config in enumerate(configs):
        results = [drops[position] for drops in drawn]
        by_traffic = np.reshape([drops.fraction for drops in results], (len(traffics), draws))
        records.append(
            {
                "label": label(config),
                **{key: value for key, value in asdict(config).items() if key != "num_ranks"},
                "drop_fraction": float(by_traffic.mean()),
                "sender_drop_fraction": _mean(results, "sender_fraction"),
                "receiver_drop_fraction": _mean(results, "receiver_fraction"),
                "spilled_fraction": float(np.mean([drops.spilled / drops.valid for drops in results])),
                "lowest_draw": float(by_traffic.mean(axis=0).min()),
                "highest_draw": float(by_traffic.mean(axis=0).max()),
                "worst_drop_fraction": float(by_traffic.mean(axis=1).max()),
                "balanced_drop_fraction": even[position].fraction,
                **costs(config, num_tokens=traffics[0].tokens_per_rank, sizes=sizes),
            }
        )
    return records


def _mean(results: Sequence[Drops], name: str) -> float:
    return float(np.mean([getattr(drops, name) for drops in results]))


@dataclass(frozen=True)
class Measured:
    """Traffic read off a run's journal, a layer each, beside what the run itself dropped there."""

    run: str
    step: int
    traffics: tuple[Traffic, ...]
    config: TransportConfig
    drop_fraction: float
    sender_drop_fraction: float
    receiver_drop_fraction: float
    sizes: Sizes
    run_config: RunConfig
    """In effect at that step."""
    deviations: tuple[float, ...]
    """Of expert loads, a layer each."""


def read_run(folder: str | Path, *, step: int | None = None) -> Measured:
    """Each layer's skew from the deviation of its expert loads in the journal, at the last step or another.

    Raises:
        ValueError: no such run, or nothing logged at that step.
    """
    folder = Path(folder)
    stored = read_json(folder / CONFIG_FILE)["config"]
    if not {"model", "transport", "data_replicas", "sequences_per_rank"} <= set(stored):
        raise ValueError(f"run {folder} says nothing of its model and transport; give a run trained here, or --counts")
    tables = {name: load_layers(folder, f"moe/{name}").dropna() for name in ("frequency_deviation", *_DROPS)}
    deviations = tables["frequency_deviation"]
    if deviations.empty or (step is not None and step not in deviations.index):
        raise ValueError(f"run {folder} logged no expert loads at step {step}; give a logged step, or train it first")
    at = int(deviations.index[-1]) if step is None else step
    course = course_of(RunConfig.model_validate(stored), load_events(folder))
    config = segment_at(course, at).config  # context and transport may have changed on the way
    model = config.model
    return Measured(
        run=f"{config.family}/{config.run}",
        step=at,
        traffics=tuple(traffic_of(config, float(deviation)) for deviation in deviations.loc[at]),
        config=config.transport,
        **{name: float(tables[name].loc[at].mean()) for name in _DROPS},
        sizes=Sizes(width=model.routed_dim, inner=model.expert_dim, itemsize=4),
        run_config=config,
        deviations=tuple(map(float, deviations.loc[at])),
    )


_DROPS = ("drop_fraction", "sender_drop_fraction", "receiver_drop_fraction")


def read_counts(path: str | Path, shape: Traffic) -> tuple[Traffic, ...]:
    """Traffic with measured popularity: a JSON list of one count per expert, or a list of such lists, a layer each.

    Raises:
        ValueError: not such a file, or other than `num_experts` counts.
    """
    try:
        table = np.atleast_2d(np.asarray(json.loads(Path(path).read_text()), float))
    except (ValueError, TypeError) as error:
        raise ValueError(f"counts {path}: {error}; give a JSON list of one count per expert, or one a layer") from error
    if table.ndim != 2 or not np.isfinite(table).all() or (table < 0).any() or not table.sum(axis=1).all():
        raise ValueError(
            f"counts {path}: negative, empty or no numbers; give one count per expert, or one list a layer"
        )
    return tuple(dataclasses.replace(shape, popularity=tuple(map(float, row))) for row in table)


def predict_group(group: Group) -> dict[str, Any]:
    """The skew that the anchor asks for, and every other figure predicted with it, each with its miss."""
    anchor = group.anchor
    skew = calibrate([anchor.traffic], anchor.config, anchor.fraction, by=group.by, low=group.low, high=group.high)
    rows = []
    for figure in (anchor, *group.others):
        (drops,) = simulate(dataclasses.replace(figure.traffic, **{group.by: skew}), [figure.config])
        predicted = getattr(drops, f"{figure.side}_fraction") if figure.side else drops.fraction
        rows.append(
            {
                "what": figure.what,
                "source": figure.source,
                "published": figure.fraction,
                "predicted": predicted,
                "sender": drops.sender_fraction,
                "receiver": drops.receiver_fraction,
                "miss": predicted - figure.fraction,
                "anchor": figure is anchor,
            }
        )
    return {"title": group.title, "by": group.by, "value": skew, "rows": rows}


def study_result(
    shape: Traffic,
    *,
    run: Path | None = None,
    step: int | None = None,
    context: int | None = None,
    counts: Path | None = None,
    draws: int = 3,
    sizes: Sizes | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `ladder drops` prints: the traffic, a record a transport, and what a measured run dropped itself.

    Args:
        shape: assumed traffic; of no effect where a run is given.
        run, counts: measured routing instead, `read_run` and `read_counts`.
        context: another length for a measured run: as many tokens a rank in fewer or more documents.
        options: of `make_configs`.
    Raises:
        ValueError: bad numbers, or both run and counts.
    """
    if run is not None and counts is not None:
        raise ValueError("--run and --counts exclude each other; give one")
    if context is not None and run is None:
        raise ValueError(f"--context {context} needs --run: it is another length of a measured run")
    if run is None:
        traffics = (shape,) if counts is None else read_counts(counts, shape)
        rows = study(traffics, make_configs(traffics[0], **options), draws=draws, sizes=sizes)
        return {"traffic": describe(traffics[0]), "measured": None, "rows": rows}
    measured = read_run(run, step=step)
    configs = make_configs(measured.traffics[0], **options)
    configs = [measured.config, *(config for config in configs if config != measured.config)]
    traffics = [dataclasses.replace(traffic, seed=shape.seed) for traffic in measured.traffics]
    if context is None:
        tilt = _likeness(traffics, measured, draws=draws)
        traffics = [dataclasses.replace(traffic, document_tilt=tilt) for traffic in traffics]
    else:
        fitted = fit_traffic(measured.run_config, measured.deviations, measured.sender_drop_fraction, draws=1)
        traffics = [_at_context(dataclasses.replace(traffic, seed=shape.seed), context) for traffic in fitted]
    rows = study(traffics, configs, draws=draws, sizes=measured.sizes)
    own = {name: getattr(measured, name) for name in ("run", "step", *_DROPS)}
    return {"traffic": describe(traffics[0]), "measured": own, "rows": rows}


def _likeness(traffics: Sequence[Traffic], measured: Measured, *, draws: int) -> float:
    """The document tilt that makes the run's own transport drop what it did; 0 where popularity alone drops as much."""
    many = [dataclasses.replace(traffic, seed=traffic.seed + draw) for traffic in traffics for draw in range(draws)]
    try:
        return calibrate(many, measured.config, measured.drop_fraction, by="document_tilt", low=0.02, high=3.0)
    except ValueError:
        return 0.0


def _at_context(traffic: Traffic, context: int) -> Traffic:
    if context < 1 or traffic.tokens_per_rank % context:
        raise ValueError(f"--context {context} does not divide the {traffic.tokens_per_rank} tokens of a rank")
    return dataclasses.replace(traffic, documents_per_rank=traffic.tokens_per_rank // context)


def published_result(*, log: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Every published group predicted, and the transports of the trained hero weighed by context length.

    Args:
        log: called with a line before each part, which takes seconds.
    """
    say = log or (lambda line: None)
    groups = []
    for group in GROUPS:
        say(f"{group.title} …")
        groups.append(predict_group(group))
    tilt = next(group["value"] for group in groups if group["by"] == "document_tilt")
    studies = []
    for documents, context in ((16, "4K"), (4, "16K"), (1, "65K")):
        say(f"the hero's transports at {context} …")
        traffic = dataclasses.replace(TRAINED, documents_per_rank=documents, document_tilt=tilt)
        rows = study([traffic], make_configs(traffic, waves=3))
        title = f"Trained hero, {context} context"
        studies.append({"title": title, "traffic": describe(traffic), "measured": None, "rows": rows})
    return {"groups": groups, "studies": studies}


def describe(traffic: Traffic) -> dict[str, Any]:
    """A traffic as plain values; no concentration where popularity is measured or equal."""
    fields = asdict(traffic)
    measured = fields.pop("popularity") is not None
    if measured or math.isinf(traffic.concentration):
        fields["concentration"] = None
    return fields
