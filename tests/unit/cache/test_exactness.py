"""SlidingWindowCache computes what the definition says, over the whole matrix."""

import pytest
import torch
from driving import even_chunks, in_chunks, left_padded
from reference import reference_logits
from transformers import DynamicCache
from zoo import CELLS, SINKS, SPECIMENS, WINDOW, build, text

from kvlab.cache import CachePolicy, SlidingWindowCache

TOLERANCE = 1e-4  # of logits in fp32, for texts up to 300 tokens
POLICY = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS)
LENGTH = 6 * WINDOW + 3
CHUNKS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW, LENGTH]
BOTH = pytest.mark.parametrize("how", ["eager", "sdpa"])


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max())


@pytest.mark.parametrize(("name", "how"), CELLS)
def test_every_split_into_chunks_equals_the_dense_reference(name, how):
    model, ids = build(name, how), text(LENGTH)
    expected = reference_logits(model, SPECIMENS[name].rules(), ids)
    for size in CHUNKS:
        got = in_chunks(model, SlidingWindowCache(model, POLICY), ids[None], even_chunks(LENGTH, size))[0]
        assert worst(got, expected) < TOLERANCE, f"chunks of {size}"


@pytest.mark.parametrize(("name", "how"), CELLS)
@pytest.mark.parametrize("size", [1, 5, WINDOW + 1, LENGTH])
def test_each_left_padded_row_equals_its_single_run(name, how, size):
    model = build(name, how)
    texts = [text(length, seed) for seed, length in enumerate([1, WINDOW + 5, LENGTH, 2])]
    ids, mask = left_padded(texts)
    got = in_chunks(model, SlidingWindowCache(model, POLICY), ids, even_chunks(LENGTH, size), mask)
    for row, tokens in enumerate(texts):
        expected = reference_logits(model, SPECIMENS[name].rules(), tokens)
        assert worst(got[row, -len(tokens) :], expected) < TOLERANCE, f"row {row} of {len(tokens)} tokens"


@BOTH
def test_positions_counted_in_the_row_or_in_columns_give_the_same(how):
    model = build("llama", how)
    texts = [text(9, 1), text(LENGTH, 2)]
    ids, mask = left_padded(texts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, row_wise = SlidingWindowCache(model, POLICY), []
    with torch.no_grad():
        for start in range(0, LENGTH, 7):
            chunk = slice(start, start + 7)
            row_wise.append(
                model(
                    ids[:, chunk],
                    attention_mask=mask[:, : chunk.stop],
                    position_ids=positions[:, chunk],
                    cache=cache,
                ).logits
            )
    by_columns = in_chunks(model, SlidingWindowCache(model, POLICY), ids, even_chunks(LENGTH, 7), mask)
    row_wise = torch.cat(row_wise, dim=1)
    assert worst(row_wise[0, -9:], by_columns[0, -9:]) < TOLERANCE
    assert worst(row_wise[1], by_columns[1]) < TOLERANCE


@BOTH
def test_rows_of_one_length_equal_their_single_runs(how):
    model, rows = build("llama", how), torch.stack([text(LENGTH, seed) for seed in range(3)])
    for size in (1, 6, LENGTH):
        got = in_chunks(model, SlidingWindowCache(model, POLICY), rows, even_chunks(LENGTH, size))
        for row, ids in enumerate(rows):
            assert worst(got[row], reference_logits(model, SPECIMENS["llama"].rules(), ids)) < TOLERANCE


@pytest.mark.parametrize(("name", "how"), CELLS)
@pytest.mark.parametrize(("sinks", "window"), [(0, WINDOW), (1, 1), (SINKS, 1), (2, 4)])
def test_no_sinks_and_the_shortest_windows_are_exact_too(name, how, sinks, window):
    model, ids = build(name, how), text(30)
    expected = reference_logits(model, SPECIMENS[name].rules(sinks, window), ids)
    policy = CachePolicy(max_total_tokens=sinks + window, sinks=sinks)
    for size in (1, 4, 30):
        got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], even_chunks(30, size))[0]
        assert worst(got, expected) < TOLERANCE, f"chunks of {size}"


@pytest.mark.parametrize(("name", "how"), [cell for cell in CELLS if cell[0] != "mistral-sliding"])
def test_a_window_longer_than_the_text_equals_a_full_cache(name, how):
    model, (ids, mask) = build(name, how), left_padded([text(20), text(33, 1)])
    policy = CachePolicy(max_total_tokens=64, sinks=SINKS)
    for size in (1, 9, 33):
        chunks = even_chunks(33, size)
        got = in_chunks(model, SlidingWindowCache(model, policy), ids, chunks, mask)
        full = in_chunks(model, DynamicCache(config=model.config), ids, chunks, mask)
        assert worst(got[0, -20:], full[0, -20:]) < TOLERANCE
        assert worst(got[1], full[1]) < TOLERANCE


@BOTH
def test_without_turning_the_sinks_it_equals_the_plain_mask_on_the_unchanged_model(how):
    model, ids = build("llama", how), text(LENGTH)
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (key <= query) & ((key < SINKS) | (key > query - WINDOW))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        expected = model(ids[None], attention_mask=mask, use_cache=False).logits[0]
    policy = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS, rotate_sinks=False)
    for size in CHUNKS:
        got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], even_chunks(LENGTH, size))[0]
        assert worst(got, expected) < TOLERANCE, f"chunks of {size}"


def test_sinks_that_are_not_turned_would_be_seen():
    model, ids = build("llama", "sdpa"), text(LENGTH)
    expected = reference_logits(model, SPECIMENS["llama"].rules(), ids)
    policy = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS, rotate_sinks=False)
    got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], [1] * LENGTH)[0]
    assert worst(got, expected) > 1


@pytest.mark.parametrize(("sinks", "window"), [(SINKS - 1, WINDOW), (SINKS, WINDOW + 1), (SINKS, WINDOW - 1)])
def test_one_token_more_or_less_would_be_seen(sinks, window):
    model, ids = build("llama", "sdpa"), text(LENGTH)
    expected = reference_logits(model, SPECIMENS["llama"].rules(sinks, window), ids)
    got = in_chunks(model, SlidingWindowCache(model, POLICY), ids[None], even_chunks(LENGTH, 5))[0]
    assert worst(got, expected) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "cohere"])
@BOTH
def test_in_16_bits_it_is_as_near_to_the_truth_as_the_reference_in_16_bits(name, how, dtype):
    specimen, ids = SPECIMENS[name], text(LENGTH)
    truth = reference_logits(build(name, how), specimen.rules(), ids)
    model = build(name, how, dtype)
    rounding = (reference_logits(model, specimen.rules(), ids).float() - truth).square().mean().sqrt()
    for size in (1, 5, LENGTH):
        got = in_chunks(model, SlidingWindowCache(model, POLICY), ids[None], even_chunks(LENGTH, size))[0]
        error = (got.float() - truth).square().mean().sqrt()
        assert got.dtype == dtype
        assert error < 1.5 * rounding, f"chunks of {size}: {error:.4f}, the reference itself {rounding:.4f}"


@BOTH
def test_300_tokens_stay_within_the_tolerance(how):
    model, ids = build("llama", how), text(300)
    policy = CachePolicy(max_total_tokens=64, sinks=4)
    expected = reference_logits(model, SPECIMENS["llama"].rules(4, 60), ids)
    for size in (1, 50):
        got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], even_chunks(300, size))[0]
        assert worst(got, expected) < TOLERANCE


@BOTH
def test_splits_of_a_long_text_agree(how):
    model, ids = build("llama", how), text(1000)
    policy = CachePolicy(max_total_tokens=64, sinks=4)
    one_by_one = in_chunks(model, SlidingWindowCache(model, policy), ids[None], [1] * 1000)
    for size in (61, 250):
        got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], even_chunks(1000, size))
        assert worst(got, one_by_one) < TOLERANCE
