"""The same on real weights: SmolLM2-135M, whose logits reach 40 and whose heads do use their sinks."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from driving import in_chunks, left_padded
from reference import LayerRule, Rope, reference_logits

from kvlab.cache import CachePolicy, SlidingWindowCache
from kvlab.model import ModelNotFetched, load_model, load_tokenizer, long_text

POLICY = CachePolicy(max_total_tokens=24, sinks=4)
RULES = [LayerRule(4, 20, Rope(dims=64, theta=100_000.0))] * 30
LENGTH = 80


@cache
def smollm2(dtype: torch.dtype):
    try:
        return load_model("smollm2-135m", dtype=dtype, attn_implementation="sdpa")
    except ModelNotFetched as error:
        pytest.skip(str(error))


@cache
def prose() -> torch.Tensor:
    return torch.tensor(load_tokenizer("smollm2-135m")(long_text()[:4000])["input_ids"])


@contextmanager
def attending(model, how: str):
    model.config._attn_implementation = how
    yield model
    model.config._attn_implementation = "sdpa"


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_in_double_precision_chunks_and_padded_rows_equal_the_dense_reference(how):
    texts = [prose()[:LENGTH], prose()[300:335]]
    ids, mask = left_padded(texts)
    with attending(smollm2(torch.float64), how) as model:
        expected = [reference_logits(model, RULES, tokens) for tokens in texts]
        cache = SlidingWindowCache(model, POLICY)
        got = in_chunks(model, cache, ids, [40, *[1] * 4, LENGTH - 44], mask)
    for row, tokens in enumerate(texts):
        assert float((got[row, -len(tokens) :] - expected[row]).abs().max()) < 1e-4


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_in_single_precision_it_is_as_near_to_the_truth_as_the_reference(how):
    """A logit of 40 carries 4e-6 of rounding from fp32 alone, and thirty layers add to it.

    Both round by chance: with the instructions of one processor or another, the one is 0.7 to 1.7 times as far off as
    the other.
    """
    ids = prose()[:LENGTH]
    truth = reference_logits(smollm2(torch.float64), RULES, ids)
    with attending(smollm2(torch.float32), how) as model:
        rounding = rms(reference_logits(model, RULES, ids) - truth)
        for sizes in ([LENGTH], [30, *[1] * 4, LENGTH - 34]):
            got = in_chunks(model, SlidingWindowCache(model, POLICY), ids[None], sizes)[0]
            assert rms(got - truth) < 4 * rounding


def test_without_turned_sinks_the_difference_shows():
    ids, model = prose()[:LENGTH], smollm2(torch.float32)
    policy = CachePolicy(max_total_tokens=24, sinks=4, rotate_sinks=False)
    got = in_chunks(model, SlidingWindowCache(model, policy), ids[None], [LENGTH])[0]
    assert float((got - reference_logits(model, RULES, ids)).abs().max()) > 0.5


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())
