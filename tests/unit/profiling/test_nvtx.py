"""Ranges: seen by whoever listens, and nothing where nobody does."""

import contextlib
import copy
import time

import pytest
import torch
from transformers import DynamicCache

from kvlab.cache import CachePolicy, ShiftingKVCache, SlidingWindowCache
from kvlab.model import load_config, random_model
from kvlab.profiling import nvtx


@pytest.fixture
def nobody_listens(monkeypatch):
    """As on a CPU build without the package nvtx."""
    monkeypatch.setattr(nvtx, "_push", None)


@pytest.fixture
def pushed(monkeypatch):
    """What NVTX is told, in order."""
    told = []
    monkeypatch.setattr(nvtx, "_push", told.append)
    monkeypatch.setattr(nvtx, "_pop", lambda: told.append("pop"))
    return told


@contextlib.contextmanager
def profiled():
    counts = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield counts
    counts.update({row.key: row.count for row in profiler.key_averages()})


def tiny_model():
    config = load_config("smollm2-135m")
    config.num_hidden_layers, config.vocab_size = 2, 64
    torch.manual_seed(0)
    return random_model(config, device="cpu", dtype=torch.float32)


def test_nothing_is_made_where_nobody_listens(nobody_listens):
    assert nvtx.range("prefill") is nvtx.range("decode")
    cache = DynamicCache()
    with nvtx.update_ranges(cache):
        assert "update" not in vars(cache)


def test_a_range_costs_next_to_nothing_where_nobody_listens(nobody_listens):
    def best_of(repeat, run):
        return min(timed(run) for _ in range(repeat))

    def timed(run):
        start = time.thread_time()
        for _ in range(2_000):
            run()
        return (time.thread_time() - start) / 2_000

    def ranged():
        with nvtx.range("decode"):
            pass

    def recorded():
        with torch.profiler.record_function("decode"):
            pass

    assert best_of(5, ranged) < 5e-6
    assert best_of(5, ranged) < best_of(5, recorded)


def test_a_range_is_pushed_and_popped_also_when_it_ends_in_an_exception(pushed):
    with pytest.raises(ZeroDivisionError), nvtx.range("prefill"), nvtx.range("inner"):
        1 / 0  # noqa: B018
    assert pushed == ["prefill", "inner", "pop", "pop"]


def test_the_profiler_sees_a_range_under_its_name(nobody_listens):
    with profiled() as counts:
        for _ in range(3):
            with nvtx.range("decode"):
                torch.ones(2) + 1
    assert counts["decode"] == 3
    assert "prefill" not in counts


def test_a_range_that_was_begun_before_the_profiler_is_left_in_peace(nobody_listens):
    before = nvtx.range("early")
    with profiled() as counts, before:
        torch.ones(2) + 1
    assert "early" not in counts


CAPACITY = 8


@pytest.mark.parametrize(
    ("cache_of", "evictions"),
    [
        (lambda model: SlidingWindowCache(model, CachePolicy(max_total_tokens=CAPACITY, sinks=2)), 3),
        (lambda model: ShiftingKVCache(model, CachePolicy(max_total_tokens=CAPACITY, eviction="shift")), 3),
        (
            lambda model: ShiftingKVCache(
                model, CachePolicy(max_total_tokens=CAPACITY, eviction="shift", low_water=CAPACITY - 2)
            ),
            2,
        ),
        (lambda model: DynamicCache(config=model.config), 0),
    ],
    ids=["ring", "shift", "bursts", "dynamic"],
)
def test_an_update_is_an_eviction_when_it_drops_tokens(nobody_listens, cache_of, evictions):
    model = tiny_model()
    cache, dropped = cache_of(model), 0
    with torch.no_grad(), profiled() as counts, nvtx.update_ranges(cache):
        for tokens in (CAPACITY - 2, 1, 1, 1, 1, 1):
            before = getattr(cache, "tokens_evicted", 0)
            model(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
            dropped += getattr(cache, "tokens_evicted", 0) > before
    assert dropped == evictions
    layers = model.config.num_hidden_layers
    assert counts.get("evict", 0) == evictions * layers
    assert counts.get("append", 0) == (6 - evictions) * layers


def test_the_logits_are_the_same_and_the_cache_is_left_as_it_was(pushed):
    model = tiny_model()
    ids = torch.arange(12)[None]
    results = []
    for ranged in (True, False):
        cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=CAPACITY, sinks=2))
        with torch.no_grad(), nvtx.update_ranges(cache) if ranged else contextlib.nullcontext():
            results.append([model(part, cache=cache).logits for part in ids.split(3, dim=1)])
        assert "update" not in vars(cache)
        copy.deepcopy(cache)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert pushed.count("evict") == 2 * 2
    assert pushed.count("append") == 2 * 2


def test_an_update_that_dies_leaves_the_cache_as_it_was(pushed):
    cache = DynamicCache()
    with pytest.raises(AttributeError), nvtx.update_ranges(cache):
        cache.update(None, None, 0)
    assert "update" not in vars(cache)
