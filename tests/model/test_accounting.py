import jax
import numpy as np
import pytest

from rungwise.ladder.family import load_family
from rungwise.model.accounting import attended_keys, count_flops, count_params
from rungwise.model.config import ModelConfig
from rungwise.model.transformer import abstract_params


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Weights by part, counted on the shapes that would be allocated."""
    tree = abstract_params(config)

    def size(node: object) -> int:
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(node))

    layers, moe = tree["layers"], tree["layers"]["moe"]
    return {
        "embed": size(tree["embed"]),
        "attention": size(layers["attention"]),
        "router": size(moe["router"]),
        "latent": size([moe["latent_down"], moe["latent_norm"], moe["latent_up"]]),
        "experts": size(moe["experts"]),
        "shared": size(moe.get("shared", ())),
        "norms": size([layers["attention_norm"], layers["moe_norm"], tree["final_norm"]]),
        "head": size(tree["head"]),
        "total": size(tree),
    }


@pytest.mark.parametrize("run", [run.run for run in load_family("tiny").runs])
def test_count_params_equals_allocated_shapes(run: str):
    config = next(item.model for item in load_family("tiny").runs if item.run == run)
    counts = count_params(config)
    sizes = _sizes(config)
    assert {part: getattr(counts, part) for part in sizes} == sizes


def test_count_params_without_shared_experts(config: ModelConfig):
    bare = config.replace(num_shared_experts=0)
    assert count_params(bare).total == _sizes(bare)["total"]


def test_active_params_leave_out_embedding_head_and_idle_experts(config: ModelConfig):
    counts = count_params(config)
    idle = (config.num_experts - config.top_k) * config.num_layers * 3 * 10 * 6
    assert counts.active == counts.total - 2 * 17 * 16 - idle


def test_attended_keys_equals_counting_the_mask():
    for seq_len, window in ((7, 3), (6, 6), (9, 1)):
        mask = [[0 <= i - j < window for j in range(seq_len)] for i in range(seq_len)]
        assert attended_keys(seq_len, window, causal=True) == pytest.approx(np.sum(mask) / seq_len)


def test_flops_follow_the_stated_convention(config: ModelConfig):
    flops, counts = count_flops(config), count_params(config)
    norms = counts.norms + 5 * (10 + 2 * 8)
    assert flops.matmul == 6 * (counts.active - norms)
    assert flops.attention == 12 * 32 * (3 * 5 + 2 * 12)
    assert flops.head == 6 * 16 * 17
    assert flops.total(head=True, causal=True) < flops.total(head=True)
