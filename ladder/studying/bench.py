"""What this machine does: matrix-product ceiling, training step with and without virtual ranks, where a step goes, and
how long it takes to compile.

Shares are ratios inside one process, medians of several alternating rounds; the ceiling is the best of seven products.
Numerator: model FLOPs of `model/accounting.py`, causal, with head, forward and backward, no padding or recomputation.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rungwise.comm.config import TransportConfig
from rungwise.ladder.console import log
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.training.backend import keep_freed_memory
from rungwise.ladder.training.optimizer import build_optimizer
from rungwise.ladder.training.step import init_state, make_train_step
from rungwise.ladder.training.train import matmul_ceiling
from rungwise.model.accounting import count_flops
from rungwise.model.attention import attention
from rungwise.model.balance import margins, quantile_bias, quantile_level
from rungwise.model.linear import linear, swiglu
from rungwise.model.loss import loss_sums, objective_of
from rungwise.model.methods import build_method, run_experts
from rungwise.model.router import Routes, choose_experts
from rungwise.model.transformer import layer_kinds

ROUNDS = 5
STEPS_PER_ROUND = 3
COMPILED_DEPTHS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Case:
    """One training shape to measure."""

    name: str
    config: RunConfig


def on_one_rank(config: RunConfig) -> RunConfig:
    """The same run without virtual ranks: one rank owns every expert, and each sequence."""
    transport = TransportConfig(
        name="pooled_wave",
        num_experts=config.model.num_experts,
        top_k=config.model.top_k,
        num_ranks=1,
        num_waves=1,
        sender_capacity_factor=config.transport.sender_capacity_factor,
        receiver_capacity_factor=config.transport.receiver_capacity_factor,
    )
    return config.replace(transport=transport, data_replicas=1, sequences_per_rank=config.batch_size)


def fixed_shape(config: RunConfig) -> RunConfig:
    """Hidden 128, 6 layers, 32 experts top-4 of width 64, batch 16 of 256 bytes, on 4 virtual ranks."""
    model = config.model.replace(
        hidden_dim=128, num_layers=6, seq_len=256, window=128, num_experts=32, top_k=4, expert_dim=64, latent_dim=64
    )
    return config.replace(model=model, data_replicas=1, sequences_per_rank=4)


def cases() -> tuple[Case, ...]:
    """The hero of `tiny` and the fixed shape, each with virtual ranks and without."""
    hero = load_family("tiny").hero_run
    fixed = fixed_shape(hero)
    return (
        Case("tiny hero, virtual ranks", hero),
        Case("tiny hero, one rank", on_one_rank(hero)),
        Case("fixed shape, virtual ranks", fixed),
        Case("fixed shape, one rank", on_one_rank(fixed)),
    )


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call, results awaited."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def measure_step(config: RunConfig) -> Callable[[], float]:
    """Compiles the training step; each call then times one more step, in seconds."""
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (config.batch_size, config.model.seq_len + 1)
    )
    batch = jnp.asarray(tokens, jnp.int32)
    state = [init_state(config)]
    step = jax.jit(make_train_step(config), donate_argnums=0).lower(state[0], batch).compile()

    def advance() -> float:
        start = time.perf_counter()
        state[0], figures = step(state[0], batch)
        jax.block_until_ready(figures)
        return time.perf_counter() - start

    advance()
    return advance


def bench_steps() -> dict[str, Any]:
    """Training steps against the ceiling, all shapes in turn within one process."""
    measured = cases()
    log(f"compiling the training step of {len(measured)} shapes")
    steps = {case.name: measure_step(case.config) for case in measured}
    times: dict[str, list[float]] = {case.name: [] for case in measured}
    ceilings = []
    for number in range(ROUNDS):
        log(f"training steps: round {number + 1} of {ROUNDS}")
        ceilings.append(matmul_ceiling(2048, tries=7))
        for name, step in steps.items():
            times[name] += [step() for _ in range(STEPS_PER_ROUND)]
    ceiling = max(ceilings)
    return {
        "matmul_ceiling_gflops": ceiling / 1e9,
        "steps": {case.name: _step_figures(case.config, times[case.name], ceiling) for case in measured},
    }


def _step_figures(config: RunConfig, times: list[float], ceiling: float) -> dict[str, float]:
    work = config.tokens_per_step * count_flops(config.model).total(head=True, causal=True)
    typical = median(times)
    return {
        "step_ms": 1e3 * typical,
        "tokens_per_second": config.tokens_per_step / typical,
        "share_of_ceiling": work / typical / ceiling,
        "share_of_ceiling_best_step": work / min(times) / ceiling,
    }


def bench_parts(config: RunConfig) -> dict[str, float]:
    """Milliseconds of each part of a layer, forward and backward, at a run's shape; and of what stands outside layers.

    Parts are compiled one by one, so their sum differs from a step's time, in which the compiler joins them.
    """
    log(f"parts of a step, {config.transport.num_ranks} rank(s)")
    state, model = init_state(config), config.model
    logits = _normal(config.tokens_per_step, model.num_experts)
    routes = choose_experts(logits, jnp.zeros(model.num_experts), top_k=model.top_k, gate_sum=model.gate_sum)
    parts = _differentiated_parts(config, state.params, routes)
    figures = {name: _median_ms(_with_gradient(function), *inputs) for name, (function, inputs) in parts.items()}
    level = partial(quantile_level, config=model, num_ranks=config.data_replicas * config.transport.num_ranks)
    balance = jax.jit(lambda logits, threshold: quantile_bias(level(margins(logits, threshold))))
    figures["quantile bias"] = _median_ms(balance, logits, routes.threshold)
    update = jax.jit(build_optimizer(config).update)
    figures["optimizer"] = _median_ms(update, state.params, state.optimizer, state.params)
    return figures


def _differentiated_parts(
    config: RunConfig, params: dict[str, Any], routes: Routes
) -> Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each part as a function and its inputs; tokens are rows, as between the parts of `model/moe.py`."""
    model, shape = config.model, (config.batch_size, config.model.seq_len)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    kind = jax.tree.map(lambda leaf: leaf[0], layer_kinds(model))
    moe, x = layer["moe"], _normal(config.tokens_per_step, model.hidden_dim)
    experts, gates = (leaf.reshape(*shape, -1) for leaf in (routes.experts, routes.gates))
    targets = jnp.asarray(np.random.default_rng(1).integers(0, model.vocab_size, shape))
    method = build_method(config.transport, data_replicas=config.data_replicas)
    choose = partial(choose_experts, bias=jnp.zeros(model.num_experts), top_k=model.top_k, gate_sum=model.gate_sum)

    def head(weights: jax.Array, x: jax.Array) -> jax.Array:
        sums = loss_sums(linear(x, weights).reshape(*shape, -1), targets)
        return objective_of(sums, config.tokens_per_step, z_loss_weight=1e-4)

    return {
        "attention": (
            lambda w, x: attention(w, x, kind, config=model)[0],
            (layer["attention"], x.reshape(*shape, -1)),
        ),
        "router": (lambda w, x: choose(linear(x, w)).gates, (moe["router"], x)),
        "latent projections": (
            lambda down, up, x: linear(linear(x, down), up),
            (moe["latent_down"], moe["latent_up"], x),
        ),
        "dispatch, experts and combine": (
            lambda w, latent: method.run(latent, experts, gates, w).output,
            (moe["experts"], _normal(*shape, model.routed_dim)),
        ),
        "experts alone, on full buffers": (
            run_experts,
            (moe["experts"], _normal(model.num_experts, _rows_per_expert(config), model.routed_dim)),
        ),
        "shared experts": (lambda w, x: swiglu(w["gate_up"], w["down"], x), (moe["shared"], x)),
        "head and loss": (head, (params["head"], x)),
    }


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def bench_overhead(config: RunConfig, *, rows: int = 200) -> dict[str, float]:
    """Milliseconds a step spends on being recorded and judged: naming, journal and watch, all in the training process.

    The copy to MLflow is a process of its own at the lowest priority and is not in this figure.
    """
    from rungwise.analysis.divergence import Monitor
    from rungwise.ladder.recording.journal import Journal
    from rungwise.ladder.recording.metrics import step_metrics

    tokens = jnp.zeros((config.batch_size, config.model.seq_len + 1), jnp.int32)
    _, figures = jax.jit(make_train_step(config))(init_state(config), tokens)
    jax.block_until_ready(figures)
    monitor, times = Monitor(), []
    with TemporaryDirectory() as folder, Journal(folder, family=config.family, run=config.run) as journal:
        journal.start_attempt(0)
        for step in range(1, rows + 1):
            start = time.perf_counter()
            values, layers = step_metrics(jax.device_get(figures))
            values["train/loss"] = 2.0 + 0.01 * (step % 7)
            journal.write(step, values, layers=layers)
            monitor.update({"step": step, "progress/tokens": float(step * config.tokens_per_step), **values})
            times.append(time.perf_counter() - start)
        journal.end(rows, "finished")
    return {"record_and_judge_ms": 1e3 * median(times)}


def bench_compile(config: RunConfig, *, depths: tuple[int, ...] = COMPILED_DEPTHS) -> dict[str, dict[str, float]]:
    """Seconds to compile the training step at several depths, and the operations of the compiled program.

    Up to eight layers are unrolled; beyond, layers run in a loop whose body is compiled once.
    """
    log(f"compiling the training step of {config.run} at {len(depths)} depths")
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
    figures = {}
    for depth in depths:
        deep = config.replace(model=config.model.replace(num_layers=depth))
        lowered = jax.jit(make_train_step(deep)).lower(jax.eval_shape(partial(init_state, deep)), tokens)
        start = time.perf_counter()
        compiled = lowered.compile()
        elapsed = time.perf_counter() - start
        figures[str(depth)] = {"compile_seconds": elapsed, "operations": (compiled.as_text() or "").count(" = ")}
    return figures


def _rows_per_expert(config: RunConfig) -> int:
    assignments = config.tokens_per_step * config.model.top_k
    return round(config.transport.receiver_capacity_factor * assignments / config.model.num_experts)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient of all inputs, compiled, of the output against a fixed random direction."""

    def objective(*inputs: Any) -> jax.Array:
        output = function(*inputs)
        return jnp.sum(output * jax.random.normal(jax.random.key(0), output.shape))

    return jax.jit(lambda *inputs: jax.value_and_grad(objective, argnums=tuple(range(len(inputs))))(*inputs))


def _median_ms(function: Callable[..., Any], *inputs: Any, tries: int = 9) -> float:
    seconds(lambda: function(*inputs))
    return 1e3 * median(seconds(lambda: function(*inputs)) for _ in range(tries))


def run_bench() -> dict[str, Any]:
    """Everything `ladder bench` prints."""
    config = load_family("tiny").hero_run
    keep_freed_memory()
    steps = bench_steps()
    overhead = bench_overhead(config)
    overhead["share_of_step"] = overhead["record_and_judge_ms"] / steps["steps"][cases()[0].name]["step_ms"]
    return {
        "jax": jax.__version__,
        "devices": f"{len(jax.devices())} × {jax.devices()[0].platform}",
        **steps,
        "compile": bench_compile(load_family("tiny").rung_runs[0]),
        "tracking_and_watch": overhead,
        "parts_ms": {
            "tiny hero, virtual ranks": bench_parts(config),
            "tiny hero, one rank": bench_parts(on_one_rank(config)),
        },
    }
