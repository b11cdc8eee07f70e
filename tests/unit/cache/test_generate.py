"""generate() with the cache gives, token for token, what the reference gives without a cache."""

import warnings

import pytest
import torch
from driving import left_padded
from reference import following, reference_logits, reference_model
from transformers import DynamicCache
from zoo import CELLS, SINKS, SPECIMENS, WINDOW, build, text

from kvlab.cache import CachePolicy, ReuseError, SlidingWindowCache

POLICY = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS)
NEW = 2 * WINDOW
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
BEAMS = {
    "max_new_tokens": NEW,
    "num_beams": 3,
    "num_return_sequences": 3,
    "do_sample": False,
    "pad_token_id": 0,
}
SAMPLING = {
    "max_new_tokens": NEW,
    "do_sample": True,
    "num_return_sequences": 4,
    "top_k": 10,
    "pad_token_id": 0,
}
BOTH = pytest.mark.parametrize("how", ["eager", "sdpa"])


def expected_tokens(name, how, ids, **options):
    """What the definition generates for one prompt (T,)."""
    with following(build(name, how), SPECIMENS[name].rules()) as model:
        torch.manual_seed(3)
        return reference_model(model).generate(ids[None], use_cache=False, **options)


def cached_tokens(model, ids, mask=None, **options):
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, cache=SlidingWindowCache(model, POLICY), **options)


@BOTH
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW])
def test_prompts_around_the_window_in_any_prefill_chunks(how, length):
    model, ids = build("llama", how), text(length)
    expected = expected_tokens("llama", how, ids, **GREEDY)
    for size in (None, 1, 3, WINDOW, WINDOW + 1, 3 * WINDOW):
        got = cached_tokens(model, ids[None], prefill_chunk_size=size, **GREEDY)
        assert torch.equal(got, expected), f"prefill_chunk_size={size}"


@pytest.mark.parametrize(("name", "how"), CELLS)
@pytest.mark.parametrize("options", [GREEDY, BEAMS, SAMPLING], ids=["greedy", "beams", "sampling"])
def test_greedy_beams_and_sampling_in_every_family(name, how, options):
    model, ids = build(name, how), text(WINDOW + 6)
    expected = expected_tokens(name, how, ids, **options)
    assert torch.equal(cached_tokens(model, ids[None], **options), expected)


@BOTH
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("size", [None, 4])
def test_left_padded_prompts_generate_as_if_alone(how, options, size):
    texts = [text(length, seed) for seed, length in enumerate([1, 13, 30, 8])]
    ids, mask = left_padded(texts)
    got = cached_tokens(build("llama", how), ids, mask, prefill_chunk_size=size, **options)
    alone = [expected_tokens("llama", how, tokens, **options)[:, len(tokens) :] for tokens in texts]
    assert torch.equal(got[:, ids.shape[1] :], torch.cat(alone))


def test_a_reset_cache_keeps_its_storage_and_serves_another_batch_of_texts():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, POLICY)
    model.generate(left_padded([text(20), text(9, 1)])[0], cache=cache, **GREEDY)
    before = cache.layers[0].keys.data_ptr()
    for texts in ([text(30, 2), text(30, 3)], [text(2, 4), text(17, 5)]):
        cache.reset()
        assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (0, 0, 0)
        ids, mask = left_padded(texts)
        got = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        for row, tokens in enumerate(texts):
            alone = expected_tokens("llama", "sdpa", tokens, **GREEDY)[0, len(tokens) :]
            assert torch.equal(got[row, ids.shape[1] :], alone)
    assert cache.layers[0].keys.data_ptr() == before


def test_a_second_text_without_reset_is_refused_however_long_it_is():
    model = build("llama", "sdpa")
    cache = SlidingWindowCache(model, POLICY)
    model.generate(text(20)[None], cache=cache, **GREEDY)
    for length in (1, 17, 20, 30, 60):
        with pytest.raises(ReuseError, match="already holds a text of 35 tokens: call reset"):
            model.generate(text(length, 1)[None], cache=cache, **GREEDY)


def test_after_resume_the_next_generate_continues_the_text_once():
    model, ids = build("llama", "sdpa"), text(20)
    cache = SlidingWindowCache(model, POLICY)
    first = model.generate(ids[None], cache=cache, **GREEDY)
    cache.resume()
    second = model.generate(first, cache=cache, **GREEDY)
    assert torch.equal(second, expected_tokens("llama", "sdpa", first[0], **GREEDY))
    with pytest.raises(ReuseError):
        model.generate(second, cache=cache, **GREEDY)


def test_the_deprecated_argument_name_works_and_only_transformers_warns():
    model, ids = build("llama", "sdpa"), text(20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model.generate(ids[None], past_key_values=SlidingWindowCache(model, POLICY), **GREEDY)
    assert torch.equal(got, expected_tokens("llama", "sdpa", ids, **GREEDY))
    assert all("past_key_values" in str(warning.message) for warning in caught), caught


def test_other_caches_are_served_as_before():
    model, ids = build("llama", "sdpa"), text(30)
    before = model.generate(ids[None], cache=DynamicCache(), **GREEDY)
    SlidingWindowCache(model, POLICY)
    assert torch.equal(model.generate(ids[None], cache=DynamicCache(), **GREEDY), before)


def test_a_prefix_of_the_text_may_be_seen_by_several_caches_at_once():
    model, texts = build("llama", "sdpa"), [text(40, 1), text(40, 2)]
    caches = [SlidingWindowCache(model, POLICY) for _ in texts]
    logits = [[], []]
    with torch.no_grad():
        for start in range(0, 40, 5):
            for row, (tokens, cache) in enumerate(zip(texts, caches, strict=True)):
                logits[row].append(model(tokens[None, start : start + 5], cache=cache).logits[0])
    for row, tokens in enumerate(texts):
        expected = reference_logits(model, SPECIMENS["llama"].rules(), tokens)
        assert float((torch.cat(logits[row]) - expected).abs().max()) < 1e-4


def test_a_cache_that_keeps_everything_generates_something_else():
    model, ids = build("llama", "sdpa"), text(20)
    full = model.generate(ids[None], cache=DynamicCache(), **GREEDY)
    assert not torch.equal(full, expected_tokens("llama", "sdpa", ids, **GREEDY))
