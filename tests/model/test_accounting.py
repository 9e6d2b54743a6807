"""Counts against what they count: shapes that would be allocated, operations of the compiled program, figures stated
by others; never against the same formula again."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.ladder.family import load_family
from rungwise.model.accounting import ParameterCount, attended_keys, count_flops, count_params, price_context
from rungwise.model.config import ModelConfig
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.transformer import abstract_params, forward, init_bias


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Weights by part, counted on the shapes that would be allocated, by their names."""
    tree = abstract_params(config)

    def size(node: object) -> int:
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(node))

    def named(*names: str) -> int:
        """Leaves whose path holds one of the names."""
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return sum(size(leaf) for path, leaf in paths if any(part.key in names for part in path))

    gates = ("gate", "attention_norm_gate", "moe_norm_gate", "embed_norm_gate", "final_norm_gate")
    norms = ("attention_norm", "moe_norm", "embed_norm", "final_norm", "latent_norm", "query_norm", "key_norm")
    return {
        "embed": named("embed"),
        "attention": sum(size(tree["layers"]["attention"][name]) for name in ("query", "key", "value", "out")),
        "router": named("router"),
        "latent": named("latent_down", "latent_up"),
        "experts": named("experts"),
        "shared": named("shared"),
        "norms": named(*norms),
        "gates": named(*gates),
        "convolutions": named("conv"),
        "head": named("head"),
        "total": size(tree),
    }


def _counted(counts: ParameterCount) -> dict[str, int]:
    return counts.parts() | {"total": counts.total}


_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention_gate": (False, True),
    "gated_norm_rank": (0, 3),
    "embed_norm": (False, True),
    "learned_query_key_norm": (True, False),
    "tied_head": (False, True),
    "latent_dim": (10, None),
    "num_shared_experts": (2, 0),
    "global_kv_heads": (None, 1),
    "short_conv_sites": ((), ("key", "attention", "moe"), ("value",)),
}


def _combinations() -> list[dict[str, Any]]:
    """Few of all combinations, spread so that each pair of settings meets in one."""
    every = list(itertools.product(*_SWITCHES.values()))
    return [dict(zip(_SWITCHES, values, strict=True)) for values in every[29::85]]


def test_combinations_hold_every_pair_of_settings():
    chosen = _combinations()
    for first, second in itertools.combinations(_SWITCHES, 2):
        met = {(item[first], item[second]) for item in chosen}
        assert met == set(itertools.product(_SWITCHES[first], _SWITCHES[second]))


@pytest.mark.parametrize("changes", _combinations(), ids=str)
def test_count_params_equals_allocated_shapes(config: ModelConfig, changes: dict[str, Any]):
    wider = config.replace(head_dim=12)  # attention and residual widths differ
    changed = wider.replace(**changes, short_conv_kernel=4 if changes["short_conv_sites"] else 0)
    assert _counted(count_params(changed)) == _sizes(changed)


@pytest.mark.parametrize("family", ["tiny", "marin"])
def test_count_params_equals_the_shapes_of_every_run_of(family: str):
    runs = [run for run in load_family(family).runs if run.run == run.rung]
    assert len(runs) == 5
    for run in runs:
        assert _counted(count_params(run.model)) == _sizes(run.model)


def test_active_params_leave_out_idle_experts_tables_and_gates(config: ModelConfig):
    changed = config.replace(attention_gate=True, gated_norm_rank=3, short_conv_kernel=4, short_conv_sites=("moe",))
    counts = count_params(changed)
    idle = (8 - 2) * 5 * 3 * 10 * 6
    tables, gates, taps = 2 * 17 * 16, 5 * 16 * 4 + (2 * 5 + 1) * 2 * 16 * 3, 5 * 4 * 16
    assert counts.active_everything == counts.total - idle
    assert counts.active_with_gates == counts.total - idle - tables
    assert counts.active == counts.total - idle - tables - gates - taps


def test_balancing_bias_is_counted_where_the_rule_keeps_one(config: ModelConfig):
    biases = {rule: count_params(config.replace(balance=rule)) for rule in ("quantile", "loss_free_bias", "none")}
    assert [counts.balancing_bias for counts in biases.values()] == [5 * 8, 5 * 8, 0]
    assert len({counts.total for counts in biases.values()}) == 1


WORKED_CASE = ModelConfig(
    vocab_size=32,
    seq_len=16,
    hidden_dim=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    window=16,
    global_every=1,
    rotary_fraction=0.5,
    rotary_theta=100.0,
    query_key_multiplier=1.0,
    learned_query_key_norm=False,
    num_experts=4,
    top_k=1,
    num_shared_experts=2,
    expert_dim=16,
    latent_dim=None,
    gate_sum=1.0,
    balance="none",
    logit_z_loss_weight=0.0,
    init_scale=0.5,
    norm_epsilon=1e-6,
)
"""Two layers of width 8, four experts of which one is active, shared experts of width 32 in all: enough for paper.

Faults it tells apart: all experts counted (32,640), shared experts at the routed width (14,208), the embedding look-up
priced as a product (20,352 without attention). Sources: AI-Hypercomputer/maxtext #4017 and #678.
"""


def test_worked_case_to_the_last_digit():
    counts, flops = count_params(WORKED_CASE), count_flops(WORKED_CASE)
    assert (counts.total, counts.active_everything, counts.active) == (5_736, 3_432, 2_920)
    assert flops.matmul + flops.head == 18_816
    assert flops.total(head=True) == 21_888
    assert flops.total(head=True, causal=True) == 20_352
    assert flops.forward(head=True) == 21_888 / 3
    assert _sizes(WORKED_CASE)["total"] == 5_736


def test_tied_head_saves_parameters_and_no_flops():
    tied = WORKED_CASE.replace(tied_head=True)
    assert count_params(tied).total == 5_736 - 8 * 32
    assert count_params(tied).active == 2_920
    assert count_flops(tied) == count_flops(WORKED_CASE)


def test_attended_keys_equals_counting_the_mask_with_each_own_key_half():
    for seq_len, window in ((7, 3), (6, 6), (9, 1), (16, 16)):
        with_own = sum(0 <= i - j < window for i in range(seq_len) for j in range(seq_len))
        without_own = sum(0 < i - j <= window for i in range(seq_len) for j in range(seq_len))
        assert attended_keys(seq_len, window, causal=True) == pytest.approx((with_own + without_own) / 2 / seq_len)
        assert attended_keys(seq_len, window, causal=False) == window


def test_whole_window_attention_is_twelve_times_width_and_window(config: ModelConfig):
    flops = count_flops(config)
    assert flops.attention == 12 * (4 * 8) * (3 * 5 + 2 * 12)  # three local layers, two global ones
    assert flops.attention_causal < flops.attention


def test_gates_and_convolutions_are_priced_beside_the_published_convention(config: ModelConfig):
    gated = config.replace(attention_gate=True, gated_norm_rank=3, short_conv_kernel=4, short_conv_sites=("key",))
    plain, full = count_flops(config), count_flops(gated)
    assert full.total(head=True) == plain.total(head=True)
    assert full.gates == 6 * (5 * 16 * 4 + (2 * 5 + 1) * 2 * 16 * 3)
    assert full.convolutions == 6 * 5 * 4 * (2 * 8)
    extra = full.total(head=True, everything=True) - plain.total(head=True, everything=True)
    assert extra == full.gates + full.convolutions


def test_price_context_keeps_local_windows(config: ModelConfig):
    own, longer = price_context(config, (12, 48))
    assert (own.relative, own.relative_causal) == (1.0, 1.0)
    added = 12 * (4 * 8) * 2 * (48 - 12)  # the two global layers see more, the three local ones do not
    assert longer.flops_per_token == pytest.approx(own.flops_per_token + added)
    assert longer.relative == pytest.approx(longer.flops_per_token / own.flops_per_token)
    assert longer.relative > longer.relative_causal > 1


WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "seq_len": 128,
    "hidden_dim": 128,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "window": 128,
    "num_experts": 4,
    "top_k": 2,
    "num_shared_experts": 1,
    "expert_dim": 128,
    "latent_dim": 64,
    "balance": "none",
}
"""Matrix products dominate, and every layer multiplies its whole window in one block of queries."""

OPTIONS: dict[str, Any] = {
    "attention_gate": True,
    "exclusive_attention": True,
    "gated_norm_rank": 64,
    "embed_norm": True,
    "learned_query_key_norm": False,
    "short_conv_kernel": 4,
    "short_conv_sites": ("key", "value", "attention", "moe"),
}


def _compiled_flops(config: ModelConfig, *, training: bool, batch: int = 32) -> float:
    """FLOPs a token of the compiled forward pass, or of loss and gradients, as XLA counts them. Nothing is run."""
    method = build_method(dropless_config(config.num_experts, config.top_k))
    tokens = jax.ShapeDtypeStruct((batch, config.seq_len), jnp.int32)

    def loss(params: Any, bias: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(forward(params, bias, tokens, config=config, method=method).logits))

    function = jax.value_and_grad(loss) if training else loss
    bias = jax.eval_shape(lambda: init_bias(config))
    analysis = jax.jit(function).lower(abstract_params(config), bias, tokens).compile().cost_analysis()
    assert isinstance(analysis, dict)
    return analysis["flops"] / (batch * config.seq_len)


@pytest.mark.parametrize(
    ("changes", "training"),
    [
        pytest.param({}, False, id="plain-forward"),
        pytest.param({}, True, id="plain-training"),
        pytest.param(OPTIONS, False, id="options-forward"),
        pytest.param(OPTIONS, True, id="options-training", marks=pytest.mark.slow),
        pytest.param({"tied_head": True}, True, id="tied-training", marks=pytest.mark.slow),
        pytest.param({"latent_dim": None, "num_shared_experts": 0}, True, id="bare-training", marks=pytest.mark.slow),
        pytest.param({"num_layers": 3, "num_kv_heads": 4}, True, id="deep-training", marks=pytest.mark.slow),
    ],
)
def test_flops_are_those_of_the_compiled_program(config: ModelConfig, changes: dict[str, Any], training: bool):
    """XLA also counts additions and multiplications of norms, softmax, activations and the loss, and the last, partly
    filled block of rows of each expert (here 6% of the experts' products): an excess of a few percent."""
    wide = config.replace(**WIDE).replace(**changes)
    flops = count_flops(wide)
    ours = (flops.total if training else flops.forward)(head=True, everything=True)
    assert 1.0 <= _compiled_flops(wide, training=training) / ours <= 1.06


def test_flops_of_a_longer_context_are_those_of_the_compiled_program(config: ModelConfig):
    short, long = (config.replace(**WIDE).replace(seq_len=length, window=length) for length in (32, 128))
    compiled = [_compiled_flops(model, training=False, batch=4096 // model.seq_len) for model in (short, long)]
    ours = [count_flops(model).forward(head=True) for model in (short, long)]
    # softmax adds some operations to the 128 = 2 · 2 · head_dim of a head and key
    assert 1.0 <= (compiled[1] - compiled[0]) / (ours[1] - ours[0]) <= 1.1
