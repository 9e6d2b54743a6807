"""What each transport costs: time, drops, bytes between ranks, collectives, rows computed, and eight ranks against one.

Times are of virtual ranks in one process, forward and backward, medians of alternating rounds: compare them with one
another, not with another run's. Bytes and collectives are read off the same function lowered for accelerators on a mesh
of no devices. Weights and tokens are drawn at random, since kernels are faster on zeros; routes by `comm/routing.py`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from rungwise.comm.buffers import buffer_rows
from rungwise.comm.config import TransportConfig
from rungwise.comm.ranks import Ranks, over_ranks
from rungwise.comm.routing import Traffic, draw_routes
from rungwise.comm.transports import route
from rungwise.ladder.console import log
from rungwise.ladder.studying.bench import seconds
from rungwise.ladder.training.backend import keep_freed_memory
from rungwise.model.methods import AXIS, run_experts

ROUNDS = 15
CONCENTRATION = 9.0
"""Skew of the routes, the Dirichlet concentration `ladder drops` assumes: some rows drop, as in training."""

BASELINE = "pooled_wave"
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        BASELINE: {"name": "pooled_wave"},
        "pooled_wave, 2 waves": {"name": "pooled_wave", "num_waves": 2},
        "pooled_wave, mxfp8": {"name": "pooled_wave", "payload": "mxfp8"},
        "expert_cell": {"name": "expert_cell"},
        "ragged": {"name": "ragged"},
        "dropless": {"name": "dropless"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One expert layer to measure: `num_tokens` a rank, rows of `width` values, experts of `inner` hidden ones."""

    num_tokens: int
    num_experts: int
    top_k: int
    width: int
    inner: int
    num_ranks: int = 8


SHAPES = (
    Shape(num_tokens=256, num_experts=16, top_k=2, width=64, inner=64),
    Shape(num_tokens=256, num_experts=32, top_k=4, width=128, inner=128),
    Shape(num_tokens=128, num_experts=64, top_k=8, width=128, inner=64),
)


def config_of(variant: str, shape: Shape) -> TransportConfig:
    """The transport of one of `VARIANTS` at a shape, with the default capacity factors."""
    return TransportConfig(
        num_experts=shape.num_experts, top_k=shape.top_k, num_ranks=shape.num_ranks, **VARIANTS[variant]
    )


class Moved(NamedTuple):
    """One collective of a lowered program, types of one rank."""

    kind: str
    operand: tuple[int, ...]
    itemsize: int


class Inputs(NamedTuple):
    """Of one step, ranks first; `direction` is what the output is multiplied by for a scalar to differentiate."""

    tokens: Any
    gates: Any
    weights: dict[str, Any]
    experts: Any
    direction: Any


def draw_inputs(shape: Shape, *, num_ranks: int) -> Inputs:
    """Random values and skewed routes, the same for any number of ranks among which they are dealt out."""
    random = np.random.default_rng(0)
    traffic = Traffic(
        num_ranks=shape.num_ranks,
        tokens_per_rank=shape.num_tokens,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        concentration=CONCENTRATION,
    )
    num_tokens, experts, width, inner = shape.num_ranks * shape.num_tokens, shape.num_experts, shape.width, shape.inner

    def deal(values: np.ndarray) -> jax.Array:
        kind = jnp.float32 if values.dtype.kind == "f" else jnp.int32
        return jnp.asarray(values.reshape(num_ranks, -1, *values.shape[1:]), kind)

    return Inputs(
        tokens=deal(random.normal(size=(num_tokens, width))),
        gates=deal(random.dirichlet(np.ones(shape.top_k), size=num_tokens)),
        weights={
            "gate_up": deal(random.normal(size=(experts, width, 2, inner)) / math.sqrt(width)),
            "down": deal(random.normal(size=(experts, inner, width)) / math.sqrt(inner)),
        },
        experts=deal(np.concatenate(list(draw_routes(traffic)))),
        direction=deal(random.normal(size=(num_tokens, width))),
    )


def make_step(config: TransportConfig, *, mesh: AbstractMesh | None = None) -> Callable[..., Any]:
    """`Inputs` → (loss, (drop counts, kept assignments)) and gradients of tokens, gates and weights, by rank."""
    ranks = Ranks(AXIS, config.num_ranks, mesh)

    def one_rank(tokens: jax.Array, experts: jax.Array, gates: jax.Array, weights: dict[str, jax.Array]) -> Any:
        return route(tokens, experts, gates, partial(run_experts, weights), axis=AXIS, config=config)

    def objective(tokens: jax.Array, gates: jax.Array, weights: Any, experts: jax.Array, direction: jax.Array) -> Any:
        result = over_ranks(one_rank, ranks)(tokens, experts, gates, weights)
        return jnp.sum(result.output * direction), (result.counts, result.kept)

    return jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)


def lower_on_mesh(config: TransportConfig, inputs: Inputs) -> str:
    """StableHLO of a step on a mesh of no devices, as accelerators run it: `ragged` by the native exchange."""
    native = replace(config, ragged_exchange="native")
    mesh = AbstractMesh((config.num_ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
    traced = jax.jit(make_step(native, mesh=mesh)).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


_COLLECTIVE = re.compile(
    r'(?:"stablehlo\.(all_to_all|all_gather|reduce_scatter|all_reduce)"|custom_call @(ragged_all_to_all))'
    r"\(.*?: \(tensor<((?:\d+x)*)[a-z]+(\d+)>",
    re.DOTALL,
)


def read_collectives(text: str) -> list[Moved]:
    """Every collective of a lowered program, in order of appearance."""
    return [
        Moved(plain or ragged, tuple(int(size) for size in sizes.split("x")[:-1]), int(bits) // 8)
        for plain, ragged, sizes, bits in _COLLECTIVE.findall(text)
    ]


def bytes_sent(moved: Moved, *, num_ranks: int, rows_away: float) -> float:
    """Bytes that one rank sends to others, its own share left out.

    Of an operand of B bytes on R ranks: all-to-all and reduce-scatter B (R − 1) / R, all-gather B (R − 1), all-reduce
    twice the reduce-scatter (a ring). The ragged exchange sends the rows that go to others, whatever its buffer.

    Args:
        rows_away: computed assignments of a rank whose expert is another rank's, mean over ranks.

    >>> bytes_sent(Moved("all_to_all", (8, 10, 4), 4), num_ranks=8, rows_away=0.0)
    1120.0
    """
    if moved.kind == "ragged_all_to_all":
        return rows_away * math.prod(moved.operand[1:]) * moved.itemsize
    shares = {"all_to_all": 1, "reduce_scatter": 1, "all_gather": num_ranks, "all_reduce": 2}
    return math.prod(moved.operand) * moved.itemsize * shares[moved.kind] * (num_ranks - 1) / num_ranks


def time_rounds(
    steps: Mapping[TransportConfig, Callable[[], Any]], *, rounds: int
) -> dict[TransportConfig, list[float]]:
    """Seconds of each step, once a round; every other round in reverse order. The first call is not counted."""
    times: dict[TransportConfig, list[float]] = {config: [] for config in steps}
    for step in steps.values():
        seconds(step)
    for number in range(rounds):
        for config in list(steps)[:: 1 if number % 2 == 0 else -1]:
            times[config].append(seconds(steps[config]))
    return times


def on_one_rank(config: TransportConfig) -> TransportConfig:
    """The same transport where nothing travels, hence no payload format either."""
    return replace(config, num_ranks=1, payload="compute")


def bench_shape(shape: Shape, *, rounds: int = ROUNDS, variants: tuple[str, ...] = tuple(VARIANTS)) -> dict[str, Any]:
    """One record a transport at one shape, `BASELINE` among them."""
    configs = {name: config_of(name, shape) for name in variants}
    spread, whole = draw_inputs(shape, num_ranks=shape.num_ranks), draw_inputs(shape, num_ranks=1)
    steps: dict[TransportConfig, Callable[[], Any]] = {}
    for config in configs.values():
        for each, inputs in ((config, spread), (on_one_rank(config), whole)):
            if each not in steps:
                steps[each] = partial(jax.jit(make_step(each)).lower(*inputs).compile(), *inputs)
    times = time_rounds(steps, rounds=rounds)
    baseline = times[configs[BASELINE]]
    records = []
    for name, config in configs.items():
        alone = on_one_rank(config)
        result, on_one = steps[config](), steps[alone]()
        records.append(
            {
                "transport": name,
                "ms": 1e3 * median(times[config]),
                "time_over_pooled_wave": _median_ratio(times[config], baseline),
                "time_over_one_rank": _median_ratio(times[config], times[alone]),
                **_drops(result),
                "one_rank_drop_fraction": _drops(on_one)["drop_fraction"],
                **_traffic(config, spread, result),
                **_rows(config, shape, result),
            }
        )
    return {**asdict(shape), "transports": records}


def _median_ratio(times: list[float], others: list[float]) -> float:
    """Of the pairs measured in the same round."""
    return median(time / other for time, other in zip(times, others, strict=True))


def _drops(result: Any) -> dict[str, float]:
    counts = result[0][1][0]
    valid, sender, receiver = (
        float(jnp.sum(count)) for count in (counts.valid, counts.sender_dropped, counts.receiver_dropped)
    )
    return {
        "drop_fraction": (sender + receiver) / valid,
        "sender_drop_fraction": sender / valid,
        "receiver_drop_fraction": receiver / valid,
    }


def _traffic(config: TransportConfig, inputs: Inputs, result: Any) -> dict[str, Any]:
    """Collectives by kind and bytes a rank sends, forward and backward, without rematerialisation."""
    owner = inputs.experts // config.experts_per_rank
    away = result[0][1][1] & (owner != jnp.arange(config.num_ranks)[:, None, None])
    moved = read_collectives(lower_on_mesh(config, inputs))
    rows_away = float(jnp.sum(away)) / config.num_ranks
    return {
        "collectives": dict(Counter(each.kind for each in moved)),
        "bytes_sent": sum(bytes_sent(each, num_ranks=config.num_ranks, rows_away=rows_away) for each in moved),
    }


def _rows(config: TransportConfig, shape: Shape, result: Any) -> dict[str, float]:
    """Rows a rank's experts compute, over its assignments, and the share of their FLOPs that no kept one needs."""
    rows = buffer_rows(config, num_tokens=shape.num_tokens, width=shape.width).computed
    kept = float(jnp.sum(result[0][1][1])) / config.num_ranks
    return {
        "rows_computed": rows,
        "rows_over_assignments": rows / (shape.num_tokens * shape.top_k),
        "padded_flops_share": 1 - kept / rows,
    }


def run_bench_transports(shapes: tuple[Shape, ...] = SHAPES, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Everything `ladder bench transports` prints."""
    keep_freed_memory()
    results = []
    for number, shape in enumerate(shapes):
        log(f"transports: shape {number + 1} of {len(shapes)}")
        results.append(bench_shape(shape, rounds=rounds))
    return {
        "jax": jax.__version__,
        "devices": f"{len(jax.devices())} × {jax.devices()[0].platform}",
        "rounds": rounds,
        "shapes": results,
    }
