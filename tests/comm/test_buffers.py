import math
import re
import subprocess
import sys
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from rungwise.comm.buffers import buffer_rows, cell_slots, pool_room, ragged_room, row_bytes
from rungwise.comm.config import TransportConfig
from rungwise.comm.grouped import grouped_matmul
from rungwise.comm.ranks import Ranks, over_ranks
from rungwise.comm.transports import route

CASES = [
    ("expert_cell", {"num_waves": 2}),
    ("pooled_wave", {"num_waves": 2}),
    ("pooled_wave", {"payload": "mxfp8"}),
    ("expert_cell", {"payload": "mxfp8"}),
    ("ragged", {"ragged_exchange": "native"}),
    ("ragged", {"ragged_exchange": "native", "payload": "mxfp8"}),
]


def traced(layer, width):
    """Rows experts are given, and the text of the forward pass on a mesh of no devices."""
    computed = []

    def one_rank(tokens, ids, gates, weights, valid):
        def experts(rows, group_expert=None):
            computed.append(rows.shape[0] * rows.shape[1])
            return grouped_matmul(rows, weights[0], group_expert)[..., :width]

        return route(tokens, ids, gates, experts, axis="expert", config=layer.config, valid=valid).output

    mesh = AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    args = layer.tokens, layer.expert_ids, layer.gates, layer.weights, layer.valid
    fn = jax.jit(over_ranks(one_rank, Ranks(size=4, mesh=mesh)))
    return computed, fn.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def moved_bytes(text, kind):
    """Bytes of one rank's result of each such exchange."""
    sizes = {"f32": 4, "ui8": 1}
    found = re.findall(rf"{kind}.*-> tensor<([\dx]+)x(f32|ui8)>", text)
    return [math.prod(map(int, dims.split("x"))) * sizes[kind] for dims, kind in found]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_buffers_are_what_the_transport_allocates(moe, name, options):
    width = 40
    layer = moe.layer(name, num_ranks=4, num_tokens=48, width=width, factor=1.15, **options)
    config = layer.config
    rows = buffer_rows(config, num_tokens=48, width=width)
    computed, text = traced(layer, width)
    assert sum(computed) == rows.computed
    assert max(computed) == rows.computed_at_once
    moved = moved_bytes(text, "@ragged_all_to_all" if name == "ragged" else "stablehlo.all_to_all")
    assert len(moved) == 2 * config.num_waves
    row = row_bytes(config, width=width, itemsize=4)
    if name == "ragged":
        assert moved == [row * rows.received, row * rows.sent]
        return
    header = (
        4 * pool_room(config, num_tokens=48, width=width).header * (4 * width - row) if name == "pooled_wave" else 0
    )
    assert moved == [row * rows.sent_at_once + header] * len(moved)  # header rows travel unquantised
    assert rows.sent == rows.received == config.num_waves * rows.sent_at_once


def test_buffers_of_one_rank_send_nothing():
    for name in ("dropless", "expert_cell", "pooled_wave", "ragged"):
        config = TransportConfig(name=name, num_experts=8, top_k=2, num_waves=2)
        rows = buffer_rows(config, num_tokens=64, width=16)
        assert rows.sent == rows.received == rows.sent_at_once == 0
        assert rows.computed >= 128


def test_buffers_of_the_reference_hero_by_hand():
    shape: dict[str, Any] = {"num_experts": 384, "top_k": 8, "num_ranks": 64, "num_waves": 3}
    pooled = TransportConfig(name="pooled_wave", **shape)  # 524,288 assignments a rank
    room = pool_room(pooled, num_tokens=65_536, width=3072)
    assert (room.pool, room.header, room.expert) == (3141, 2, 33_497)  # ceil(1.15 · A / 192), ceil(3141 / 3072), / 18
    assert cell_slots(TransportConfig(name="expert_cell", **shape), num_tokens=65_536) == 1571
    ragged = ragged_room(TransportConfig(name="ragged", **shape), num_tokens=65_536)
    assert (ragged.pool, ragged.block, ragged.num_blocks) == (602_932, 128, 4711 + 6)
    assert row_bytes(pooled, width=3072, itemsize=2) == 6144
    fp8 = TransportConfig(name="pooled_wave", payload="mxfp8", **shape)
    assert row_bytes(fp8, width=3072, itemsize=2) == 3072 * 33 // 32


def test_buffers_import_no_jax():
    code = (
        "import rungwise.comm.buffers, rungwise.comm.drop_study, rungwise.comm.drop_rules, rungwise.comm.routing, sys;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
