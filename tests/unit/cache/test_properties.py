"""Whatever sequence of appends, chunks, resets and reorders: the caches hold what plain lists would."""

import itertools

import torch
from driving import in_chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from lists import DIM, HEADS, LAYERS, Texts, push
from reference import Rope, ShiftRule
from transformers import LlamaConfig
from zoo import build, text

from kvlab.cache import CachePolicy, ShiftingKVCache, SlidingWindowCache, StaticKVCache

CONFIG = LlamaConfig(
    hidden_size=DIM * HEADS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    num_hidden_layers=LAYERS,
    attn_implementation="sdpa",
)
ROPE = Rope(dims=DIM, theta=10_000.0)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 12)),
        st.tuples(st.just("append"), st.just(1)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("reset"), st.lists(st.integers(0, 9), min_size=3, max_size=3)),
    ),
    min_size=4,
    max_size=16,
)
FEW = settings(max_examples=100, deadline=None, derandomize=True)


def live(cache, operations, batch, pads, check):
    """Drive the cache and plain lists side by side; ``check`` compares them after every append."""
    texts, pads = Texts([[] for _ in range(batch)]), pads[:batch]
    for operation, argument in operations:
        if operation == "append":
            texts.append(argument, pads)
            mask, held = push(CONFIG, cache, texts, argument)
            if len(texts.rows[0]) > argument:  # the mask of a first chunk is transformers' own
                assert mask.any(dim=-1).all()  # for padding too: a query that sees nothing is NaN in some kernels
            check(texts, argument, mask, held)
            check_counters(cache, texts)
        elif operation == "reorder":
            order = [row % batch for row in argument[:batch]]
            cache.reorder_cache(torch.tensor(order))
            texts.reorder(order)
            pads = [pads[row] for row in order]
        else:
            cache.reset()
            texts.reset()
            pads = argument[:batch]


def check_counters(cache, texts):
    longest = max(len(texts.real(row, len(tokens))) for row, tokens in enumerate(texts.rows))
    assert (cache.tokens_seen, cache.tokens_held + cache.tokens_evicted) == (longest, longest)
    assert cache.get_seq_length() == len(texts.rows[0])


def attended(mask, held, row, query):
    """Token numbers that one query attends to, sorted, in every layer the same."""
    seen = mask[row, 0, query]
    tokens = [sorted(values[row, 0, seen, 0].int().tolist()) for _, values in held]
    assert tokens.count(tokens[0]) == len(tokens)
    return tokens[0]


@given(
    operations=OPERATIONS,
    batch=st.integers(1, 3),
    pads=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    sinks=st.integers(0, 3),
    window=st.integers(1, 7),
)
@FEW
def test_a_sliding_window_shows_each_query_the_first_and_last_tokens_of_its_row(operations, batch, pads, sinks, window):
    def check(texts, q, mask, held):
        for row in range(batch):
            for query in range(q):
                column = len(texts.rows[row]) - q + query
                if texts.rows[row][column] is None:
                    continue
                tokens = texts.real(row, column)
                kept = tokens[:sinks] + tokens[sinks:][-window:]
                assert attended(mask, held, row, query) == sorted(kept)
                expect_keys(texts, row, query, mask, held, tokens, kept)

    def expect_keys(texts, row, query, mask, held, tokens, kept):
        evicted = torch.tensor(len(tokens) - len(kept))
        for layer, (keys, values) in enumerate(held):
            seen = mask[row, 0, query]
            for key, value in zip(keys[row][:, seen].unbind(1), values[row, 0, seen, 0].tolist(), strict=True):
                original = texts.keys[int(value)][layer]
                is_sink = int(value) in tokens[:sinks]
                expected = ROPE.turn(original, evicted) if is_sink else original
                assert torch.allclose(key, expected, atol=1e-5)

    policy = CachePolicy(max_total_tokens=sinks + window, sinks=sinks)
    live(SlidingWindowCache(CONFIG, policy), operations, batch, pads, check)


@given(
    operations=OPERATIONS,
    batch=st.integers(1, 3),
    pads=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    high=st.integers(2, 8),
    burst=st.integers(1, 8),
)
@FEW
def test_a_shifting_cache_shows_each_query_what_its_row_kept_since_the_last_burst(operations, batch, pads, high, burst):
    low = max(high - burst, 0)

    def check(texts, q, mask, held):
        for row in range(batch):
            for query in range(q):
                column = len(texts.rows[row]) - q + query
                if texts.rows[row][column] is None:
                    continue
                tokens = texts.real(row, column)
                seen = ShiftRule(high, low, None).seen(len(tokens))[-1]
                kept = [token for token, is_seen in zip(tokens, seen.tolist(), strict=True) if is_seen]
                assert attended(mask, held, row, query) == sorted(kept)

    policy = CachePolicy(max_total_tokens=high, eviction="shift", low_water=low)
    live(ShiftingKVCache(CONFIG, policy), operations, batch, pads, check)


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40), how=st.sampled_from(["eager", "sdpa"]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_split_of_a_text_gives_the_same_logits(sizes, how):
    sizes = [size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True) if end <= 60] or [1]
    model, ids = build("llama", how), text(sum(sizes))[None]
    policy = CachePolicy(max_total_tokens=11, sinks=3)
    got = in_chunks(model, SlidingWindowCache(model, policy), ids, sizes)
    expected = in_chunks(model, SlidingWindowCache(model, policy), ids, [ids.shape[1]])
    assert float((got - expected).abs().max()) < 1e-4


@given(operations=OPERATIONS, batch=st.integers(1, 3))
@FEW
def test_a_static_cache_shows_each_query_all_tokens_before_it(operations, batch):
    operations = [(name, [0] * 3 if name == "reset" else argument) for name, argument in operations]

    def check(texts, q, mask, held):
        for row in range(batch):
            for query in range(q):
                column = len(texts.rows[row]) - q + query
                assert attended(mask, held, row, query) == sorted(texts.real(row, column))

    live(StaticKVCache(CONFIG, 200), operations, batch, [0] * 3, check)
