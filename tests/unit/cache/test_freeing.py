"""The bytes of a cache go with its last reference: nobody has to wait for the garbage collector."""

import copy
import gc
import weakref

import pytest
import torch
from driving import in_chunks
from torch.multiprocessing.reductions import StorageWeakRef
from zoo import build, text

from kvlab.cache import CachePolicy, ShiftingKVCache, SlidingWindowCache, StaticKVCache, TornForwardError

CACHES = {
    "static": lambda model: StaticKVCache(model, 40),
    "sliding": lambda model: SlidingWindowCache(model, CachePolicy(max_total_tokens=12, sinks=3)),
    "shifting": lambda model: ShiftingKVCache(model, CachePolicy(max_total_tokens=12, eviction="shift")),
}


def after_prefill(model, cache):
    in_chunks(model, cache, text(10)[None], [10])


def after_decode(model, cache):
    in_chunks(model, cache, text(30)[None], [10, 8, *[1] * 12])


def after_generate(model, cache):
    model.generate(text(10)[None], cache=cache, max_new_tokens=12, do_sample=False, prefill_chunk_size=5)


def after_a_forward_that_died(model, cache):
    """Planned and half done: the step is still there."""
    after_prefill(model, cache)
    last, cache.layers[-1] = cache.layers[-1], None
    with pytest.raises(AttributeError):
        in_chunks(model, cache, text(4)[None], [4])
    cache.layers[-1] = last


def after_a_copy(model, cache):
    after_prefill(model, cache)
    copy.deepcopy(cache)


MOMENTS = [after_prefill, after_decode, after_generate, after_a_forward_that_died, after_a_copy]


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def storages(cache) -> list[StorageWeakRef]:
    """Of every tensor the cache holds, wherever it is."""
    found, pending, seen = [], [cache], set()
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(StorageWeakRef(each.untyped_storage()))
        elif isinstance(each, list | tuple | set):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        elif type(each).__module__.startswith(("kvlab.", "transformers.cache_utils")):
            pending += vars(each).values()
    return found


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_the_last_reference_frees_every_byte(make, attention, moment, no_collection):
    model = build("llama", attention)
    cache = make(model)
    moment(model, cache)
    held = storages(cache)
    gone = weakref.ref(cache)
    assert len(held) >= 4
    assert not any(storage.expired() for storage in held)
    del cache
    assert gone() is None
    assert all(storage.expired() for storage in held)


def test_two_rings_are_freed_as_one_is(no_collection):
    model = build("gemma3", "sdpa")
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=60, sinks=4))
    after_decode(model, cache)
    held = storages(cache)
    del cache
    assert all(storage.expired() for storage in held)


def test_a_cycle_would_be_seen(no_collection):
    cache = CACHES["sliding"](model := build("llama", "sdpa"))
    after_prefill(model, cache)
    cache.rings["full_attention"].itself = cache.rings["full_attention"]
    held = storages(cache)
    del cache
    assert not all(storage.expired() for storage in held)


def test_a_step_that_died_is_still_noticed():
    cache = CACHES["sliding"](model := build("llama", "sdpa"))
    after_a_forward_that_died(model, cache)
    with pytest.raises(TornForwardError):
        after_prefill(model, cache)
