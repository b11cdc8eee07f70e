"""StaticKVCache: allocated whole, full when it says so."""

import pytest
import torch
from driving import even_chunks, in_chunks, left_padded
from transformers import AutoConfig, DynamicCache, LlamaConfig
from zoo import CELLS, build, text

from kvlab.cache import (
    BatchChangedError,
    CapacityError,
    PolicyError,
    ReuseError,
    StaticKVCache,
    TornForwardError,
    UnsupportedOperationError,
)

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(("name", "how"), [cell for cell in CELLS if cell[0] in {"llama", "gpt-neox"}])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_it_computes_what_a_dynamic_cache_computes(name, how, size):
    model, (ids, mask) = build(name, how), left_padded([text(30), text(11, 1)])
    chunks = even_chunks(30, size)
    got = in_chunks(model, StaticKVCache(model, 40), ids, chunks, mask)
    full = in_chunks(model, DynamicCache(config=model.config), ids, chunks, mask)
    assert torch.allclose(got[0], full[0], atol=1e-5)
    assert torch.allclose(got[1, -11:], full[1, -11:], atol=1e-5)


def test_beams_find_what_they_find_with_a_dynamic_cache():
    model, ids = build("llama", "sdpa"), text(9)[None]
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **options)
    assert torch.equal(model.generate(ids, cache=StaticKVCache(model, 40), **options), expected)


def test_allocated_early_it_takes_keys_then_values_layer_by_layer():
    order = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if "new_zeros" in str(function):
                order.append(tuple(result.shape))
            return result

    config = AutoConfig.for_model(
        "llama", num_hidden_layers=3, num_key_value_heads=2, hidden_size=64, num_attention_heads=4
    )
    with Recorded():
        cache = StaticKVCache(config, 100, batch_size=5, dtype=torch.float16)
    assert order == [(5, 2, 100, 16)] * 6
    assert cache.nbytes == 3 * 2 * 5 * 2 * 100 * 16 * 2
    assert [layer.keys.dtype for layer in cache.layers] == [torch.float16] * 3
    assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (0, 0, 0)


def test_without_a_batch_size_nothing_is_allocated_before_the_first_token():
    model = build("llama", "sdpa")
    cache = StaticKVCache(model, 100)
    assert cache.nbytes == 0
    in_chunks(model, cache, text(3)[None], [3])
    assert cache.nbytes == 2 * 2 * 2 * 100 * 8 * 4


def test_one_token_too_many_is_refused_with_the_numbers_and_the_rest_stays_usable():
    model = build("llama", "sdpa")
    cache = StaticKVCache(model, 10)
    in_chunks(model, cache, text(8)[None], [8])
    with pytest.raises(
        CapacityError, match="holds 10 tokens, 8 are stored and 3 more do not fit; allocate at least 11"
    ):
        in_chunks(model, cache, text(3)[None], [3])
    in_chunks(model, cache, text(2)[None], [2])
    assert cache.tokens_seen == 10


def test_a_text_exactly_as_long_as_the_buffer_fits():
    model = build("llama", "sdpa")
    cache = StaticKVCache(model, 21)
    model.generate(text(10)[None], cache=cache, **GREEDY)
    assert cache.tokens_held == 21


def test_another_batch_and_another_text_are_refused():
    model = build("llama", "sdpa")
    cache = StaticKVCache(model, 40)
    model.generate(text(5)[None], cache=cache, **GREEDY)
    with pytest.raises(ReuseError, match="already holds a text of 16 tokens"):
        model.generate(text(5)[None], cache=cache, **GREEDY)
    cache.reset()
    with pytest.raises(BatchChangedError, match="allocated for batch 1, got 2"):
        model.generate(torch.stack([text(5), text(5)]), cache=cache, **GREEDY)


def test_a_forward_that_died_half_way_is_noticed():
    model = build("llama", "sdpa")
    cache = StaticKVCache(model, 40)
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    with pytest.raises(TornForwardError, match=r"after 0 tokens died .* reset\(\)"):
        cache.update(states, states, 0)
    cache.reset()
    in_chunks(model, cache, text(3)[None], [3])


def test_no_room_at_all_is_refused():
    with pytest.raises(PolicyError, match="max_total_tokens must be at least 1, got 0"):
        StaticKVCache(LlamaConfig(), 0)


def test_tokens_can_be_taken_back_so_assisted_decoding_gives_the_same_text():
    model, ids = build("llama", "sdpa"), text(9).repeat(2)[None]
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **GREEDY)
    got = model.generate(ids, cache=StaticKVCache(model, 60), prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(got, expected)
    cache = StaticKVCache(model, 60)
    in_chunks(model, cache, ids, [18])
    cache.crop(-3)
    assert cache.tokens_seen == 15
    with pytest.raises(UnsupportedOperationError, match="at most 15 can be taken back"):
        cache.crop(-16)
