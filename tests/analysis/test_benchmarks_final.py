"""The benchmark command in miniature: planted ladders, the page, and bad input."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rungwise.analysis.benchmarks.__main__ import page, to_markdown
from rungwise.analysis.benchmarks.calibration import (
    generator,
    knowing_width,
    log_loss_of,
    planted_cells,
    planted_note,
    planted_results,
)
from rungwise.analysis.benchmarks.public import Prediction, coverage, mean_score
from rungwise.analysis.benchmarks.sets import Split


@pytest.mark.slow
def test_planted_ladders_are_covered_at_a_fair_width():
    """Nominal 90 %, laws of one and of two powers, hero 30 to 400 times the top rung."""
    ladders: Any = planted_results(repeats=4, seed=3)
    assert len(ladders) == 72
    assert ladders["covered"].mean() >= 0.85
    assert (ladders["width"] / ladders["known"]).median() < 1.6
    assert planted_cells(ladders).shape == (6, 5)
    assert "72 ladders" in planted_note(ladders)


def test_knowing_interval_covers_what_its_generator_makes():
    rng = np.random.default_rng(0)
    ratio = np.append(np.geomspace(1 / 100, 1.0, 4), 100.0)
    drawn = log_loss_of(generator(np.random.default_rng(1), 20_000, "single"), ratio)
    widths, truths = [], []
    for _ in range(30):
        law = generator(rng, 1, "single")
        loss = np.exp(log_loss_of(law, ratio)[0] + 0.005 * rng.standard_normal(5))
        widths.append(knowing_width(drawn, loss[:4], rng))
        truths.append(float(loss[3] - loss[4]))
    widths = np.array(widths)
    known = widths[np.isfinite(widths)]
    assert known.size > 25
    assert 0.02 < np.median(known) < np.median(truths)


def test_winkler_score_and_coverage_of_a_prediction():
    found = Prediction(point=np.array([2.0, 2.0]), low=np.array([1.9, 1.9]), high=np.array([2.1, 2.1]))
    observed = np.array([2.05, 2.2])
    assert coverage(found, observed).tolist() == [True, False]
    assert mean_score(found, observed) == pytest.approx(0.2 + 0.5 * 20 * 0.1)


def test_frontier_is_lower_than_everything_of_less_compute():
    table = pd.DataFrame({"flops": [1.0, 1.0, 2.0, 3.0, 4.0], "loss": [3.0, 2.9, 2.95, 2.7, 2.8]})
    split = Split(name="x", train=table, test=table)
    assert split.frontier.train["loss"].tolist() == [2.9, 2.7]


def test_page_needs_its_data_and_names_unknown_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RUNGWISE_REFERENCE_DATA", raising=False)
    with pytest.raises(ValueError, match="RUNGWISE_REFERENCE_DATA"):
        page(["final_loss"])
    command = [
        sys.executable,
        "-P",
        "-m",
        "rungwise.analysis.benchmarks",
        "--out",
        str(tmp_path / "x.md"),
        "--only",
        "no",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "use final_loss, calibration, trajectory" in ended.stderr
    assert not (tmp_path / "x.md").exists()


def test_markdown_table_keeps_text_and_rounds_numbers():
    table = pd.DataFrame({"set": ["a"], "error": [0.123456], "score": [np.nan]})
    assert to_markdown(table).splitlines() == ["| set | error | score |", "|---|---|---|", "| a | 0.1235 | – |"]
