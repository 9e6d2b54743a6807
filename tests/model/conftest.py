"""A small model that has every part of the family."""

import pytest

from rungwise.model.config import ModelConfig


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
