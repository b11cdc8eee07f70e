"""ShiftingKVCache against its own reference, which lives through the water marks token by token."""

import pytest
import torch
from driving import even_chunks, in_chunks, left_padded
from reference import ShiftRule, following, reference_logits, reference_model
from transformers import Gemma2Config, MistralConfig
from zoo import CELLS, SPECIMENS, build, text

from kvlab.cache import (
    CachePolicy,
    ReuseError,
    ShiftingKVCache,
    SlidingWindowCache,
    TornForwardError,
    UnsupportedModelError,
    UnsupportedOperationError,
)

UNIFORM = [cell for cell in CELLS if not SPECIMENS[cell[0]].own_windows]
LENGTH = 45


def rules(name, high, low):
    return [ShiftRule(high, low, rope) for rope in SPECIMENS[name].ropes]


def shifting(model, high, low):
    return ShiftingKVCache(model, CachePolicy(max_total_tokens=high, eviction="shift", low_water=low))


@pytest.mark.parametrize(
    ("name", "how", "high", "low"),
    [(*cell, 10, 6) for cell in UNIFORM]
    + [("llama", how, *marks) for how in ("eager", "sdpa") for marks in [(10, 9), (10, 1), (10, 0), (1, 0)]],
)
def test_every_split_equals_its_reference(name, how, high, low):
    model, ids = build(name, how), text(LENGTH)
    expected = reference_logits(model, rules(name, high, low), ids)
    for size in (1, 7, 11, LENGTH):
        got = in_chunks(model, shifting(model, high, low), ids[None], even_chunks(LENGTH, size))[0]
        assert float((got - expected).abs().max()) < 1e-4, f"chunks of {size}"


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize(("high", "low"), [(10, 9), (10, 4)])
def test_each_left_padded_row_equals_its_single_run(how, high, low):
    model, texts = build("llama", how), [text(1), text(13, 1), text(LENGTH, 2), text(2, 3)]
    ids, mask = left_padded(texts)
    for size in (1, 8, LENGTH):
        got = in_chunks(model, shifting(model, high, low), ids, even_chunks(LENGTH, size), mask)
        for row, tokens in enumerate(texts):
            expected = reference_logits(model, rules("llama", high, low), tokens)
            assert float((got[row, -len(tokens) :] - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_what_the_reference_gives(beams):
    model, ids = build("llama", "sdpa"), text(14)[None]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    with following(model, rules("llama", 10, 6)):
        expected = reference_model(model).generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache=shifting(model, 10, 6), **options), expected)


def test_shifting_every_token_is_a_ring_without_sinks():
    model, ids = build("llama", "sdpa"), text(LENGTH)[None]
    ring = SlidingWindowCache(model, CachePolicy(max_total_tokens=10, sinks=0))
    got = in_chunks(model, shifting(model, 10, 9), ids, even_chunks(LENGTH, 4))
    assert torch.allclose(got, in_chunks(model, ring, ids, [1] * LENGTH), atol=1e-4)


def test_it_counts_what_it_holds_through_a_burst():
    model = build("llama", "sdpa")
    cache = shifting(model, 6, 2)
    held = []
    for token in text(12)[:, None]:
        in_chunks(model, cache, token[None], [1])
        held.append(cache.tokens_held)
    assert held == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    assert (cache.tokens_seen, cache.tokens_evicted) == (12, 8)


def test_its_buffers_hold_the_high_water_mark_and_never_move():
    model = build("llama", "sdpa")
    cache = shifting(model, 8, 4)
    in_chunks(model, cache, text(30)[None], [3, 20, *[1] * 7])
    before = [layer.keys.data_ptr() for layer in cache.layers]
    assert cache.nbytes == 2 * 2 * 1 * 2 * 8 * 8 * 4
    in_chunks(model, cache, text(50)[None], [1] * 50)
    assert [layer.keys.data_ptr() for layer in cache.layers] == before


def test_reuse_and_torn_forwards_are_noticed():
    model = build("llama", "sdpa")
    cache = shifting(model, 8, 4)
    model.generate(text(5)[None], cache=cache, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ReuseError):
        model.generate(text(5)[None], cache=cache, max_new_tokens=4, pad_token_id=0)
    cache.reset()
    layer, model.model.layers[1].self_attn = model.model.layers[1].self_attn, None
    try:
        with pytest.raises(TypeError):
            in_chunks(model, cache, text(5)[None], [5])
    finally:
        model.model.layers[1].self_attn = layer
    with pytest.raises(TornForwardError):
        in_chunks(model, cache, text(5)[None], [5])


def test_a_mask_of_ones_own_is_refused():
    model = build("llama", "sdpa")
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(UnsupportedOperationError, match="no mask was asked for"), torch.no_grad():
        model(text(5)[None], attention_mask=mask, cache=shifting(model, 8, 4))


def test_layers_that_do_not_evict_together_are_refused():
    with pytest.raises(UnsupportedModelError, match="do not evict together"):
        shifting(Gemma2Config(), 8, 4)
    with pytest.raises(UnsupportedModelError, match="sees 6 tokens; use high_water=6 or less"):
        shifting(MistralConfig(sliding_window=6), 8, 4)


def test_a_model_that_computes_in_another_type_than_the_policy_keeps_is_refused():
    model = build("llama", "sdpa")
    cache = ShiftingKVCache(model, CachePolicy(max_total_tokens=8, eviction="shift", dtype="bfloat16"))
    with pytest.raises(UnsupportedModelError, match=r"keeps torch.bfloat16, the model computes keys in torch.float32"):
        model(text(4)[None], cache=cache)
