"""Shapes of keys and values, read from a model's config."""

from transformers import PreTrainedConfig


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_key_value_heads(config: PreTrainedConfig) -> int:
    """Key/value heads of one layer; as many as query heads where the config names no other number."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
