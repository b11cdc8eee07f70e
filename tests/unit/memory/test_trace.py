"""A trace without a GPU: fake tensors ask for what real ones ask for, and a card answers as PyTorch would."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from kvlab.cache import CachePolicy, SlidingWindowCache
from kvlab.memory.allocator import CudaOutOfMemoryError, Device
from kvlab.memory.replay import replay
from kvlab.memory.snapshot import parse_snapshot, summarise
from kvlab.memory.trace import AllocationTrace, Step, capture_generation, record, run_on

MIB, GIB = 1 << 20, 1 << 30

LLAMA_2_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
    max_position_embeddings=8192,
)
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)


def growing(model):
    return DynamicCache(config=model.config)


def fixed(length):
    return lambda model: StaticCache(config=model.config, max_cache_len=length)


def sizes(trace, phase):
    return [step.size_bytes for step in trace.steps if step.phase == phase and step.size_bytes]


@pytest.fixture(scope="module")
def article():
    """The article's case: 4 requests of 6,000 tokens on a Llama-2-7B shape in float16."""
    return capture_generation(LLAMA_2_7B, growing, batch_size=4, prompt_tokens=6000, new_tokens=2)


def test_a_storage_is_an_allocation_and_its_end_a_free():
    with record() as recorder:
        recorder.phase = "first"
        a = torch.empty(1000, dtype=torch.float32)
        b = a[10:].view(-1)
        recorder.phase = "second"
        del a
        c = b + 1
        del b, c
    steps = [(s.phase, s.size_bytes) for s in recorder.trace.steps]
    assert steps == [("first", 4000), ("second", 3960), ("second", 0), ("second", 0)]
    assert list(recorder.trace.live_bytes())[-1] == 0


def test_what_dies_after_the_recording_is_not_part_of_it():
    with record() as recorder:
        kept = torch.empty(10)
    del kept
    assert [s.size_bytes for s in recorder.trace.steps] == [40]


def test_an_allocation_names_who_asked():
    with record() as recorder:
        torch.empty(10)
    frame = recorder.trace.steps[0].frames[0]
    assert (frame["name"], frame["filename"]) == ("test_an_allocation_names_who_asked", __file__)


def run_tiny(fake):
    """A forward pass of the tiny model, recorded on fake or on real tensors."""
    from transformers import AutoModelForCausalLM

    with record(fake=fake) as recorder, torch.no_grad():
        recorder.phase = "weights"
        model = AutoModelForCausalLM.from_config(TINY).eval()
        recorder.name_modules(model)
        cache = growing(model)
        recorder.phase = "run"
        tokens = torch.zeros(2, 7, dtype=torch.long)
        for _ in range(3):
            tokens = model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return [(s.size_bytes, s.module) for s in recorder.trace.steps if s.phase == "run"]


def test_fake_tensors_ask_for_exactly_what_real_ones_ask_for():
    fake, real = run_tiny(fake=True), run_tiny(fake=False)
    assert len(fake) > 100
    assert fake == real


def test_the_weights_of_the_article_are_12_55_gib(article):
    parameters = 6_738_415_616
    assert sum(sizes(article, "weights")) >= 2 * parameters
    outcome, _ = run_on(article, Device(80 * GIB))
    weights = next(p for p in outcome.phases if p.phase == "weights")
    assert weights.end_allocated_bytes / GIB == pytest.approx(12.55, abs=0.005)


def test_the_cache_of_the_article_grows_by_512_kib_a_token(article):
    outcome, allocator = run_on(article, Device(80 * GIB))
    decode = next(p for p in outcome.phases if p.phase == "decode 2")
    weights = next(p for p in outcome.phases if p.phase == "weights")
    kv = 4 * 6001 * 512 * 1024
    assert 0 <= decode.end_allocated_bytes - weights.end_allocated_bytes - kv < 100 * MIB
    assert outcome.oom is None
    assert allocator.stats.num_ooms == 0


def test_the_article_dies_in_the_prefill_on_24_gib(article):
    card = Device(24 * GIB, other_bytes=600 * MIB)
    outcome, allocator = run_on(article, card)
    assert outcome.oom.phase == "prefill"
    assert outcome.oom.module.startswith("model.layers.")
    assert outcome.oom.message.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 24.00 GiB" in outcome.oom.message
    assert outcome.peak_reserved_bytes <= card.total_bytes - card.other_bytes
    assert allocator.memory_stats()["num_ooms"] == 1
    assert outcome.terms == {"cublas_workspace_bytes": 8_519_680, "other_bytes": 600 * MIB}


def test_with_the_window_cache_the_article_fits_its_card_and_stays_level_while_it_decodes():
    cache = SlidingWindowCache(LLAMA_2_7B, CachePolicy(max_total_tokens=1024))
    trace = capture_generation(
        LLAMA_2_7B, lambda model: cache, batch_size=4, prompt_tokens=6000, new_tokens=6, prefill_chunk_size=512
    )
    outcome, _ = run_on(trace, Device(24 * GIB, other_bytes=600 * MIB))
    assert outcome.oom is None
    ends = {p.phase: p.end_allocated_bytes for p in outcome.phases}
    assert len({end for phase, end in ends.items() if phase.startswith("decode")}) == 1
    window_bytes = 4 * 1024 * 512 * 1024
    assert 0 <= ends["decode 6"] - ends["weights"] - window_bytes < 100 * MIB


def test_a_static_cache_of_the_article_dies_with_another_message_than_a_growing_one():
    trace = capture_generation(LLAMA_2_7B, fixed(6144), batch_size=4, prompt_tokens=512)  # of 6,000: it dies in them
    oom = run_on(trace, Device(24 * GIB, other_bytes=600 * MIB))[0].oom
    one_layer_bytes = 4 * 6144 * 32 * 128 * 2
    assert (oom.phase, oom.tried_bytes) == ("prefill", one_layer_bytes)


def test_a_static_cache_is_allocated_whole_and_does_not_grow():
    trace = capture_generation(TINY, fixed(512), batch_size=2, prompt_tokens=16, new_tokens=4)
    outcome, _ = run_on(trace, Device(GIB))
    ends = [p.end_allocated_bytes for p in outcome.phases if p.phase.startswith("decode")]
    assert max(ends) - min(ends) <= 4096
    one_layer = 2 * 2 * 512 * 16 * 2
    assert sizes(trace, "prefill").count(one_layer) == 4


def test_a_prompt_in_chunks_needs_less_at_once():
    peaks = {}
    for chunk in (None, 256):
        trace = capture_generation(TINY, growing, batch_size=2, prompt_tokens=2048, prefill_chunk_size=chunk)
        peaks[chunk] = max(trace.live_bytes())
    assert peaks[256] < peaks[None]


def test_eager_attention_materialises_the_scores():
    scores = 2 * 4 * 300 * 300 * 2
    for implementation, present in (("eager", True), ("sdpa", False)):
        trace = capture_generation(TINY, growing, batch_size=2, prompt_tokens=300, attn_implementation=implementation)
        assert (scores in sizes(trace, "prefill")) is present


def test_the_cublas_workspace_comes_once_at_the_first_product():
    trace = capture_generation(TINY, growing, batch_size=1, prompt_tokens=8, cublas_workspace_bytes=12_345)
    assert [s.phase for s in trace.steps if s.size_bytes == 12_345] == ["prefill"]
    without = capture_generation(TINY, growing, batch_size=1, prompt_tokens=8, cublas_workspace_bytes=0)
    assert len(trace.steps) == len(without.steps) + 1


def test_the_default_dtype_is_left_as_it_was():
    capture_generation(TINY, growing, batch_size=1, prompt_tokens=4)
    assert torch.get_default_dtype() == torch.float32


def test_phases_are_told_apart():
    trace = AllocationTrace(
        steps=[
            Step(1, 30 * MIB, "load"),
            Step(2, 40 * MIB, "run"),
            Step(2, 0, "run"),
            Step(3, 5 * MIB, "end"),
        ],
        terms={},
    )
    outcome, allocator = run_on(trace, Device(GIB))
    assert [(p.phase, p.peak_allocated_bytes // MIB, p.end_allocated_bytes // MIB) for p in outcome.phases] == [
        ("load", 30, 30),
        ("run", 70, 30),
        ("end", 35, 35),
    ]
    assert (outcome.events, outcome.peak_allocated_bytes) == (4, 70 * MIB)
    assert allocator.memory_stats()["allocated_bytes.all.peak"] == 70 * MIB  # of the whole run, for its memory_summary


def test_a_run_stops_at_its_out_of_memory():
    trace = AllocationTrace(steps=[Step(1, 30 * MIB, "a"), Step(2, 80 * MIB, "b", "layer", ())])
    outcome, allocator = run_on(trace, Device(100 * MIB))
    assert (outcome.events, outcome.oom.event, outcome.oom.module) == (1, 1, "layer")
    with pytest.raises(CudaOutOfMemoryError) as error:
        allocator.malloc(80 * MIB)
    assert outcome.oom.message == str(error.value)


def test_an_empty_trace_is_a_run_of_nothing():
    assert run_on(AllocationTrace(), Device(GIB))[0].peak_reserved_bytes == 0


def test_the_run_can_be_looked_at_as_a_snapshot():
    trace = capture_generation(TINY, growing, batch_size=2, prompt_tokens=512)
    _, allocator = run_on(trace, Device(GIB))
    snapshot = parse_snapshot(allocator.snapshot())
    owners = {frame for block in summarise(snapshot, top=50).top_blocks for frame in block.frames}
    assert any("cache_utils.py" in owner for owner in owners)
    assert replay(snapshot).exact is True
