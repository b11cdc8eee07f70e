"""What a window cache cannot do raises, with the reason and what to do instead."""

import pytest
import torch
from driving import in_chunks, left_padded
from transformers import AutoConfig, LlamaConfig, MistralConfig, Phi3Config
from zoo import SINKS, WINDOW, build, text

from kvlab.cache import (
    BatchChangedError,
    CacheError,
    CachePolicy,
    PaddingError,
    ReuseError,
    ShiftingKVCache,
    SlidingWindowCache,
    StaticKVCache,
    TornForwardError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from kvlab.errors import KvlabError

POLICY = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model():
    return build("llama", "sdpa")


@pytest.fixture
def cache(model):
    return SlidingWindowCache(model, POLICY)


def test_every_refusal_is_one_the_command_line_can_print():
    assert issubclass(CacheError, KvlabError)


def refuse(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        SlidingWindowCache(model, POLICY)


def test_training_mode_is_refused():
    fresh = type(build("llama", "sdpa"))(LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    refuse(fresh, r"training mode.*call model\.eval\(\)")


def test_families_whose_generate_replaces_the_cache_are_refused():
    refuse(Phi3Config(), "replaces the given cache")


def test_flash_and_flex_attention_are_refused():
    for how in ("flash_attention_2", "flex_attention"):
        config = LlamaConfig()
        config._attn_implementation = how
        refuse(config, f"{how} attention takes no sink-and-window mask; use model.set_attn_implementation")


def test_alibi_and_several_position_axes_and_cross_attention_are_refused():
    refuse(AutoConfig.for_model("falcon", alibi=True), "ALiBi")
    refuse(
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1.0, "mrope_section": [2, 1]}),
        "M-RoPE",
    )
    refuse(AutoConfig.for_model("t5"), "cross attention")


def test_layers_that_hold_no_single_tokens_are_refused():
    refuse(
        AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "layers of kind .* do not hold one key and value per token",
    )


def test_a_policy_longer_than_the_only_window_of_the_model_is_refused():
    refuse(MistralConfig(sliding_window=10), "sees 10 tokens and the policy keeps 11; use max_total_tokens=10")


def test_a_policy_of_another_type_than_the_models_keys_is_refused(model):
    cache = SlidingWindowCache(model, CachePolicy(max_total_tokens=8, dtype="bfloat16"))
    with pytest.raises(
        UnsupportedModelError, match=r"keeps torch\.bfloat16, the model computes keys in torch\.float32"
    ):
        in_chunks(model, cache, text(3)[None], [3])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_refused_before_they_do(kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 40, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(
        vocab_size=89, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=40, rope_parameters=rope,
    )  # fmt: skip
    model = type(build("llama", "sdpa"))(config).eval()
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, text(40)[None], [30, *[1] * 10])
    with pytest.raises(UnsupportedModelError, match="changes its frequencies after 40 tokens and 41 are asked for"):
        in_chunks(model, cache, text(1)[None], [1])


def test_attention_switched_after_construction_is_refused(model, cache):
    model.config._attn_implementation = "flex_attention"
    try:
        with pytest.raises(UnsupportedOperationError, match="flex_attention attention takes no sink-and-window mask"):
            in_chunks(model, cache, text(5)[None], [5])
    finally:
        model.config._attn_implementation = "sdpa"


def test_a_4d_mask_of_ones_own_is_refused(model, cache):
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with (
        pytest.raises(UnsupportedOperationError, match="no sink-and-window mask was asked for"),
        torch.no_grad(),
    ):
        model(text(5)[None], attention_mask=mask, cache=cache)


def test_a_mask_laid_over_the_causal_one_is_refused(model, cache):
    from transformers.masking_utils import create_causal_mask

    with pytest.raises(UnsupportedOperationError, match="another mask over the causal one"):
        create_causal_mask(
            model.config, torch.empty(1, 5, 0), None, cache, or_mask_function=lambda b, h, q, kv: q == kv
        )


@pytest.mark.parametrize("row", [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]])
def test_right_padding_and_holes_are_refused(model, cache, row):
    with pytest.raises(PaddingError, match="pad on the left"):
        in_chunks(model, cache, text(5)[None], [5], torch.tensor([row]))


def test_crop_is_refused_once_something_was_evicted(model, cache):
    model.generate(text(20)[None], cache=cache, **GREEDY)
    cache.crop(0)
    with pytest.raises(UnsupportedOperationError, match="by -3: 11 tokens are held and 14 were evicted, so at most 0"):
        cache.crop(-3)
    assert not cache.is_croppable


@pytest.mark.parametrize("kind", ["sliding", "shifting"])
def test_tokens_taken_back_before_any_was_evicted_never_were(model, kind):
    texts = [text(9), text(5, 1)]
    ids, mask = left_padded(texts)
    ids = torch.cat([ids, torch.stack([text(30, 2), text(30, 3)])], dim=1)

    def fresh():
        if kind == "sliding":
            return SlidingWindowCache(model, POLICY)
        return ShiftingKVCache(model, CachePolicy(max_total_tokens=11, eviction="shift", low_water=6))

    def run(cache, start, end):
        with torch.no_grad():
            whole = torch.cat([mask, torch.ones(2, end - 9, dtype=torch.long)], dim=1) if end > 9 else mask
            return model(ids[:, start:end], attention_mask=whole, cache=cache).logits

    cache = fresh()
    run(cache, 0, 9)
    in_chunks(model, cache, torch.stack([text(2, 8), text(2, 9)]), [2])
    cache.crop(-2)
    assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (9, 9, 0)
    other = fresh()
    run(other, 0, 9)
    assert torch.allclose(run(cache, 9, 39), run(other, 9, 39), atol=1e-5)
    cache = fresh()
    run(cache, 0, 9)
    with pytest.raises(UnsupportedOperationError, match="at most 5 can be taken back"):
        cache.crop(-6)  # the shorter row has only five tokens
    with pytest.raises(UnsupportedOperationError, match="as a negative number"):
        cache.crop(2)


def test_assisted_decoding_is_refused(model, cache):
    with pytest.raises(UnsupportedOperationError, match="use a DynamicCache for assisted decoding"):
        model.generate(text(20)[None], cache=cache, prompt_lookup_num_tokens=3, **GREEDY)


def test_the_batch_cannot_change_after_the_first_token(model, cache):
    in_chunks(model, cache, text(5)[None], [5])
    with pytest.raises(BatchChangedError, match=r"allocated for \(batch, heads, head_dim\) \(1, 2, 8\)"):
        in_chunks(model, cache, text(10).view(2, 5), [5])
    cache.reset()
    with pytest.raises(BatchChangedError, match="make a new cache"):
        in_chunks(model, cache, text(10).view(2, 5), [5])
    with pytest.raises(UnsupportedOperationError, match="cannot be repeated 2 times"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(UnsupportedOperationError, match="run the selected rows again"):
        cache.batch_select_indices(torch.tensor([0]))


def test_another_text_in_plain_forwards_is_known_by_its_positions(model, cache):
    in_chunks(model, cache, text(20)[None], [20])
    with pytest.raises(ReuseError, match=r"positions end at \[4\], the 20 columns seen and 5 new ones at 24"):
        model(text(5)[None], position_ids=torch.arange(5)[None], cache=cache)


@pytest.mark.parametrize(("name", "dies_at"), [("llama", 0), ("gemma3", 0), ("gemma3", 1), ("gemma3", 2)])
@pytest.mark.parametrize("q", [1, 5])
def test_a_forward_that_died_half_way_is_noticed_and_reset_heals(name, dies_at, q):
    model = build(name, "sdpa")
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, text(20)[None], [20])
    layer = model.model.layers[dies_at]
    mlp, layer.mlp = layer.mlp, torch.nn.Linear(1, 1)  # as an allocation that fails would end it
    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            in_chunks(model, cache, text(q)[None], [q])
    finally:
        layer.mlp = mlp
    for _ in range(2):
        with pytest.raises(TornForwardError, match="the forward after 20 tokens died"):
            in_chunks(model, cache, text(q)[None], [q])
    cache.reset()
    again = in_chunks(model, cache, text(30)[None], [30])
    fresh = in_chunks(model, SlidingWindowCache(model, POLICY), text(30)[None], [30])
    assert torch.equal(again, fresh)


def test_a_forward_that_dies_after_every_layer_stored_its_keys_counts(model, cache):
    in_chunks(model, cache, text(20)[None], [20])
    head, model.lm_head = model.lm_head, torch.nn.Linear(1, 1)
    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            in_chunks(model, cache, text(5, 1)[None], [5])
    finally:
        model.lm_head = head
    assert cache.tokens_seen == 25


@pytest.mark.parametrize("kind", ["sliding", "shifting", "static"])
def test_a_backward_pass_is_told_that_gradients_end_here(model, kind):
    cache, again = (
        {
            "sliding": lambda: SlidingWindowCache(model, POLICY),
            "shifting": lambda: ShiftingKVCache(model, CachePolicy(max_total_tokens=8, eviction="shift")),
            "static": lambda: StaticKVCache(model, 40),
        }[kind]()
        for _ in range(2)
    )
    expected = in_chunks(model, again, text(25)[None], [20, 5])[:, 20:]
    in_chunks(model, cache, text(25)[None, :20], [20])
    logits = model(text(25)[None, 20:], cache=cache).logits
    assert torch.equal(logits, expected)
    with pytest.raises(UnsupportedOperationError, match="train without a cache"):
        logits.sum().backward()


def test_layers_on_two_devices_are_refused(model, cache):
    in_chunks(model, cache, text(5)[None], [5])
    cache.get_mask_sizes(1, 0)[1].builder.step = cache.rings["full_attention"].decode
    with pytest.raises(UnsupportedModelError, match="layers live on cpu and meta; load the model on one device"):
        cache.update(torch.empty(1, 2, 1, 8, device="meta"), torch.empty(1, 2, 1, 8, device="meta"), 1)


def test_a_text_begun_in_inference_mode_may_go_on_outside(model, cache):
    ids = text(40)[None]
    with torch.inference_mode():
        first = model(ids[:, :20], cache=cache).logits
    rest = in_chunks(model, cache, ids[:, 20:], [1, 9, 10])
    expected = in_chunks(model, SlidingWindowCache(model, POLICY), ids, [40])
    assert torch.allclose(torch.cat([first, rest], dim=1), expected, atol=1e-4)
