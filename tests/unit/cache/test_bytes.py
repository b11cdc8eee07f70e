"""Bytes are fixed at the first token, to the byte, and a decode step allocates nothing in the cache."""

import pytest
import torch
from driving import even_chunks, in_chunks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import SPECIMENS, build, text

from kvlab.cache import CachePolicy, SlidingWindowCache


def formula(layers, batch, sinks, window, heads, head_dim, itemsize):
    """Per layer and sequence 2 · (S + W) rows and S + 1 sink keys, each heads · head_dim · itemsize."""
    return layers * batch * (2 * (sinks + window) + sinks + 1) * heads * head_dim * itemsize


@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (3, 8), (4, 60)])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_formula_from_the_first_token_on(sinks, window, batch, dtype):
    model = build("llama", "sdpa", dtype)
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=sinks + window, sinks=sinks))
    assert cache.nbytes == 0
    rows = text(80).expand(batch, 80)
    for sizes in ([1], [1], [3], [70], *[[1]] * 5):
        in_chunks(model, cache, rows[:, : sizes[0]], sizes)
        assert cache.nbytes == formula(2, batch, sinks, window, 2, 8, dtype.itemsize)


def test_a_hybrid_keeps_its_own_windows_and_the_policy_for_the_rest():
    model = build("gemma3", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=64, sinks=4))
    in_chunks(model, cache, text(5)[None], [5])
    own = SPECIMENS["gemma3"].own_windows[0]
    assert cache.nbytes == formula(2, 1, 4, 60, 2, 8, 4) + formula(2, 1, 0, own, 2, 8, 4)


def test_a_thousand_steps_never_move_or_grow_a_buffer():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=16, sinks=4))
    in_chunks(model, cache, text(30)[None], [30])

    def tensors():
        everything = [
            *vars(cache.rings["full_attention"]).values(),
            *vars(cache.rings["full_attention"].decode).values(),
        ]
        return sorted((t.data_ptr(), t.nbytes) for t in everything if isinstance(t, torch.Tensor))

    before = tensors()
    assert len(before) > 8
    in_chunks(model, cache, text(1000)[None], [1] * 1000)
    assert tensors() == before


class NewStorages(TorchDispatchMode):
    """Counts tensors that live in a storage none of the given tensors has."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            is_new = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known
            self.count += is_new
        return results


@pytest.mark.parametrize("batch", [1, 3])
def test_storing_a_token_allocates_nothing_and_returns_the_buffers_themselves(batch):
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=16, sinks=4))
    rows = text(30).expand(batch, 30)
    in_chunks(model, cache, rows, even_chunks(30, 10))
    ring = cache.rings["full_attention"]
    states = torch.randn(batch, 1, 2, 8).transpose(1, 2), torch.randn(batch, 1, 2, 8).transpose(1, 2)
    cache.get_mask_sizes(1, 0)[1].builder.build_mask(request())
    with NewStorages([ring.keys, ring.values, ring.sinks, ring.columns, *states]) as watched:
        held = [cache.update(*states, layer) for layer in range(2)]
    assert watched.count == 0
    for layer, (keys, values) in enumerate(held):
        assert keys.data_ptr() == cache.layers[layer].keys.data_ptr()
        assert values.data_ptr() == cache.layers[layer].values.data_ptr()
        assert keys.shape[2] == 16


def test_the_watch_would_notice_a_copy():
    known = torch.zeros(3)
    with NewStorages([known]) as watched:
        known.add_(1)
        known.view(3, 1)
        assert watched.count == 0
        torch.cat([known, known])
    assert watched.count == 1


def request():
    from kvlab.cache.masks import MaskRequest

    return MaskRequest(
        batch=1, query_length=1, attention_mask=None, device=torch.device("cpu"), need_mask=False, stock=None
    )


def test_counters_are_host_integers():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=11, sinks=3))
    assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (0, 0, 0)
    in_chunks(model, cache, text(7)[None], [7])
    assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (7, 7, 0)
    in_chunks(model, cache, text(23)[None], [20, 1, 1, 1])
    with NewStorages([]) as watched:  # reading a tensor would be an operation
        assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (30, 11, 19)
        assert isinstance(cache.nbytes, int)
    assert watched.count == 0


def test_a_padded_batch_counts_its_longest_row():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=11, sinks=3))
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    in_chunks(model, cache, torch.stack([text(5), text(5)]), [5], mask)
    assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (3, 3, 0)
