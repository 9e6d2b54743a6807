import pytest
from pydantic import ValidationError

from rungwise.model.config import ModelConfig


def test_config_names_global_layers_every_fourth_and_last(config: ModelConfig):
    assert [config.is_global(layer) for layer in range(5)] == [False, False, False, True, True]
    assert config.windows == (5, 5, 5, 12, 12)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"top_k": 9}, "top_k 9 exceeds num_experts 8"),
        ({"top_k": 8}, "needs a rejected expert"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rotary_fraction": 0.4}, "gives 3 rotary dimensions"),
        ({"hidden_dim": 0}, "greater than or equal to 2"),
    ],
)
def test_config_refuses_what_cannot_be_built(config: ModelConfig, changes: dict, complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        config.replace(**changes)


def test_config_hash_follows_content(config: ModelConfig):
    assert config.content_hash == config.replace().content_hash
    assert config.content_hash != config.replace(top_k=3).content_hash
