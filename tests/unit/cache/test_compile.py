"""A compiled decode step: one graph over three windows of tokens, the same tokens, no copy of a buffer."""

import shutil

import pytest
import torch
from driving import in_chunks, left_padded
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig
from zoo import build, text

from kvlab.cache import CachePolicy, SlidingWindowCache, TornForwardError

POLICY = CachePolicy(max_total_tokens=11, sinks=3)
THREE_WINDOWS = 3 * 11 + 2


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_step(model, backend):
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def step(token, cache):
        return model(token, cache=cache, use_cache=True).logits

    return step, counter


@torch.no_grad()
def decode(step, cache, ids):
    return torch.cat([step(ids[:, i : i + 1].clone(), cache) for i in range(ids.shape[1])], dim=1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_compiles_once_over_three_windows_for_every_prompt_and_cache(name):
    model = build(name, "sdpa")
    step, counter = compiled_step(model, "eager")
    ids = text(40 + THREE_WINDOWS)[None]
    for prompt in (2, 7, 40):  # before the sinks are full, before the ring is, and after
        caches = [SlidingWindowCache(model, POLICY) for _ in range(2)]
        for cache in caches:
            in_chunks(model, cache, ids[:, :prompt], [prompt])
        rest = ids[:, prompt : prompt + THREE_WINDOWS]
        got = decode(step, caches[0], rest)
        expected = in_chunks(model, caches[1], rest, [1] * THREE_WINDOWS)
        assert float((got - expected).abs().max()) < 1e-4
        assert caches[0].tokens_seen == caches[1].tokens_seen == prompt + THREE_WINDOWS
    assert counter.frame_count == 1


def test_eager_steps_may_follow_compiled_ones():
    model = build("llama", "sdpa")
    step, _ = compiled_step(model, "eager")
    ids, cache = text(60)[None], SlidingWindowCache(model, POLICY)
    expected = in_chunks(model, SlidingWindowCache(model, POLICY), ids, [60])
    got = [in_chunks(model, cache, ids[:, :9], [9]), decode(step, cache, ids[:, 9:30])]
    got += [in_chunks(model, cache, ids[:, 30:45], [1, 14]), decode(step, cache, ids[:, 45:])]
    assert float((torch.cat(got, dim=1) - expected).abs().max()) < 1e-4
    assert cache.tokens_seen == 60


def test_a_padded_batch_compiles_once_too():
    model = build("llama", "sdpa")
    step, counter = compiled_step(model, "aot_eager")
    texts = [text(20, 1), text(6, 2)]
    ids, mask = left_padded(texts)
    rest = torch.stack([text(THREE_WINDOWS, 3), text(THREE_WINDOWS, 4)])
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, ids, [20], mask)
    got = decode(step, cache, rest)
    for row, tokens in enumerate(texts):
        alone = torch.cat([tokens, rest[row]])[None]
        expected = in_chunks(model, SlidingWindowCache(model, POLICY), alone, [alone.shape[1]])
        assert float((got[row] - expected[0, len(tokens) :]).abs().max()) < 1e-4
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_compiles_the_step_once_and_gives_the_same_tokens(name):
    model = build(name, "sdpa")
    compile_config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compile_config._compile_all_devices = True
    options = {"max_new_tokens": THREE_WINDOWS, "do_sample": False, "pad_token_id": 0}
    for prompt in (2, 20):
        expected = model.generate(text(prompt)[None], cache=SlidingWindowCache(model, POLICY), **options)
        cache = SlidingWindowCache(model, POLICY, compileable=True)
        got = model.generate(text(prompt)[None], cache=cache, compile_config=compile_config, **options)
        assert torch.equal(got, expected)
        assert cache.tokens_seen == prompt + THREE_WINDOWS - 1
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compileable_cache_gives_the_same_tokens_where_transformers_does_not_compile():
    model, (ids, mask) = build("llama", "sdpa"), left_padded([text(2), text(20, 1)])
    options = {"max_new_tokens": THREE_WINDOWS, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    expected, got = (
        model.generate(ids, attention_mask=mask, cache=SlidingWindowCache(model, POLICY, compileable=flag), **options)
        for flag in (False, True)
    )
    assert torch.equal(got, expected)


def test_a_torn_forward_is_noticed_by_a_compiled_step():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, text(20)[None], [20])
    cache.progress.finished = False
    step, _ = compiled_step(model, "eager")
    with pytest.raises((TornForwardError, torch._dynamo.exc.Unsupported), match="died before every layer"):
        decode(step, cache, text(1)[None])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_writes_into_the_buffers_and_copies_none():
    model, window = build("llama", "sdpa"), 1000
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=window, sinks=4))
    in_chunks(model, cache, text(20)[None], [20])
    step = torch.compile(lambda token: model(token, cache=cache, use_cache=True).logits, fullgraph=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(step, text(1)[None])
    allocated = [line for line in code.splitlines() if "empty_strided_cpu" in line]
    assert allocated
    assert not [line for line in allocated if f"(1, 2, {window}, 8)" in line or f"(2, 1, 2, {window}, 8)" in line]
