"""A cache that was copied or pickled in the middle of a text goes on as the original does."""

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig

from kvlab.cache import CachePolicy, SlidingWindowCache
from kvlab.model import random_model

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return random_model(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


@torch.no_grad()
def last_logits(model, cache, ids):
    return model(ids, cache=cache).logits[:, -1]


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_goes_on_as_the_original_past_the_window_and_after_a_reorder(llama, way):
    ids = torch.randint(0, 64, (2, 40))
    cache = SlidingWindowCache(llama, CachePolicy(max_total_tokens=12, sinks=3))
    last_logits(llama, cache, ids[:, :10])
    last_logits(llama, cache, ids[:, 10:11])
    twin = COPIES[way](cache)
    for p in range(11, 39):
        if p == 30:
            for each in (cache, twin):
                each.reorder_cache(torch.tensor([1, 0]))
        step = ids[:, p : p + 1]
        assert torch.equal(last_logits(llama, cache, step), last_logits(llama, twin, step)), f"token {p}"
    ring, other = cache.rings["full_attention"], twin.rings["full_attention"]
    assert ring.keys.data_ptr() != other.keys.data_ptr()
    assert twin.nbytes == cache.nbytes
