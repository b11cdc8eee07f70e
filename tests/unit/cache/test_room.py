"""An oversized prefill chunk is refused, with a number that fits."""

import re

import pytest
import torch
from driving import even_chunks, in_chunks
from transformers import LlamaConfig
from zoo import build, text

from kvlab.cache import CachePolicy, PrefillChunkError, SlidingWindowCache
from kvlab.cache.room import ChunkRoom

POLICY = CachePolicy(max_total_tokens=64, sinks=4)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("limit_bytes", [100_000, 1_000_000])
def test_the_named_chunk_size_fits_for_the_whole_text(how, limit_bytes):
    model, ids = build("llama", how), text(500)[None]
    cache = SlidingWindowCache(model, POLICY, chunk_limit_bytes=limit_bytes)
    with pytest.raises(PrefillChunkError, match="a chunk of 500 tokens needs") as refusal:
        model.generate(ids, cache=cache, max_new_tokens=1, pad_token_id=0)
    size = int(re.search(r"prefill_chunk_size=(\d+)", str(refusal.value))[1])
    assert 1 < size < 500
    cache.reset()
    model.generate(ids, cache=cache, max_new_tokens=2, pad_token_id=0, prefill_chunk_size=size)
    assert cache.tokens_seen == 501


def test_a_refused_chunk_leaves_the_cache_as_it_was():
    model, ids = build("llama", "sdpa"), text(400)[None]
    cache = SlidingWindowCache(model, POLICY, chunk_limit_bytes=100_000)
    in_chunks(model, cache, ids[:, :80], even_chunks(80, 20))
    with pytest.raises(PrefillChunkError):
        in_chunks(model, cache, ids[:, 80:], [320])
    got = in_chunks(model, cache, ids[:, 80:100], [20])
    fresh = in_chunks(model, SlidingWindowCache(model, POLICY), ids[:, :100], [100])
    assert torch.allclose(got, fresh[:, 80:], atol=1e-4)


def test_room_counts_columns_mask_and_the_scores_of_eager_attention():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    room = ChunkRoom.of(config, 2, 0)
    assert room.needed(batch=3, q=5, columns=7) == 3 * 7 * (2 * (2 + 4) * 16 * 2 + 5 * (1 + 2))
    config._attn_implementation = "eager"
    assert ChunkRoom.of(config, 2, 0).score_bytes == 3 + 4 * (2 * 2 + 4)
