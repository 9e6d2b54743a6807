"""Sweeps: the grid and its bad input, what counts as diverged, and one real grid trained, resumed and read back."""

import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from rungwise.analysis.sweeps.optimum import recipe_gap
from rungwise.ladder import console
from rungwise.ladder.family import LearningRateLaw, load_family
from rungwise.ladder.home import read_json
from rungwise.ladder.studying.sweep import conclude, load_summary, run_sweep
from rungwise.ladder.studying.sweep_grid import Grid, build_cells, parse_factors, parse_seeds, parse_settings
from rungwise.ladder.studying.sweep_measure import History, divergence, measure_cell
from rungwise.ladder.studying.sweep_table import law_lines, sweep_table

EDITS = {
    'name = "tiny"': 'name = "mini"',
    "num_layers = 3 ": "num_layers = 2 ",
    "num_experts = 32 ": "num_experts = 8 ",
    "top_k = 4 ": "top_k = 2 ",
    "seq_len = 128": "seq_len = 32",
    "tokens_per_active_param = ": "tokens_per_active_param = 0.8 #",
    "num_sequences = ": "num_sequences = 16 #",
    "hidden_dim = 32": "hidden_dim = 16",
}


LAW = """[learning_rate]
coefficient = 1.0
tokens_exponent = 0.0
hidden_exponent = -1.0
batch_exponent = 0.0
"""


@pytest.fixture
def mini(edited_family: Callable[..., Path]) -> Path:
    """`tiny` made narrow, shallow and short, its rate 1 / width: fifteen steps on the smallest rung, d16."""

    def with_law(text: str) -> str:
        head, _, rest = text.partition("[learning_rate]")
        return head + LAW + rest[rest.index("\n[") :]

    return edited_family(EDITS, then=with_law)


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_factors_are_of_the_recipe_and_steps_follow(mini):
    family = load_family(str(mini))
    recipe = family.rung_runs[0]
    cells = build_cells(family, Grid(rungs=("d16",), lr=(0.5, 1.0), batch=(0.5, 1.0, 2.0), horizon=(1.0, 3.0)))
    assert len(cells) == 12
    for cell in cells:
        config = cell.config
        assert config.learning_rate == pytest.approx(cell.lr * recipe.learning_rate)
        assert config.batch_size == cell.batch * recipe.batch_size
        assert abs(config.tokens - cell.horizon * recipe.tokens) <= config.tokens_per_step / 2
        assert cell.at_recipe == (cell.batch == cell.horizon == 1.0)
    (same,) = [cell for cell in cells if cell.at_recipe and cell.lr == 1.0]
    assert same.config.replace(run="d16") == recipe


def test_rate_factors_are_of_the_law_at_the_cells_own_batch_and_tokens(mini):
    text = mini.read_text().replace("batch_exponent = 0.0", "batch_exponent = 0.5")
    mini.write_text(text.replace("tokens_exponent = 0.0", "tokens_exponent = -0.25"))
    family = load_family(str(mini))
    plain, more, longer = (
        build_cells(family, Grid(batch=(batch,), horizon=(horizon,)))[0].config
        for batch, horizon in ((1.0, 1.0), (4.0, 1.0), (1.0, 16.0))
    )
    assert more.learning_rate / plain.learning_rate == pytest.approx(2.0, rel=0.02)
    assert longer.learning_rate / plain.learning_rate == pytest.approx(0.5, rel=0.02)


def test_cells_of_equal_shape_share_a_program_and_no_two_cells_a_file(mini):
    family = load_family(str(mini))
    settings = parse_settings(["logit_z_loss_weight=0,1e-4"])
    grid = Grid(lr=(0.5, 1.0), batch=(1.0, 2.0), horizon=(1.0, 4.0), seeds=(0, 1), settings=settings)
    cells = build_cells(family, grid)
    assert len({cell.file for cell in cells}) == len(cells) == 32
    assert len({cell.program for cell in cells}) == 4  # batch × setting
    recipes = {cell.settings["logit_z_loss_weight"] for cell in cells if cell.at_recipe}
    assert recipes == {"1e-4"}
    random = build_cells(family, Grid(seeds=(0, 1), settings=parse_settings(["routing=random", "balance=none"])))
    assert len({cell.program for cell in random}) == 2  # a seed draws its own routes


def test_settings_reach_every_table_and_pairs_change_together(mini):
    family = load_family(str(mini))
    words = ["balance=auxiliary_loss", "balance_loss_weight=0.01,0.1", "optimizer.clip_norm=none,1"]
    cells = build_cells(family, Grid(settings=parse_settings(words)))
    found = {(cell.config.model.balance_loss_weight, cell.config.optimizer.clip_norm) for cell in cells}
    assert found == {(weight, clip) for weight in (0.01, 0.1) for clip in (None, 1.0)}
    assert {cell.config.model.balance for cell in cells} == {"auxiliary_loss"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.5,fast"], "--lr '0.5,fast': 'fast' is no positive number"),
        (["--lr", "0,1"], "'0' is no positive number"),
        (["--batch", "0.3"], "--batch 0.3: data_replicas 2 of rung d16 times 0.3"),
        (["--horizon", "inf"], "'inf' is no positive number"),
        (["--rung", "d17"], "--rung d17: not in family mini; its rungs are d16, d48"),
        (["--set", "balance"], "--set 'balance'"),
        (["--set", "balanse=none"], "did you mean 'balance'?"),
        (["--set", "balance=quantile,nome"], "--set balance=nome: balance"),
        (["--set", "top_k=2,9"], "top_k 9 exceeds num_experts 8"),
        (["--set", "data.path=x"], "no table 'data'"),
        (["--set", "top_k=1", "--set", "top_k=2"], "given twice"),
        (["--seeds", "0,-1"], "--seeds '0,-1'"),
        (["--level", "1"], "--level 1.0"),
        (["--name", "../up"], "--name '../up'"),
        (["--horizon", "1,100000"], "more than max_epochs 1"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(mini, home, words, said):
    from rungwise.ladder.cli import app

    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        app(["sweep", str(mini), "--home", str(home), *words], standalone_mode=False)
    assert not isinstance(refused.value, ValidationError)  # already in words of its own
    assert not (home / "mini").exists()


def test_bad_input_is_one_line_and_exit_code_2(ladder, mini, home):
    result = ladder("sweep", mini, "--home", home, "--horizon", "1,100000")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: run d16-s0-b1-h100000-lr1: steps ")


def test_a_family_that_is_only_planned_is_not_swept(home):
    with pytest.raises(ValueError, match="plan_only"):
        run_sweep("marin", Grid(), home=home)


def test_parsers_sort_factors_and_seeds_once_each():
    assert parse_factors("--lr", "2,0.5,1,2.0") == (0.5, 1.0, 2.0)
    assert parse_seeds("3,0,3") == (0, 3)
    assert parse_settings(["a=1,2,1", "b.c=x"]) == (("a", ("1", "2")), ("b.c", ("x",)))
    assert Grid(lr=(0.5, 1.0), settings=(("balance", ("quantile", "none")),)).name == "lr-balance"


# --- what is measured -------------------------------------------------------------------------------------------------


def history_of(loss, grad_norm=None):
    values = {
        "train/grad_norm": 1.0,
        "train/nonfinite": 0.0,
        "moe/drop_fraction": 0.1,
        "moe/expert_load_max_over_mean": 1.5,
        "moe_worst_layer/expert_load_max_over_mean": 2.0,
    }
    history = History()
    for step, number in enumerate(loss):
        norm = 1.0 if grad_norm is None else grad_norm[step]
        late = {"moe/drop_fraction": 0.02} if step >= 0.75 * len(loss) else {}
        history.add({**values, "train/loss": number, "train/grad_norm": norm, **late})
    return history


def run_of(mini, steps):
    (cell,) = build_cells(load_family(str(mini)), Grid())
    return cell.config.replace(steps=steps)


def test_figures_of_a_cell_are_means_and_peaks_of_the_stated_parts(mini):
    config = run_of(mini, 200)  # warm-up 5%: 10 steps
    loss = np.linspace(5.0, 3.0, 200)
    norms = np.ones(200)
    norms[[5, 50, 150]] = 9.0, 4.0, 2.0
    figures = measure_cell(history_of(loss, norms), config, eval_loss=3.1)
    assert figures["train_loss"] == pytest.approx(loss[-10:].mean())
    assert figures["best_train_loss"] == pytest.approx(loss[-10:].mean())
    assert (figures["grad_norm_peak"], figures["grad_norm_peak_late"]) == (4.0, 2.0)
    assert figures["drop_fraction"] == pytest.approx(0.02)
    assert (figures["expert_load"], figures["expert_load_worst_layer"]) == (1.5, 2.0)
    assert (figures["nonfinite_steps"], figures["diverged"], figures["why"]) == (0, False, None)


def test_a_run_that_rises_again_or_breaks_off_has_diverged(mini):
    config = run_of(mini, 200)
    risen = np.concatenate([np.linspace(5.0, 3.0, 100), np.linspace(3.0, 3.7, 100)])
    assert "above its own best" in measure_cell(history_of(risen), config, eval_loss=3.7)["why"]
    calm = np.concatenate([np.linspace(5.0, 3.0, 100), np.linspace(3.0, 3.4, 100)])
    assert measure_cell(history_of(calm), config, eval_loss=3.4)["why"] is None
    broken = measure_cell(history_of([5.0, 4.0, math.nan], [1.0, 1.0, math.inf]), config, eval_loss=math.nan)
    assert broken["diverged"]
    assert (broken["nonfinite_steps"], broken["steps_done"]) == (1, 3)
    plain = {"eval_loss": 5.6, "train_loss": 5.5, "best": 5.5, "nonfinite": 0}
    assert "above ln(vocab_size)" in (divergence(**plain, vocab_size=256) or "")
    assert divergence(**plain, vocab_size=300) is None


# --- what the cells say together --------------------------------------------------------------------------------------


PLANTED = {"coefficient": 0.3, "hidden_exponent": -0.8, "batch_exponent": 0.3, "tokens_exponent": -0.1}


def planted_result(mini, grid, *, diverged_above=math.inf):
    """What a grid concludes whose losses follow a planted law of the best rate, and are best at twice the batch."""
    family = load_family(str(mini))
    cells, rows = build_cells(family, grid), []
    random = np.random.default_rng(0)
    for cell in cells:
        config = cell.config
        sizes = {"tokens": config.tokens, "hidden_dim": config.model.hidden_dim}
        best = LearningRateLaw(**PLANTED).peak(tokens_per_step=config.tokens_per_step, **sizes)
        loss = 2.0 - 0.1 * (cell.horizon > 1) + 0.06 * math.log(config.learning_rate / best) ** 2
        loss += 0.05 * math.log(cell.batch / 2) ** 2 + 0.002 * random.standard_normal()
        gone = config.learning_rate > diverged_above
        figures = measure_cell(history_of([5.0, math.nan] if gone else [loss] * 5), config, eval_loss=loss)
        place = {"rung": cell.rung, "set": cell.settings, "batch": cell.batch, "horizon": cell.horizon, "lr": cell.lr}
        rows.append({**figures, **place, **sizes, "tokens_per_step": config.tokens_per_step})
    return conclude(family, grid, cells, rows, name="planted", level=0.9)


def test_laws_of_a_grid_are_those_planted_and_fit_into_a_family_file(mini):
    rungs, rates = ("d16", "d48", "d80"), parse_factors("--lr", "0.125,0.25,0.5,1,2,4")
    grid = Grid(rungs=rungs, lr=rates, batch=(1.0, 2.0, 4.0), horizon=(1.0, 8.0))
    result = planted_result(mini, grid)
    assert not any(row["optimum"]["at_edge"] for row in result["optima"])
    (laws,) = result["laws"]
    table = tomllib.loads("\n".join(law_lines(laws, level=0.9)))["learning_rate"]
    LearningRateLaw(**table)
    for name in ("hidden_exponent", "batch_exponent", "tokens_exponent"):
        assert table[name] == pytest.approx(PLANTED[name], abs=0.12)
    hero = load_family(str(mini)).hero_run
    sizes = {"tokens": hero.tokens, "hidden_dim": 128, "tokens_per_step": hero.tokens_per_step}
    (found,) = [row for row in laws["learning_rate"]["predictions"] if row["name"] == "hero"]
    assert found["low"] < LearningRateLaw(**PLANTED).peak(**sizes) < found["high"]
    for row in result["batch_optima"]:
        assert row["optimum"]["value"] == pytest.approx(2 * row["optimum"]["recipe"], rel=0.15)
        assert row["optimum"]["lost"] == pytest.approx(0.05 * math.log(2) ** 2, abs=0.012)


def test_table_names_edges_and_what_diverged(mini, capsys):
    result = planted_result(mini, Grid(rungs=("d16",), lr=(0.25, 0.5, 1.0, 2.0, 4.0)), diverged_above=0.05)
    (row,) = result["optima"]
    assert row["optimum"]["diverges_from"] == pytest.approx(1 / 16)
    assert row["optimum"]["at_edge"]
    console.print_result(sweep_table(result))
    lines = capsys.readouterr().out.splitlines()
    assert any("from 0.0625" in line for line in lines)
    assert any("d16, batch ×1, horizon ×1: fewer than three values" in line for line in lines)
    assert sum("2 of 15" in line and line.rstrip().endswith("diverged") for line in lines) == 3
    assert any("no law" in line for line in lines)


# --- a real grid ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_grid_is_trained_with_one_program_resumed_and_read_back(ladder, mini, home):
    words = ("sweep", mini, "--lr", "0.5,1", "--horizon", "1,2", "--home", home, "--json")
    first = ladder(*words, JAX_LOG_COMPILES="1", timeout=900)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    folder = home / "mini" / "sweeps" / "lr-horizon"
    assert Path(result["folder"]) == folder
    (log,) = folder.glob("logs/*.log")
    compiled = [line for line in log.read_text().splitlines() if "Compiling" in line and "train_step" in line]
    assert len(compiled) == 1, compiled
    assert Path(result["figure"]).read_bytes().startswith(b"\x89PNG")

    cells = {(cell["lr"], cell["horizon"]): cell for cell in result["cells"]}
    assert len(cells) == 4
    assert all(2.0 < cell["eval_loss"] < 5.6 for cell in cells.values())
    assert len({cell["eval_loss"] for cell in cells.values()}) == 4
    assert cells[1.0, 2.0]["steps"] == pytest.approx(2 * cells[1.0, 1.0]["steps"], abs=1)
    assert cells[1.0, 2.0]["eval_loss"] < cells[1.0, 1.0]["eval_loss"]

    files = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    assert all(read_json(path)["corpus_hash"] for path in files)
    gone = folder / "cells" / cells[0.5, 1.0]["file"]
    gone.unlink()
    again = json.loads(ladder(*words, timeout=900).stdout)
    assert {key: value for key, value in again.items() if key != "cells"} == {
        key: value for key, value in result.items() if key != "cells"
    }
    assert [cell["eval_loss"] for cell in again["cells"]] == [cell["eval_loss"] for cell in result["cells"]]
    changed = {path for path, time in files.items() if path.stat().st_mtime_ns != time}
    assert changed == {gone}

    summary = load_summary(home, "mini")
    assert summary is not None
    assert [entry["sweep"] for entry in summary["rungs"]["d16"]] == ["lr-horizon", "lr-horizon"]
    assert recipe_gap(summary, "d16") is None  # two rates are no sweep
    table = ladder(*words[:-1], timeout=900)
    assert table.returncode == 0
    assert "fewer than three values" in table.stdout


@pytest.mark.slow
def test_a_cell_at_the_recipe_is_the_ladders_run(ladder, mini, home):
    swept = ladder("sweep", mini, "--home", home, "--json", timeout=900)
    (cell,) = json.loads(swept.stdout)["cells"]
    assert ladder("run", mini, "--rung", "d16", "--home", home, "--quiet", timeout=900).returncode == 0
    records = (home / "mini" / "runs" / "d16" / "metrics.jsonl").read_text().splitlines()
    values = [record.get("values", {}) for record in map(json.loads, records)]
    losses = [figures["eval/loss"] for figures in values if "eval/loss" in figures]
    assert cell["eval_loss"] == pytest.approx(losses[-1], abs=1e-5)


def test_a_child_that_fails_is_code_1_and_one_line_that_names_its_log(ladder, mini, home):
    result = ladder("sweep", mini, "--lr", "0.5,1", "--home", home, "--quiet", JAX_PLATFORMS="abacus")
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "1 of 1 groups of cells failed: d16-b1-" in line
    assert "abacus" in line
    log = Path(line.rpartition("(log: ")[2].removesuffix(")"))
    assert "Traceback" in log.read_text()
    assert not list((home / "mini" / "sweeps" / "lr" / "cells").iterdir())
    assert load_summary(home, "mini") is None
