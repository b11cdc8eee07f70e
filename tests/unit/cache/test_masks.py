"""The registered mask functions serve our caches and leave every other one alone."""

import torch
from lists import Texts, push
from test_properties import CONFIG
from transformers import AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, eager_mask, sdpa_mask
from zoo import build

from kvlab.cache import CachePolicy, SlidingWindowCache
from kvlab.cache.masks import IMPLEMENTATIONS, MaskOffset, additive, register_masks


def test_registering_twice_wraps_once():
    register_masks()
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS)
    register_masks()
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == before
    assert {before[name].args[1] for name in IMPLEMENTATIONS} == {eager_mask, sdpa_mask}


def test_a_function_registered_later_is_wrapped_by_the_next_cache():
    register_masks()
    ours = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    try:
        AttentionMaskInterface.register("sdpa", sdpa_mask)
        register_masks()
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"].func is ours.func
    finally:
        AttentionMaskInterface.register("sdpa", ours)


def test_other_caches_get_the_mask_they_had():
    register_masks()
    for how, stock in (("eager", eager_mask), ("sdpa", sdpa_mask)):
        config = build("llama", how).config
        cache = DynamicCache(config=config)
        cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
        attention_mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
        got = create_causal_mask(config, torch.empty(2, 2, 0), attention_mask, cache)
        expected = stock(
            batch_size=2, q_length=2, kv_length=5, q_offset=3, attention_mask=attention_mask.bool(),
            mask_function=lambda b, h, q, kv: kv <= q,
        )  # fmt: skip
        assert torch.equal(got, expected)


def test_the_builder_behind_an_offset_makes_the_mask_in_the_form_each_attention_takes():
    register_masks()
    seen = torch.tensor([[True, False], [True, True]])[None, None]

    class Builder:
        def build_mask(self, request):
            self.request = request
            return seen

    builder = Builder()
    for how in IMPLEMENTATIONS:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[how](
            batch_size=1, q_length=2, kv_length=2, kv_offset=MaskOffset(builder), dtype=torch.float16
        )
        assert torch.equal(mask, seen if how == "sdpa" else additive(seen, torch.float16))
        assert builder.request.query_length == 2
        assert builder.request.need_mask == (how == "eager")


def test_the_additive_mask_is_zero_or_the_lowest_number():
    mask = additive(torch.tensor([True, False]), torch.bfloat16)
    assert mask.tolist() == [0.0, torch.finfo(torch.bfloat16).min]
    assert mask.dtype == torch.bfloat16


def test_a_full_unpadded_window_needs_no_mask_under_sdpa_unless_one_is_asked_for():
    cache, texts = SlidingWindowCache(CONFIG, CachePolicy(max_total_tokens=6, sinks=2)), Texts([[]])
    for q in (3, 1, 4, 1, 1):
        texts.append(q, [0])
        mask, held = push(CONFIG, cache, texts, q)
    assert mask.all()
    assert held[0][0].shape[2] == 6
    nothing = torch.empty(1, 1, 0)
    assert create_causal_mask(CONFIG, nothing, None, cache) is None
    assert create_causal_mask(CONFIG, nothing, None, cache, allow_is_causal_skip=False).shape == (1, 1, 1, 6)
