"""The program of a training step: beyond the unrolled depths its size does not grow with the number of layers."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rungwise.ladder.family import ExecutionConfig, RunConfig, load_family
from rungwise.ladder.training.step import init_state, make_train_step
from rungwise.model.transformer import MAX_UNROLLED_LAYERS

OPTIONS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "marin": {
        "attention_gate": True,
        "exclusive_attention": True,
        "gated_norm_rank": 4,
        "embed_norm": True,
        "short_conv_kernel": 4,
        "short_conv_sites": ("key", "attention", "moe"),
        "learned_query_key_norm": False,
        "quantile_estimator": "histogram",
    },
}


def _run(num_layers: int, execution: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    rung = load_family("tiny").rung_runs[0]
    shape = {"seq_len": 16, "vocab_size": 32, "hidden_dim": 16, "head_dim": 8, "window": 8, "expert_dim": 8}
    model = rung.model.replace(**{**shape, "latent_dim": 8, "num_layers": num_layers, **options})
    return rung.replace(model=model.model_dump(), execution=ExecutionConfig(**(execution or {})).model_dump(), steps=10)


def _lowered(config: RunConfig) -> Any:
    state = jax.eval_shape(lambda: init_state(config))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.model.seq_len + 1), jnp.int32)
    return jax.jit(make_train_step(config)).lower(state, tokens)


def _operations(config: RunConfig) -> Counter[str]:
    return Counter(re.findall(r"stablehlo\.\w+", _lowered(config).as_text()))


@pytest.mark.parametrize("options", OPTIONS)
def test_operations_of_a_step_do_not_grow_with_depth(options: str):
    at_nine = _operations(_run(9, **OPTIONS[options]))
    assert sum(at_nine.values()) > 1000
    assert at_nine["stablehlo.while"] >= 2
    assert _operations(_run(16, **OPTIONS[options])) == at_nine
    assert _operations(_run(32, **OPTIONS[options])) == at_nine


@pytest.mark.parametrize("mode", ["blocks", "blocks_keep_communication"])
def test_operations_do_not_grow_with_depth_when_recomputed_in_microbatches(mode: str):
    execution = {"rematerialize": mode, "microbatches": 2}
    assert _operations(_run(32, execution)) == _operations(_run(9, execution))


def test_operations_up_to_the_unrolled_depth_do_grow():
    # Control: the count is of something that depth can move.
    assert sum(_operations(_run(MAX_UNROLLED_LAYERS)).values()) > 1.1 * sum(_operations(_run(4)).values())


@pytest.mark.slow
def test_optimized_program_does_not_grow_with_depth():
    def instructions(num_layers: int) -> int:
        text = _lowered(_run(num_layers)).compile().as_text()
        return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))

    at_nine = instructions(9)
    assert at_nine > 1000
    assert instructions(32) == pytest.approx(at_nine, rel=0.02)
