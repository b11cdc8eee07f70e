"""A model without meaning, a few megabytes on disk: for loads where only bytes, speed and order matter."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvlab.bundled import quiet_transformers
from kvlab.model import random_model


def save_tiny_model(folder: Path) -> Path:
    """Save a random Llama of 4 layers, 8 KiB of float32 keys and values per token, whose tokens are bytes.

    Its key or value tensors of one layer are 1 KiB per token, so that from 64 tokens on each is mapped on its own.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<end>": len(alphabet)}
    text = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        eos_token_id=vocabulary["<end>"],
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with quiet_transformers():
        PreTrainedTokenizerFast(tokenizer_object=text, eos_token="<end>").save_pretrained(folder)
        random_model(config).save_pretrained(folder)
    return folder
