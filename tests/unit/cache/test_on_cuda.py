"""On a CUDA device: the same logits, one captured graph for all steps, and counters that never wait."""

import pytest
import torch
from driving import even_chunks, in_chunks, left_padded
from reference import reference_logits
from zoo import CELLS, SINKS, SPECIMENS, WINDOW, build, text

from kvlab.cache import CachePolicy, SlidingWindowCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
POLICY = CachePolicy(max_total_tokens=SINKS + WINDOW, sinks=SINKS)
LENGTH = 6 * WINDOW + 3


def on_cuda(name: str, how: str):
    model = type(build(name, how))._from_config(SPECIMENS[name].config, attn_implementation=how)
    model.load_state_dict(build(name, how).state_dict())
    return model.eval().cuda()


@pytest.mark.parametrize(("name", "how"), CELLS)
def test_every_split_and_every_padded_row_equals_the_dense_reference(name, how):
    model, texts = on_cuda(name, how), [text(LENGTH), text(9, 1)]
    ids, mask = left_padded(texts)
    for size in (1, WINDOW, LENGTH):
        cache = SlidingWindowCache(model, POLICY)
        got = in_chunks(model, cache, ids.cuda(), even_chunks(LENGTH, size), mask.cuda()).cpu()
        for row, tokens in enumerate(texts):
            expected = reference_logits(build(name, how), SPECIMENS[name].rules(), tokens)
            assert float((got[row, -len(tokens) :] - expected).abs().max()) < 1e-3  # other kernels, other rounding


def test_a_captured_step_replays_over_three_windows():
    model, ids = on_cuda("llama", "sdpa"), text(60).cuda()[None]
    expected = in_chunks(model, SlidingWindowCache(model, POLICY), ids, [60])
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, ids[:, :20], [17, 1, 1, 1])  # the single steps warm up what the capture needs
    token, graph = ids[:, 20:21].clone(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(token, cache=cache, use_cache=True).logits
    for position in range(20, 60):
        token.copy_(ids[:, position : position + 1])
        graph.replay()
        assert torch.allclose(logits[0, 0], expected[0, position], atol=1e-3), f"token {position}"
    assert cache.tokens_seen == 60


def test_a_decode_step_never_waits_for_the_device():
    model, ids = on_cuda("llama", "sdpa"), text(60).cuda()[None]
    cache = SlidingWindowCache(model, POLICY)
    in_chunks(model, cache, ids[:, :20], [20])
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_chunks(model, cache, ids[:, 20:], [1] * 40)
        assert (cache.tokens_seen, cache.tokens_held, cache.tokens_evicted) == (60, 11, 49)
    finally:
        torch.cuda.set_sync_debug_mode("default")
