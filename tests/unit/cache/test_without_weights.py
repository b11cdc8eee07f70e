"""Shapes without weights: the caches run on meta and fake tensors, from a config, and read nothing."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


class HostTensors(TorchDispatchMode):
    """Operations that make a tensor on the host: on a GPU, each would be a copy the step waits for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(results)):
            self.found.append(str(function))
        return results


def test_a_decode_step_makes_no_tensor_on_the_host():
    cache = CACHES["sliding"]()
    run(cache, "meta")
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="sdpa").eval()
        token = torch.zeros(3, 1, dtype=torch.long)
    with torch.no_grad(), HostTensors() as host:
        for _ in range(3):
            model(token, cache=cache, use_cache=True)
        assert host.found == []
        torch.tensor([1])
    assert host.found
