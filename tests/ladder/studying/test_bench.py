"""The bench measures the code that trains: every part runs at a rung's shape, and the tables show every figure."""

import math

import pytest
from rich.console import Console

from rungwise.ladder.family import load_family
from rungwise.ladder.studying.bench import bench_parts, on_one_rank
from rungwise.ladder.studying.bench_table import steps_table


@pytest.mark.slow
def test_bench_parts_run_at_a_rungs_shape():
    rung = load_family("tiny").rung_runs[0]
    ranks, one = bench_parts(rung), bench_parts(on_one_rank(rung))
    assert ranks.keys() == one.keys()
    assert all(math.isfinite(figure) and figure > 0 for figure in (*ranks.values(), *one.values()))


def test_bench_tables_show_every_figure():
    figures = {
        "step_ms": 31.25,
        "tokens_per_second": 65536.0,
        "share_of_ceiling": 0.31,
        "share_of_ceiling_best_step": 0.3333,
    }
    result = {
        "jax": "0.0",
        "devices": "1 × cpu",
        "matmul_ceiling_gflops": 123.4,
        "steps": {"shape": figures},
        "tracking_and_watch": {"record_and_judge_ms": 0.876, "share_of_step": 0.0123},
        "compile": {"4": {"compile_seconds": 12.3, "operations": 4567}},
        "parts_ms": {"shape": {"router": 1.234}},
    }
    console = Console(width=100)
    with console.capture() as capture:
        console.print(steps_table(result))
    shown = capture.get()
    figures = (
        "jax 0.0 on 1 × cpu",
        "123.4 GFLOP/s",
        "31.2",
        "65,536",
        "31.0%",
        "33.3%",
        "0.88 ms",
        "1.23%",
        "12.3",
        "4,567",
        "router",
    )
    for figure in figures:
        assert figure in shown
