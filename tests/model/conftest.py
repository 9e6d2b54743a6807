"""Small models with every part of the family, one option at a time and all at once, and the slow reference."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.model import transformer
from rungwise.model.config import ModelConfig
from rungwise.model.loss import loss_sums, objective_of
from rungwise.model.methods import build_method, dropless_config
from rungwise.model.transformer import ModelOutput, forward, init_params

SITES = ("key", "value", "attention", "moe")

QUICK = {"xla_backend_optimization_level": 0}
"""Small models spend their time compiling: without optimization it takes half as long."""

PARTS = 2
"""Data replicas of the small batches; per-rank figures are means over them."""

MARIN: dict[str, Any] = {
    "attention_gate": True,
    "exclusive_attention": True,
    "gated_norm_rank": 3,
    "embed_norm": True,
    "short_conv_kernel": 4,
    "short_conv_sites": ("key", "attention", "moe"),
    "global_kv_heads": 1,
    "learned_query_key_norm": False,
    "quantile_estimator": "histogram",
}
"""Every option of the reference run at once."""

CONTRAST: dict[str, Any] = {
    "tied_head": True,
    "latent_dim": None,
    "num_shared_experts": 0,
    "gate": "softmax",
    "balance": "auxiliary_loss",
    "balance_loss_weight": 0.3,
    "balance_scope": "sequence",
    "router_z_loss_weight": 0.2,
    "short_conv_kernel": 2,
    "short_conv_sites": ("value",),
}
"""The alternatives the reference run does not use, at once."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "marin": MARIN,
    "contrast": CONTRAST,
    "attention_gate": {"attention_gate": True},
    "exclusive_attention": {"exclusive_attention": True},
    "gated_norm": {"gated_norm_rank": 3},
    "embed_norm": {"embed_norm": True},
    "embed_norm_gated": {"embed_norm": True, "gated_norm_rank": 2},
    **{f"conv_{site}": {"short_conv_kernel": 3, "short_conv_sites": (site,)} for site in SITES},
    "global_kv_heads": {"global_kv_heads": 1},
    "no_query_key_gain": {"learned_query_key_norm": False},
    "no_rotary": {"rotary_fraction": 0.0},
    "tied_head": {"tied_head": True},
    "no_latent": {"latent_dim": None},
    "no_shared": {"num_shared_experts": 0},
    "no_latent_no_shared": {"latent_dim": None, "num_shared_experts": 0},
    "softmax": {"gate": "softmax"},
    "topk_softmax": {"gate": "topk_softmax"},
    "uniform": {"routing": "uniform", "balance": "none"},
    "quantile_topk": {"quantile_estimator": "topk"},
    "quantile_histogram": {"quantile_estimator": "histogram"},
    "loss_free_bias": {"balance": "loss_free_bias", "balance_step": 0.01},
    **{
        f"auxiliary_{scope}": {"balance": "auxiliary_loss", "balance_loss_weight": 0.3, "balance_scope": scope}
        for scope in ("local", "global", "sequence")
    },
    "router_z": {"router_z_loss_weight": 0.2},
}

FAST = ("plain", "marin", "contrast")
"""Between them they hold every option; one at a time, which says where a fault is, is slow."""


def small_config(**changes: Any) -> ModelConfig:
    """Three layers (local, global, global), grouped heads, latent experts, shared experts."""
    plain: dict[str, Any] = {
        "vocab_size": 29,
        "seq_len": 8,
        "hidden_dim": 16,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "window": 3,
        "global_every": 2,
        "rotary_fraction": 0.5,
        "rotary_theta": 100.0,
        "query_key_multiplier": 1.3,
        "num_experts": 8,
        "top_k": 2,
        "num_shared_experts": 2,
        "expert_dim": 6,
        "latent_dim": 10,
        "gate_sum": 2.5,
        "balance": "quantile",
        "logit_z_loss_weight": 0.05,
        "init_scale": 0.8,
        "norm_epsilon": 1e-6,
    }
    return ModelConfig(**{**plain, **changes})


class Probe:
    """A small model with random weights, biases and tokens, and its compiled forward pass and gradient.

    Everything is float64 NumPy; `float64` computes in it, `float32` as a run does.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        rng = np.random.default_rng(0)

        def shaken(leaf: jax.Array) -> np.ndarray:  # zeros and ones too, so that a forgotten weight shows
            return np.asarray(leaf, np.float64) * rng.uniform(0.5, 1.5, leaf.shape) + 0.1 * rng.normal(size=leaf.shape)

        self.params = jax.tree.map(shaken, init_params(config, 0))
        self.bias = rng.normal(0, 0.1, (config.num_layers, config.num_experts))
        self.tokens = rng.integers(0, config.vocab_size, (2 * PARTS, config.seq_len + 1))
        self._method = build_method(dropless_config(config.num_experts, config.top_k), data_replicas=PARTS)
        self._gradient = jax.jit(jax.value_and_grad(self._total, has_aux=True), compiler_options=QUICK)

    def objective(self, params: Any, bias: Any, tokens: Any) -> tuple[jax.Array, ModelOutput]:
        """What is minimised, composed of the model's parts, and the forward pass."""
        config = self.config
        output = forward(params, bias, tokens[:, :-1], config=config, method=self._method, compute_dtype=jnp.float32)
        sums = loss_sums(output.logits, tokens[:, 1:])
        total = objective_of(sums, sums.count, z_loss_weight=config.logit_z_loss_weight)
        total += config.router_z_loss_weight * jnp.sum(output.router_z_loss)
        return total + config.balance_loss_weight * jnp.sum(output.balance_loss), output

    def _total(self, params: Any, bias: Any, tokens: Any, share: Any, pull: Any) -> tuple[jax.Array, Any]:
        objective, output = self.objective(params, bias, tokens)
        return share * objective + jnp.sum(output.logits * pull), (objective, output)

    @contextmanager
    def _float64(self) -> Iterator[None]:
        """Float64 wherever the model says float32; layers in a loop, so that there is one to compile."""
        with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
            patch.setattr(jnp, "float32", jnp.float64)
            patch.setattr(transformer, "MAX_UNROLLED_LAYERS", 0)
            yield

    def gradient(self) -> tuple[float, ModelOutput, Any]:
        """Objective, forward pass and gradient of the objective, in float64."""
        nothing = np.zeros((*self.tokens[:, 1:].shape, self.config.vocab_size))
        with self._float64():
            (_, (value, output)), grads = self._gradient(self.params, self.bias, self.tokens, 1.0, nothing)
        return float(value), output, jax.tree.map(np.asarray, grads)

    def pulled(self, tokens: np.ndarray, pull: np.ndarray) -> Any:
        """Gradient of Σ logits · pull by the parameters, in float64."""
        with self._float64():
            _, grads = self._gradient(self.params, self.bias, tokens, 0.0, pull)
        return jax.tree.map(np.asarray, grads)

    def float32(self) -> tuple[float, ModelOutput]:
        """Objective and forward pass in float32."""
        params, bias = jax.tree.map(_narrow, (self.params, self.bias))
        value, output = jax.jit(self.objective, compiler_options=QUICK)(params, bias, self.tokens)
        return float(value), output


def _narrow(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(np.float32)


@pytest.fixture(scope="session")
def probe() -> Callable[[ModelConfig], Probe]:
    """`Probe` of a config, each compiled once."""
    probes: dict[str, Probe] = {}

    def of(config: ModelConfig) -> Probe:
        if config.content_hash not in probes:
            probes[config.content_hash] = Probe(config)
        return probes[config.content_hash]

    return of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `variant` runs on each of them."""
    if "variant" in metafunc.fixturenames:
        cases = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in VARIANTS]
        metafunc.parametrize("variant", cases, indirect=True)


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    """One variant of the family."""
    return small_config(**VARIANTS[request.param])


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow reference, `reference.py`."""
    spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config() -> ModelConfig:
    """Five layers (local and global), grouped heads, latent experts, shared experts."""
    return ModelConfig(
        vocab_size=17,
        seq_len=12,
        hidden_dim=16,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        window=5,
        global_every=4,
        rotary_fraction=0.5,
        rotary_theta=100.0,
        query_key_multiplier=1.3,
        num_experts=8,
        top_k=2,
        num_shared_experts=2,
        expert_dim=6,
        latent_dim=10,
        gate_sum=2.5,
        balance="quantile",
        logit_z_loss_weight=1e-4,
        init_scale=0.5,
        norm_epsilon=1e-6,
    )
