"""What the caches lean on in transformers beyond its documented surface. A red test here names what moved."""

import torch
from torch._subclasses import FakeTensor
from transformers import AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from zoo import CELLS, SPECIMENS, build, text

from kvlab.cache import CachePolicy, SlidingWindowCache
from kvlab.cache.base import BoundedCache


def test_generate_still_marks_a_given_cache_before_any_work():
    """BoundedCache tells a second text from a continuation by this assignment alone."""
    order = []

    class Marked(DynamicCache):
        @property
        def _is_user_defined(self):
            return True

        @_is_user_defined.setter
        def _is_user_defined(self, value):
            order.append("marked")

        def update(self, *args, **kwargs):
            order.append("updated")
            return super().update(*args, **kwargs)

    build("llama", "sdpa").generate(text(4)[None], cache=Marked(), max_new_tokens=3, pad_token_id=0)
    assert order[0] == "marked", "generate() no longer sets cache._is_user_defined first"
    assert order.count("marked") == 1


def test_the_offset_still_reaches_the_mask_function_untouched():
    """masks.MaskOffset travels this way."""
    offset, seen = object(), []

    class Layer(DynamicCache().layer_class_to_replicate):
        def get_mask_sizes(self, query_length):
            return query_length, offset

    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    AttentionMaskInterface.register("sdpa", lambda **options: seen.append(options))
    try:
        create_causal_mask(build("llama", "sdpa").config, torch.empty(2, 3, 0), None, Cache(layers=[Layer()]))
    finally:
        AttentionMaskInterface.register("sdpa", original)
    (options,) = seen
    assert options["kv_offset"] is offset
    needed = {
        "batch_size",
        "q_length",
        "attention_mask",
        "allow_is_causal_skip",
        "dtype",
        "device",
        "use_vmap",
    }
    assert needed <= options.keys(), f"no longer given to mask functions: {needed - options.keys()}"


def test_every_family_still_makes_its_mask_through_the_registered_functions():
    for name, how in CELLS:
        calls, original = [], ALL_MASK_ATTENTION_FUNCTIONS[how]

        def spy(*args, calls=calls, original=original, **options):
            calls.append(options)
            return original(*args, **options)

        AttentionMaskInterface.register(how, spy)
        try:
            with torch.no_grad():
                build(name, how)(text(5)[None], cache=DynamicCache(config=SPECIMENS[name].config))
        finally:
            AttentionMaskInterface.register(how, original)
        assert calls, f"{name} with {how} attention asks no registered mask function"


def test_llama_still_hands_its_positions_to_the_cache():
    """Progress.check_positions reads them; without them only generate() can notice a second text."""
    seen = []

    class Spy(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            seen.append(kwargs)
            return super().update(keys, values, layer, *args, **kwargs)

    with torch.no_grad():
        build("llama", "sdpa")(text(5)[None], cache=Spy())
    assert torch.equal(seen[0]["kwargs"]["position_ids"], torch.arange(5)[None])


def test_the_cache_base_class_still_has_what_we_override():
    overridden = [name for name in vars(BoundedCache) if name in vars(Cache)]
    assert {"crop", "activate_past_recording", "batch_repeat_interleave", "batch_select_indices"} <= set(overridden)
    assert CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }


def test_layer_kinds_still_come_with_their_windows():
    kinds, options = get_layer_types_and_kwargs(SPECIMENS["gemma3"].config)
    assert kinds == ["sliding_attention", "full_attention"] * 2
    assert [option.get("sliding_window") for option in options] == [6, None, 6, None]
    kinds, options = get_layer_types_and_kwargs(SPECIMENS["mistral-sliding"].config)
    assert kinds == ["sliding_attention"] * 2


def test_rotary_modules_still_keep_their_frequencies_in_buffers():
    for name in SPECIMENS:
        buffers = dict(build(name, "eager").named_buffers())
        assert [key for key in buffers if key.endswith("inv_freq") and "original" not in key], name


def test_a_fake_tensor_is_still_known_by_its_class():
    with torch._subclasses.FakeTensorMode():
        assert isinstance(torch.empty(1), FakeTensor)


def test_generate_still_takes_the_cache_by_its_new_name():
    cache = SlidingWindowCache(build("llama", "sdpa"), CachePolicy(max_total_tokens=8))
    build("llama", "sdpa").generate(text(4)[None], cache=cache, max_new_tokens=3, pad_token_id=0)
    assert cache.tokens_seen == 6
