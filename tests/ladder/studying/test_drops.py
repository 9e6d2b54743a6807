"""`ladder drops`: simulated, from measured counts, from a run's journal, and against published figures."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rungwise.comm.config import TransportConfig
from rungwise.comm.drop_study import simulate
from rungwise.comm.routing import Traffic, draw_routes
from rungwise.ladder.cli import app
from rungwise.ladder.family import load_family
from rungwise.ladder.home import write_json
from rungwise.ladder.recording.journal import Journal
from rungwise.ladder.studying import drops, drops_table
from rungwise.ladder.studying.drops_published import GROUPS, Figure, Group

SHAPE = ("--ranks", "4", "--tokens", "512", "--experts", "32", "--top-k", "4", "--skew", "3")
PAGE = Path(__file__).parents[3] / "docs" / "drops.md"


def refused(result) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_drops_json_is_what_the_rules_give(ladder):
    result = json.loads(ladder("drops", *SHAPE, "--draws", "2", "--waves", "2", "--json").stdout)
    traffic = Traffic(num_ranks=4, tokens_per_rank=512, num_experts=32, top_k=4, concentration=3.0)
    configs = drops.make_configs(traffic, waves=2)
    drawn = [simulate(dataclasses.replace(traffic, seed=seed), configs) for seed in (0, 1)]
    assert [row["label"] for row in result["rows"]] == [drops.label(config) for config in configs]
    for position, row in enumerate(result["rows"]):
        assert row["drop_fraction"] == pytest.approx(np.mean([one[position].fraction for one in drawn]))
        assert row["sender_drop_fraction"] + row["receiver_drop_fraction"] == pytest.approx(row["drop_fraction"])
        assert row["balanced_drop_fraction"] <= row["drop_fraction"]
        assert row["lowest_draw"] <= row["drop_fraction"] <= row["highest_draw"]
    assert {row["name"] for row in result["rows"]} == {"dropless", "expert_cell", "pooled_wave", "ragged"}


def test_drops_table_shows_the_alternatives_and_draws_them(ladder, tmp_path):
    result = ladder("drops", *SHAPE, "--capacity", "1.05/1.33", "--spill", "1", "--plot", "drops.svg")
    assert result.returncode == 0, result.stderr
    for word in ("pooled_wave 1.05/1.33, 1 spill", "expert_cell 1.05, 1 spill", "ragged 1.33", "dropless", "balanced"):
        assert word in result.stdout
    assert "<svg" in (tmp_path / "drops.svg").read_text()[:500]


def test_drops_help_shows_an_example(ladder):
    assert "Example: ladder drops" in ladder("drops", "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transport", "poold"], "pooled_wave"),
        (["--capacity", "much"], "much"),
        (["--capacity", "0"], "no slots"),
        (["--draws", "0"], "draws 0"),
        (["--skew", "-1"], "concentration -1"),
        (["--ranks", "5"], "num_ranks 5"),
        (["--run", "nowhere"], "nowhere"),
        (["--counts", "nowhere.json"], "nowhere.json"),
        (["--run", ".", "--counts", "x"], "--counts"),
        (["--output", "page.md"], "--published"),
        (["--plot", "drops.docx"], "docx"),
    ],
)
def test_drops_refuses_bad_input_with_its_value(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=said) as caught:
        app(["drops", *SHAPE, *words], standalone_mode=False)
    assert "\n" not in str(caught.value)


def test_drops_bad_input_is_one_line_and_code_2(ladder):
    assert "did you mean 'pooled_wave'" in refused(ladder("drops", *SHAPE, "--transport", "poold"))


def test_drops_of_measured_counts(tmp_path):
    random = np.random.default_rng(0)
    popularity = random.dirichlet(np.full(32, 2.0), size=2)
    path = tmp_path / "counts.json"
    path.write_text(json.dumps((popularity * 1e6).round().tolist()))
    shape = Traffic(num_ranks=4, tokens_per_rank=512, num_experts=32, top_k=4)
    result = drops.study_result(shape, counts=path, draws=2, transports=["ragged"], capacities=["1.1"])
    planted = [dataclasses.replace(shape, popularity=tuple(row)) for row in popularity]
    config = TransportConfig(name="ragged", num_experts=32, top_k=4, num_ranks=4, receiver_capacity_factor=1.1)
    want = [simulate(dataclasses.replace(one, seed=seed), [config])[0].fraction for one in planted for seed in (0, 1)]
    (row,) = result["rows"]
    assert row["drop_fraction"] == pytest.approx(np.mean(want), rel=0.02)
    assert row["worst_drop_fraction"] == pytest.approx(max(np.mean(want[:2]), np.mean(want[2:])), rel=0.02)
    path.write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match="3 weights for 32 experts"):
        drops.study_result(shape, counts=path)
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="JSON list"):
        drops.read_counts(path, shape)


def planted_run(folder: Path) -> dict[str, float]:
    """A run of `tiny` whose journal holds what planted popularity and likeness of documents do to its transport.

    Returns:
        What the same traffic drops with other transports.
    """
    run = load_family("tiny").hero_run
    transport, model = run.transport, run.model
    random = np.random.default_rng(0)
    traffic = Traffic(
        num_ranks=transport.num_ranks,
        tokens_per_rank=run.sequences_per_rank * model.seq_len,
        num_experts=model.num_experts,
        top_k=model.top_k,
        documents_per_rank=run.sequences_per_rank,
        document_tilt=0.45,
    )
    others = drops.make_configs(traffic, transports=["expert_cell", "ragged"], capacities=["1.15"])
    layers: dict[str, list[float]] = {f"moe/{name}": [] for name in ("frequency_deviation", *drops._DROPS)}
    elsewhere: list[list[float]] = []
    for _ in range(2):
        popularity = tuple(random.dirichlet(np.full(model.num_experts, 20.0)))
        parts = [
            dataclasses.replace(traffic, popularity=popularity, seed=seed) for seed in range(run.data_replicas * 4)
        ]
        loads = [np.bincount(np.concatenate(list(draw_routes(part))).reshape(-1), minlength=32) for part in parts]
        load = np.sum(loads[: run.data_replicas], axis=0)
        made = [simulate(part, [transport, *others]) for part in parts]
        own = [drawn[0] for drawn in made]
        layers["moe/frequency_deviation"].append(float(load.std() / load.mean()))
        layers["moe/drop_fraction"].append(float(np.mean([one.fraction for one in own])))
        layers["moe/sender_drop_fraction"].append(float(np.mean([one.sender_fraction for one in own])))
        layers["moe/receiver_drop_fraction"].append(float(np.mean([one.receiver_fraction for one in own])))
        elsewhere.append([float(np.mean([drawn[at].fraction for drawn in made])) for at in (1, 2)])
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"config": run.model_dump(mode="json")})
    with Journal(folder, family="tiny", run="hero") as journal:
        journal.start_attempt(0)
        journal.write(7, {"train/loss": 1.0}, layers=layers)
        journal.end(7, "finished")
    return dict(zip(("expert_cell", "ragged"), np.mean(elsewhere, axis=0), strict=True))


def test_drops_of_a_run_are_predicted_for_the_transports_it_did_not_use(ladder, tmp_path):
    planted = planted_run(tmp_path / "hero")
    printed = ladder("drops", "--run", "hero", "--draws", "20", "--capacity", "1.15", "--json")
    assert printed.returncode == 0, printed.stderr
    result = json.loads(printed.stdout)
    measured, rows = result["measured"], {row["name"]: row for row in result["rows"][::-1]}
    assert (measured["run"], measured["step"]) == ("tiny/hero", 7)
    own = result["rows"][0]
    for name in ("drop_fraction", "sender_drop_fraction", "receiver_drop_fraction"):
        assert own[name] == pytest.approx(measured[name], abs=0.01)
    assert result["traffic"]["document_tilt"] == pytest.approx(0.45, abs=0.15)
    assert rows["expert_cell"]["drop_fraction"] == pytest.approx(planted["expert_cell"], abs=0.015)
    assert rows["ragged"]["drop_fraction"] == pytest.approx(planted["ragged"], abs=0.01)
    assert "step 8" in refused(ladder("drops", "--run", "hero", "--step", "8"))


def test_drops_of_a_run_without_its_transport_are_refused(ladder, rungs_home):
    line = refused(ladder("drops", "--run", rungs_home / "tiny" / "runs" / "d32"))
    assert "says nothing of its model and transport" in line


def planted_group() -> Group:
    """Figures that the model itself gives at one skew, so that nothing is missed."""
    traffic = Traffic(num_ranks=4, tokens_per_rank=2048, num_experts=32, top_k=4, concentration=6.0)
    configs = drops.make_configs(traffic, transports=["expert_cell", "pooled_wave"], capacities=["1.15"])
    cell, wave = simulate(traffic, configs)
    blank = dataclasses.replace(traffic, concentration=1.0, seed=5)
    pool = Figure(what="a pool", source="planted", traffic=blank, config=configs[1], fraction=wave.fraction)
    return Group(
        title="Planted",
        by="concentration",
        low=1.0,
        high=60.0,
        anchor=Figure(what="a cell", source="planted", traffic=blank, config=configs[0], fraction=cell.fraction),
        others=(pool, dataclasses.replace(pool, side="receiver", fraction=0.5)),
    )


def test_drops_published_figures_are_predicted_from_one_and_missed_by_what_is_said():
    group = planted_group()
    made = drops.predict_group(group)
    anchor, pool, receiver = made["rows"]
    assert made["value"] == pytest.approx(6.0, rel=0.15)
    assert (anchor["anchor"], pool["anchor"]) == (True, False)
    assert abs(anchor["miss"]) < 0.001
    assert abs(pool["miss"]) < 0.01
    assert receiver["miss"] == pytest.approx(receiver["receiver"] - 0.5)
    studies = [{"title": "T", "traffic": drops.describe(group.anchor.traffic), "rows": []}]
    page = drops_table.drops_page({"groups": [made], "studies": studies})
    assert "| a cell | planted |" in page
    assert "calibrated" in page
    assert f"{100 * receiver['miss']:+.3g} pp" in page


def test_drops_costs_of_the_reference_hero_by_hand():
    # Per wave: 64 payloads of 3,141 slots and 2 header rows; 6 experts of 33,497 rows, three waves.
    traffic = Traffic(num_ranks=64, tokens_per_rank=65_536, num_experts=384, top_k=8)
    pooled, ragged = drops.make_configs(traffic, transports=["pooled_wave", "ragged"], capacities=["1.15"], waves=3)
    made = drops.costs(pooled, num_tokens=65_536, sizes=drops.Sizes(width=3072, inner=1024))
    assert made["transport_bytes"] == 3 * 64 * (3141 + 2) * 6144
    assert made["expert_bytes"] == 6 * 33_497 * (2 * 3072 + 2 * 1024) * 2
    assert made["padded_compute"] == pytest.approx(3 * 6 * 33_497 / 524_288)
    made = drops.costs(ragged, num_tokens=65_536, sizes=drops.Sizes(width=3072, inner=1024))
    assert made["transport_bytes"] == (2 * 524_288 + 4717 * 128) * 6144


@pytest.mark.slow
def test_drops_page_holds_what_its_command_finds():
    page = PAGE.read_text()
    for group in GROUPS[:2]:
        made = drops.predict_group(group)
        assert f"### {group.title}" in page
        for row in made["rows"]:
            assert f"| {' | '.join(drops_table.figure_cells(row))} |" in page
