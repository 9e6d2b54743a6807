"""How a plan looks in a terminal: the object that `ladder plan --json` prints, as Rich tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rungwise.ladder.planning.memory_table import configurations_table, drops_table, memory_table
from rungwise.ladder.tables import build_table, percent, quantity, scientific

Row = Mapping[str, Any]

_PLAN_ROWS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("width × layers", lambda r: f"{r['hidden_dim']:,} × {r['num_layers']}"),
    ("parameters, total", lambda r: quantity(r["num_params"])),
    ("parameters, active", lambda r: quantity(r["num_active_params"])),
    ("tokens", lambda r: quantity(r["tokens"])),
    ("tokens per active parameter", lambda r: f"{r['tokens_per_active_param']:.1f}"),
    ("steps", lambda r: f"{r['steps']:,}"),
    ("batch, sequences", lambda r: f"{r['batch_size']:,}"),
    ("context, tokens", lambda r: f"{r['seq_len']:,}"),
    ("learning rate", lambda r: f"{r['learning_rate']:.4g}"),
    ("training FLOPs", lambda r: scientific(r["flops"])),
    ("training FLOPs with head", lambda r: scientific(r["flops_with_head"])),
    ("… with head, causal", lambda r: scientific(r["flops_causal_with_head"])),
)
_EVERYTHING_ROW = ("… everything counted", lambda r: scientific(r["flops_everything"]))
_LAST_OF_GROUP = frozenset(["parameters, active", "learning rate"])

_PARTS = {
    "embed": "embedding",
    "attention": "attention",
    "router": "router",
    "latent": "latent projections",
    "experts": "routed experts",
    "shared": "shared experts",
    "norms": "norm gains",
    "gates": "gates",
    "convolutions": "short convolutions",
    "head": "head",
}
_NOT_CALLED_ACTIVE = ("embed", "gates", "convolutions", "head")

_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "num_params": ("parameters, total", quantity),
    "num_params_with_bias": ("parameters with biases", quantity),
    "num_active_params": ("parameters, active", quantity),
    "tokens": ("tokens", quantity),
    "steps": ("steps", lambda value: f"{value:,}"),
    "flops": ("training FLOPs", scientific),
    "flops_with_head": ("training FLOPs with head", scientific),
    "ladder_flops_share": ("ladder's share of the hero", percent),
    "ladder_flops_share_with_head": ("… with head", percent),
}


def plan_view(plan: Row) -> RenderableType:
    """The whole plan: every run, the hero by part, what others state, other horizons, longer context."""
    tables: list[RenderableType] = [plan_table(plan), parts_table(plan), token_table(plan)]
    if plan["phases"]:
        tables.append(phases_table(plan))
    if plan["epochs"]:
        tables.append(epochs_table(plan))
    if len(plan["horizons"]) > 1:
        tables.append(horizons_table(plan))
    if plan["plan_only"]:
        tables.append(context_table(plan))
    names = [record["name"] for record in _columns(plan)]
    tables += [memory_table(plan["memory"], names), drops_table(plan["drops"], names)]
    if plan["memory"]["device_memory"] is not None or plan["plan_only"]:
        tables.append(configurations_table(plan["memory"]))
    if plan["published"]:
        tables.append(published_table(plan))
    return Group(*(Padding(table, (0, 0, 1, 0)) for table in tables))


def _columns(plan: Row) -> list[Row]:
    """One record a rung and the hero's: seeds of a rung differ in nothing that is planned."""
    return [record for record in (*plan["rungs"], plan["hero"]) if record["name"] == record["rung"]]


def plan_cells(plan: Row) -> tuple[list[str], list[list[str]], str]:
    """Heads, rows and a note: one column a rung and one for the hero; the seeds of a rung share a column."""
    seeds = Counter(record["rung"] for record in plan["rungs"])
    hero, runs = plan["hero"], _columns(plan)
    rows = [["seeds", *(str(seeds[record["rung"]] or 1) for record in runs)]]
    has_more = hero["flops_everything"] > hero["flops_with_head"]
    for label, text in (*_PLAN_ROWS, *([_EVERYTHING_ROW] if has_more else [])):
        rows.append([label, *(text(record) for record in runs)])
    rows.append(["share of the hero", *(percent(record["flops"] / hero["flops"]) for record in runs)])
    note = (
        f"{hero['num_experts']} experts, top {hero['top_k']}, {hero['num_shared_experts']} shared; "
        f"vocabulary {hero['vocab_size']:,}; {hero['optimizer']}; "
        f"{hero['transport']} over {hero['num_ranks']} ranks.\n"
        f"Capacity factors: {hero['sender_capacity_factor']} sender, {hero['receiver_capacity_factor']} receiver.\n"
        "Training is three forward passes; whole attention windows, no head unless named.\n"
        + ("Everything: head, gates and convolutions.\n" if has_more else "")
        + f"The whole ladder costs {percent(plan['ladder_flops_share'])} of the hero's training FLOPs, "
        f"{percent(plan['ladder_flops_share_with_head'])} with head."
    )
    return ["", *(record["name"] for record in runs)], rows, note


def plan_table(plan: Row) -> Table:
    """Every derived number of each run."""
    columns, rows, note = plan_cells(plan)
    table = build_table(f"plan of {plan['family']}", *columns, caption=note)
    table.columns[0].no_wrap = True
    table.columns[-1].style = "bold"
    for row in rows:
        table.add_row(*row, end_section=row[0] in _LAST_OF_GROUP)
    return table


def parts_table(plan: Row) -> Table:
    """Parameters by part, the hero's exactly; beside a published total, what remains of it."""
    hero, runs = plan["hero"], _columns(plan)
    rungs = [plan["parts"][record["name"]] for record in runs[:-1]]
    parts = plan["parts"]["hero"]
    note = f"Active: what one token uses, of the routed experts the top {hero['top_k']}, without embedding and head"
    if hero["num_active_params_with_gates"] > hero["num_active_params"]:
        with_gates = f"{hero['num_active_params_with_gates']:,}"
        note += f" and, as in the reference's figures, without gates and convolutions. With these two {with_gates}"
    note += f"; with everything {hero['num_active_params_everything']:,}."
    names = (record["name"] for record in runs[:-1])
    table = build_table("parameters by part", "", *names, "hero, exactly", "hero, active", caption=note)
    table.columns[0].no_wrap = True
    for name, label in _PARTS.items():
        if parts["params"][name] or any(rung["params"][name] for rung in rungs):
            active = "–" if name in _NOT_CALLED_ACTIVE else f"{parts['active_params'][name]:,}"
            cells = (quantity(rung["params"][name]) for rung in rungs)
            table.add_row(label, *cells, f"{parts['params'][name]:,}", active)
    table.add_section()
    totals = (quantity(record["num_params"]) for record in runs[:-1])
    exact = f"[bold]{hero['num_params']:,}[/]"
    table.add_row("total", *totals, exact, f"[bold]{hero['num_active_params']:,}[/]")
    _add_published_total(table, plan, rungs)
    return table


def _add_published_total(table: Table, plan: Row, rungs: Sequence[Row]) -> None:
    totals = ("num_params", "num_params_with_bias")
    found = [item for item in plan["published"] if item["run"] == "hero" and item["quantity"] in totals]
    if not found:
        return
    (*_, item), blank = found, [""] * len(rungs)
    if item["quantity"] == "num_params_with_bias":
        biases = (quantity(rung["balancing_bias"]) for rung in rungs)
        table.add_row("balancing biases (state)", *biases, f"{plan['parts']['hero']['balancing_bias']:,}", "")
    table.add_row(f"published, {escape(item['source'])}", *blank, f"{item['published']:,}", "")
    table.add_row("ours minus published", *blank, f"[bold]{item['difference']:,}[/]", "")


def token_table(plan: Row) -> Table:
    """FLOPs of one token of the hero by part, forward and in training."""
    parts = plan["parts"]["hero"]
    training, sums = parts["flops_per_token"], parts["training_flops_per_token"]
    rows = {
        "products of weights": training["matmul"],
        "attention, whole windows": training["attention"],
        "head": training["head"],
        "gates": training["gates"],
        "short convolutions": training["convolutions"],
        "attention, causal instead": training["attention_causal"],
        "without head, whole windows": sums["without_head"],
        "with head, whole windows": sums["with_head"],
        "with head, causal": sums["with_head_causal"],
        "everything, whole windows": sums["everything"],
        "everything, causal": sums["everything_causal"],
    }
    forward = sums["everything"] / parts["forward_flops_per_token"]["everything"]
    more = sums["everything"] > sums["with_head"]
    columns = ("", "forward", "training", "of everything")
    table = build_table("FLOPs of one token of the hero", *columns)
    for label, value in rows.items():
        if value and (more or "everything" not in label):
            cells = (scientific(value / forward), scientific(value), percent(value / sums["everything"]))
            table.add_row(label, *cells, end_section=label == "attention, causal instead")
    return table


def phases_table(plan: Row) -> Table:
    """Context and mixture of the hero by phase, and what each phase costs; a step keeps its tokens."""
    phases, hero = plan["phases"]["hero"], plan["hero"]
    columns = ("steps", "context", "sequences a rank", "window", "query-key", "mixture", "tokens", "FLOPs", "a token")
    limits = sorted({f"{phase['seq_len']:,}" for phase in phases if phase["max_drop_fraction"] is not None})
    note = (
        f"FLOPs without head; a token's over the first phase's. {hero['tokens_per_step']:,} tokens a step throughout."
    )
    if limits:
        note += f" Context {', '.join(limits)} begins only where it drops little enough."
    table = build_table("phases of the hero", *columns, caption=note)
    for phase in phases:
        weights = phase["weights"]
        table.add_row(
            f"{phase['first_step'] + 1:,}–{phase['last_step']:,}",
            f"{phase['seq_len']:,}",
            f"{phase['sequences_per_rank']:,}",
            f"{phase['window']:,}",
            f"{phase['query_key_multiplier']:.4g}",
            "" if weights is None else ", ".join(f"{name} {weight}" for name, weight in weights.items()),
            quantity(phase["tokens"]),
            scientific(phase["flops"]),
            f"{phase['flops_per_token'] / phases[0]['flops_per_token']:.3f}",
        )
    table.add_section()
    table.add_row("all", *[""] * 5, quantity(hero["tokens"]), scientific(hero["flops"]), "")
    return table


def epochs_table(plan: Row) -> Table:
    """How often every run reads each source, of what it may read of it."""
    names = [record["name"] for record in _columns(plan)]
    table = build_table("epochs of each source", "", *(name for name in names if name in plan["epochs"]))
    for source in plan["epochs"]["hero"]:
        table.add_row(escape(source), *(f"{plan['epochs'][name][source]:.3f}" for name in names))
    return table


def horizons_table(plan: Row) -> Table:
    """The hero at its own and at other token horizons, a column each."""
    horizons = plan["horizons"]
    names = ("as planned" if horizon["name"] == "own" else escape(horizon["name"]) for horizon in horizons)
    note = "At other horizons steps and rate follow from the recipe."
    table = build_table("token horizons of the hero", "", *names, caption=note)
    rows: dict[str, Callable[[Row], str]] = {
        "tokens": lambda h: f"{h['tokens']:,}",
        "tokens per active parameter": lambda h: f"{h['tokens_per_active_param']:.1f}",
        "steps": lambda h: f"{h['steps']:,}",
        "learning rate": lambda h: f"{h['learning_rate']:.4g}",
        "training FLOPs": lambda h: scientific(h["flops"]),
        "training FLOPs with head": lambda h: scientific(h["flops_with_head"]),
        "share that the ladder costs": lambda h: percent(h["ladder_flops_share"]),
        "… with head": lambda h: percent(h["ladder_flops_share_with_head"]),
    }
    for label, text in rows.items():
        table.add_row(label, *map(text, horizons))
    return table


def context_table(plan: Row) -> Table:
    """What a longer context costs the hero a token, local windows kept."""
    columns = ("context, tokens", "FLOPs a token", "attention's share", "times the plan's", "causal", "times, causal")
    note = "Training FLOPs a token with head; windows of local layers stay as they are."
    table = build_table("longer context", *columns, caption=note)
    table.columns[0].justify = "right"
    for price in plan["context"]:
        table.add_row(
            f"{price['seq_len']:,}",
            scientific(price["flops_per_token"]),
            percent(price["attention_share"]),
            f"{price['relative']:.3f}",
            scientific(price["flops_per_token_causal"]),
            f"{price['relative_causal']:.3f}",
        )
    return table


def published_table(plan: Row) -> RenderableType:
    """What others state about these runs, how far ours is from it, and where the statements come from."""
    names = [record["name"] for record in _columns(plan)]
    table = build_table("published figures; below each, how far ours is from it", "", *names)
    notes = Table.grid(padding=(0, 2))
    notes.add_column(no_wrap=True)
    for label, items in _statements(plan["published"]):
        _, text = _label_of(items[0]["quantity"])
        by_run = {"hero" if item["run"] == "ladder" else item["run"]: item for item in items}
        found = (by_run.get(name) for name in names)
        table.add_row(label, *(f"{text(item['published'])}\n{_distance(item)}" if item else "" for item in found))
        said = "; ".join(filter(None, (items[0]["note"], items[0]["source"])))
        notes.add_row(f"[dim]{label}[/]", f"[dim]{escape(' '.join(said.split()))}[/]")
    legend = "[dim]= the same figure    ≈ the same when rounded to the digits published[/]"
    return Group(table, Padding(legend, (0, 1)), Padding(notes, (1, 1)))


def _statements(published: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Figures of one statement together, labelled; a second statement about a quantity says which it is."""
    seen: Counter[str] = Counter()
    for _, group in groupby(published, key=lambda item: (item["quantity"], item["source"], item["note"])):
        items = list(group)
        label, _ = _label_of(items[0]["quantity"])
        seen[label] += 1
        yield label if seen[label] == 1 else f"{label} ({seen[label]})", items


def _label_of(name: str) -> tuple[str, Callable[[float], str]]:
    return _QUANTITIES.get(name, (name.replace("_", " "), lambda value: f"{value:.4g}"))


def _distance(item: Row) -> str:
    if item["difference"] == 0:
        return "[green]=[/]"
    if item["rounds_to_published"]:
        return "[green]≈[/]"
    relative = item["relative_difference"]
    return f"[yellow]{'+' if relative > 0 else '−'}{percent(abs(relative))}[/]"
