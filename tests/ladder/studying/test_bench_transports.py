"""The bench of transports: what it reads off the programs has closed forms, and its tables show every figure."""

import math

import jax
import numpy as np
import pytest
from rich.console import Console

from rungwise.comm.buffers import buffer_rows, ragged_room
from rungwise.ladder.studying.bench_table import transports_table
from rungwise.ladder.studying.bench_transports import (
    BASELINE,
    SHAPES,
    VARIANTS,
    Moved,
    Shape,
    bench_shape,
    bytes_sent,
    config_of,
    draw_inputs,
    lower_on_mesh,
    read_collectives,
)

TINY = Shape(num_tokens=24, num_experts=8, top_k=2, width=16, inner=8, num_ranks=4)


def collectives_of(variant):
    config = config_of(variant, TINY)
    return config, read_collectives(lower_on_mesh(config, draw_inputs(TINY, num_ranks=4)))


@pytest.mark.parametrize("variant", ["pooled_wave", "pooled_wave, 2 waves", "expert_cell"])
def test_bench_bytes_are_four_trips_of_the_reserved_rows_and_one_sum(variant):
    config, moved = collectives_of(variant)
    rows = buffer_rows(config, num_tokens=24, width=16)
    want = 4 * rows.sent * 16 * 4 * 3 / 4  # out and back, twice; a quarter stays
    if config.name == "pooled_wave":
        want += 2 * 4 * 3 / 4
    assert sum(bytes_sent(each, num_ranks=4, rows_away=math.nan) for each in moved) == want


def test_bench_bytes_of_dropless_are_its_gathers_and_scattered_sums():
    _, moved = collectives_of("dropless")
    # Tokens, ids and gates out; outputs home; tokens again for the gradients; their sums and those of the gates home.
    tokens, gates = 24 * 16 * 4, 24 * 2 * 4
    assert sum(bytes_sent(each, num_ranks=4, rows_away=math.nan) for each in moved) == 3 * (4 * tokens + 3 * gates)


def test_bench_bytes_of_ragged_are_the_rows_that_leave_and_small_tables():
    config, moved = collectives_of("ragged")
    room = ragged_room(config, num_tokens=24)
    out, back = (room.block * room.num_blocks, 16), (48, 16)
    ragged = [each for each in moved if each.kind == "ragged_all_to_all"]
    assert sorted(each.operand for each in ragged) == sorted([back, out, back, out])
    tables = [each for each in moved if each.kind != "ragged_all_to_all"]
    assert {each.kind for each in tables} == {"all_gather", "all_to_all"}
    # Counts of 8 experts to 3 ranks, and four tables of as many int32 entries, a quarter of which stays.
    small = sum(bytes_sent(each, num_ranks=4, rows_away=math.nan) for each in tables)
    assert small == 3 * 8 * 4 + 4 * 8 * 4 * 3 / 4
    assert sum(bytes_sent(each, num_ranks=4, rows_away=30.5) for each in ragged) == 4 * 30.5 * 16 * 4


def test_bench_reads_bytes_where_the_payload_is_bytes():
    _, moved = collectives_of("pooled_wave, mxfp8")
    exchanges = [each for each in moved if each.kind == "all_to_all"]
    assert sorted(each.itemsize for each in exchanges) == [1, 1, 4, 4]  # gradients travel as they are
    assert bytes_sent(Moved("all_reduce", (), 4), num_ranks=4, rows_away=0.0) == 6.0


def test_bench_inputs_are_random_and_alike_for_any_number_of_ranks():
    for shape in (TINY, *SHAPES):
        spread, whole = draw_inputs(shape, num_ranks=shape.num_ranks), draw_inputs(shape, num_ranks=1)
        for part, alone in zip(jax.tree.leaves(spread), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(np.asarray(part).reshape(alone.shape), alone)
        values = jax.tree.leaves((spread.tokens, spread.gates, spread.weights, spread.direction))
        assert all((np.asarray(value) != 0).mean() > 0.999 for value in values)
        for name in VARIANTS:
            config_of(name, shape)  # every shape divides among ranks and waves


def test_bench_of_a_tiny_shape_weighs_transports_against_each_other():
    result = bench_shape(TINY, rounds=1, variants=(BASELINE, "dropless"))
    pooled, dropless = result["transports"]
    assert pooled["time_over_pooled_wave"] == 1.0
    assert dropless["drop_fraction"] == dropless["one_rank_drop_fraction"] == 0.0
    sides = pooled["sender_drop_fraction"] + pooled["receiver_drop_fraction"]
    assert pooled["drop_fraction"] == pytest.approx(sides)
    assert pooled["drop_fraction"] > 0
    for record, computed in ((pooled, 2 * math.ceil(1.15 * 48 / 2)), (dropless, 128 * (2 + 2))):
        assert record["rows_computed"] == computed
        useful = (1 - record["drop_fraction"]) * 48
        assert record["padded_flops_share"] == pytest.approx(1 - useful / computed)
    times = [record[name] for record in (pooled, dropless) for name in ("ms", "time_over_one_rank")]
    assert all(math.isfinite(time) and time > 0 for time in times)


def test_bench_transports_table_shows_every_figure():
    record = {
        "transport": "ragged",
        "ms": 12.34,
        "time_over_pooled_wave": 1.943,
        "time_over_one_rank": 1.288,
        "drop_fraction": 0.0266,
        "collectives": {"all_gather": 1, "ragged_all_to_all": 4},
        "bytes_sent": 444064.0,
        "rows_computed": 1896,
        "rows_over_assignments": 1.75,
        "padded_flops_share": 0.4437,
    }
    shape = {"num_ranks": 8, "num_tokens": 256, "num_experts": 16, "top_k": 2, "width": 64, "inner": 32}
    result = {"jax": "0.0", "devices": "1 × cpu", "rounds": 15, "shapes": [{**shape, "transports": [record]}]}
    console = Console(width=100)
    with console.capture() as capture:
        console.print(transports_table(result))
    shown = capture.get()
    figures = (
        "jax 0.0 on 1 × cpu",
        "8 ranks × 256 tokens, 16 experts top 2, width 64, inner 32",
        "12.3",
        "1.94",
        "1.29",
        "2.66%",
        "444 kB",
        "1,896 (1.75×)",
        "44.4%",
        "1 all-gather, 4 ragged-all-to-all",
        "15 alternating rounds",
    )
    for figure in figures:
        assert figure in shown


def test_bench_refuses_what_it_cannot_measure(ladder):
    result = ladder("bench", "transport")
    assert result.returncode == 2
    assert result.stderr == "error: bench 'transport' is unknown; give steps or transports\n"
