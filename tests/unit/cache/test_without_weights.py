"""Shapes without weights: the caches run on meta and fake tensors, from a config, without reading the device."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab.cache import CachePolicy, ShiftingKVCache, SlidingWindowCache, StaticKVCache

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    vocab_size=50, attn_implementation="sdpa",
)  # fmt: skip
CACHES = {
    "sliding": lambda: SlidingWindowCache(CONFIG, CachePolicy(max_total_tokens=16, sinks=4)),
    "shifting": lambda: ShiftingKVCache(CONFIG, CachePolicy(max_total_tokens=16, eviction="shift", low_water=8)),
    "static": lambda: StaticKVCache(CONFIG, 100),
}


def run(cache, device):
    with torch.device(device):
        model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="sdpa").eval()
        ids = torch.zeros(3, 40, dtype=torch.long)
    with torch.no_grad():
        for start, end in [(0, 10), (10, 35), *((i, i + 1) for i in range(35, 40))]:
            model(ids[:, start:end], cache=cache, use_cache=True)


@pytest.mark.parametrize("kind", CACHES)
def test_on_the_meta_device(kind):
    cache = CACHES[kind]()
    run(cache, "meta")
    assert (cache.tokens_seen, cache.layers[0].keys.device.type) == (40, "meta")


@pytest.mark.parametrize("kind", CACHES)
def test_on_fake_tensors(kind):
    cache = CACHES[kind]()
    with FakeTensorMode():
        run(cache, "cpu")
    assert cache.tokens_seen == 40
    assert type(cache.layers[0].keys).__name__ == "FakeTensor"
    assert cache.nbytes > 0
