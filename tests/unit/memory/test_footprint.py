"""The arithmetic of kvlab.memory.footprint against tensors that real, tiny, random models really hold."""

import io
import weakref
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    PhiConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
    StaticCache,
    T5Config,
)
from transformers.models.llama.modeling_llama import eager_attention_forward

from kvlab.memory.footprint import (
    FootprintError,
    buffers_bytes,
    footprint,
    kv_bytes,
    kv_bytes_per_token,
    logits_bytes,
    max_tokens,
    plan,
    score_bytes,
    tokens_in,
    weights_bytes,
)

GIB = 2**30
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
LLAMA_2_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
)
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
MIXED = ["sliding_attention", "full_attention"] * 2

CONFIGS = {
    "llama-gqa": LlamaConfig(**TINY, num_key_value_heads=2),
    "llama-tied": LlamaConfig(**TINY, num_key_value_heads=1, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**TINY, num_key_value_heads=2, head_dim=16),
    "mistral-sliding": MistralConfig(**TINY, num_key_value_heads=2, sliding_window=6),
    "gemma2-hybrid": Gemma2Config(**TINY, num_key_value_heads=2, head_dim=16, sliding_window=6, layer_types=MIXED),
    "gemma3-hybrid": Gemma3TextConfig(**TINY, num_key_value_heads=1, head_dim=16, sliding_window=5, layer_types=MIXED),
    "qwen3": Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**TINY),
    "phi": PhiConfig(**TINY),
    "phi3-longrope": Phi3Config(
        **TINY,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [2.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 16,
        },
    ),
    "falcon-multi-query": FalconConfig(**TINY, multi_query=True),
    "gpt2": GPT2Config(vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64),
    "deepseek-latent": DeepseekV3Config(
        **TINY,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "qwen3-next-linear": Qwen3NextConfig(
        **TINY,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "jamba-mamba": JambaConfig(
        **TINY,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
    ),
}


def built(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def read(model, cache, batch, tokens):
    with torch.no_grad():
        return model(input_ids=torch.ones((batch, tokens), dtype=torch.long), cache=cache, use_cache=True)


def storage_bytes(cache):
    """Bytes of the storages a cache holds on to, each counted once."""
    storages = {}
    for layer in cache.layers:
        states = [
            *getattr(layer, "conv_states", {}).values(),
            *getattr(layer, "recurrent_states", {}).values(),
        ]
        for tensor in (layer.keys, layer.values, *states) if hasattr(layer, "keys") else states:
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture(params=CONFIGS, name="config")
def any_config(request):
    return CONFIGS[request.param]


def test_weights_and_buffers_are_the_bytes_of_the_real_model(config):
    model = built(config)
    assert weights_bytes(config, "float32") == sum(p.nbytes for p in model.parameters())
    assert buffers_bytes(config, "float32") == sum(b.nbytes for b in model.buffers())


def test_a_cache_after_a_decode_step_holds_exactly_kv_bytes(config):
    model, cache = built(config), DynamicCache(config=config)
    for tokens in (7, 1, 1):
        read(model, cache, batch=2, tokens=tokens)
    assert storage_bytes(cache) == kv_bytes(config, 2, 9, torch.float32)


def test_a_prefill_holds_what_the_footprint_names(config):
    model, cache = built(config), DynamicCache(config=config)
    output = read(model, cache, batch=2, tokens=11)
    need = footprint(config, 2, 11, "float32", query_tokens=11, logits="all")
    cached = {"kv_full_layers", "kv_sliding_layers", "kv_pinned_by_last_chunk", "linear_attention_state"}
    assert storage_bytes(cache) == sum(need.terms[name] for name in cached & need.terms.keys())
    assert output.logits.nbytes == need.logits_bytes == logits_bytes(config, 2, "float32", 11, "all")
    assert need.total_bytes == sum(need.terms.values())
    assert need.formulas.keys() == need.terms.keys()


def test_one_more_token_grows_a_real_cache_by_kv_bytes_per_token(config):
    model, cache = built(config), DynamicCache(config=config)
    sizes = [read(model, cache, 1, n) and storage_bytes(cache) for n in (1, 1, 1, 1, 1, 1, 1, 1)]
    grown = [later - earlier for earlier, later in pairwise(sizes)]
    assert grown == [kv_bytes_per_token(config, "float32", tokens) for tokens in range(1, 8)]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-sliding", "gemma3-hybrid"])
def test_a_static_cache_of_the_same_length_holds_the_same_bytes(name):
    config = CONFIGS[name]
    cache = StaticCache(config=config, max_cache_len=9)
    read(built(config), cache, batch=2, tokens=3)
    assert storage_bytes(cache) == kv_bytes(config, 2, 9, "float32")


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-next-linear", "jamba-mamba"])
def test_half_precision_halves_rows_but_not_float32_states(name):
    config = CONFIGS[name]
    model, cache = built(config, torch.bfloat16), DynamicCache(config=config)
    read(model, cache, 1, 4)
    read(model, cache, 1, 1)
    assert storage_bytes(cache) == kv_bytes(config, 1, 5, "bf16")
    halved = 2 * kv_bytes(config, 1, 5, "bf16") == kv_bytes(config, 1, 5, "fp32")
    assert halved == (name == "llama-gqa")


def test_the_formula_of_a_plain_model_is_2_layers_heads_head_dim():
    assert kv_bytes_per_token(LLAMA_2_7B, "float16") == 2 * 32 * 32 * 128 * 2 == 524288
    assert kv_bytes_per_token(SMOLLM2_135M, "float32") == 2 * 30 * 3 * 64 * 4 == 46080


def test_a_full_window_stops_growing_and_a_hybrid_grows_in_its_full_layers_only():
    mistral, gemma = CONFIGS["mistral-sliding"], CONFIGS["gemma3-hybrid"]
    row = 2 * 4 * 2 * 8 * 4
    assert [kv_bytes_per_token(mistral, "float32", t) for t in (0, 5, 6, 10_000)] == [row, row, 0, 0]
    assert kv_bytes_per_token(gemma, "float32", 10_000) * 2 == kv_bytes_per_token(gemma, "float32", 0)


def test_tied_embeddings_are_counted_once():
    tied = LlamaConfig(**TINY, num_key_value_heads=1, tie_word_embeddings=True)
    untied = LlamaConfig(**TINY, num_key_value_heads=1, tie_word_embeddings=False)
    assert weights_bytes(untied, "float16") - weights_bytes(tied, "float16") == 99 * 32 * 2


def test_llama_2_7b_with_four_requests_of_6000_tokens_needs_more_than_24_gib():
    result = plan(LLAMA_2_7B, 4, 6000, "float16", usable_bytes=24 * GIB)
    assert result.weights_bytes == 13_476_831_232
    assert result.kv_bytes == 4 * 6000 * 524288
    assert round((result.weights_bytes + result.kv_bytes) / GIB, 2) == 24.27
    assert not result.fits
    assert any("4096 positions" in note for note in result.notes)


def test_max_tokens_is_the_last_length_that_fits():
    for config, batch in ((LLAMA_2_7B, 4), (CONFIGS["gemma3-hybrid"], 3)):
        usable = weights_bytes(config, "float16") + 4 * GIB
        most = plan(config, batch, 1, usable_bytes=usable).max_tokens
        assert plan(config, batch, most, usable_bytes=usable).fits
        assert not plan(config, batch, most + 1, usable_bytes=usable).fits


def test_people_see_every_addend_and_the_answer():
    console = Console(file=io.StringIO(), width=160)
    console.print(plan(LLAMA_2_7B, 4, 6000, usable_bytes=24 * GIB, usable_note="as given").render())
    page = console.file.getvalue()
    for part in ("kv_full_layers", "11.719", "12.551", "as given", "does not fit", "5861 tokens", "4096 positions"):
        assert part in page


def test_max_tokens_is_zero_without_room_and_none_when_every_layer_has_a_window():
    assert max_tokens(LLAMA_2_7B, 8 * GIB, 1, "float16") == 0
    assert max_tokens(CONFIGS["mistral-sliding"], GIB, 1, "float16") is None
    assert max_tokens(CONFIGS["mistral-sliding"], 1000, 1, "float16") == 0


def test_a_paged_pool_of_1_gib_holds_46592_tokens_of_smollm2_in_blocks_of_128():
    assert tokens_in(GIB, SMOLLM2_135M, "bfloat16", block_tokens=128) == 46_592
    assert tokens_in(GIB, SMOLLM2_135M, "bfloat16") == GIB // 23040
    assert tokens_in(GIB, CONFIGS["mistral-sliding"], "bfloat16") is None


def test_an_fp8_cache_halves_the_cache_and_leaves_the_weights():
    half = footprint(LLAMA_2_7B, 1, 1000, "float16")
    fp8 = footprint(LLAMA_2_7B, 1, 1000, "float16", kv_dtype="fp8")
    assert fp8.kv_bytes * 2 == half.kv_bytes
    assert fp8.weights_bytes == half.weights_bytes
    assert half.total_bytes - fp8.total_bytes == fp8.kv_bytes


class PeakOfNewStorages(TorchDispatchMode):
    """Peak bytes of the tensors created inside, by watching their storages die."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given | self.sizes.keys():
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key)
        self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eager_attention_peaks_at_the_score_bytes(dtype):
    config = CONFIGS["llama-gqa"]
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1
    query = torch.ones((2, 4, 64, 8), dtype=dtype)
    mask = torch.zeros((1, 1, 64, 64), dtype=dtype)
    peak = PeakOfNewStorages()
    with torch.no_grad(), peak:
        eager_attention_forward(module, query, query, query, mask, scaling=1.0)
    assert peak.peak_bytes == score_bytes(config, 2, 64, 64, dtype)


def test_eager_attention_adds_scores_and_sdpa_does_not():
    eager = footprint(LLAMA_2_7B, 1, 8192, "float16", query_tokens=8192, attention="eager")
    sdpa = footprint(LLAMA_2_7B, 1, 8192, "float16", query_tokens=8192)
    assert eager.total_bytes - sdpa.total_bytes == 32 * 8192 * 8192 * 10 == eager.terms["attention_scores"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RwkvConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2), "keeps its past outside the cache"),
        (T5Config(), "no causal language model"),
        (NemotronConfig(**TINY, head_dim=None, num_key_value_heads=0), "no nemotron model follows"),
        ({"hidden_size": 32}, "expected a transformers config"),
    ],
)
def test_a_model_whose_cache_cannot_be_counted_is_refused_in_one_line(config, reason):
    with pytest.raises(FootprintError, match=reason) as refusal:
        kv_bytes(config, 1, 10, "float16")
    assert "\n" not in str(refusal.value)


def test_bad_requests_are_refused_with_their_numbers():
    with pytest.raises(FootprintError, match="batch 0"):
        footprint(LLAMA_2_7B, 0, 10, "float16")
    with pytest.raises(FootprintError, match="tokens 10"):
        footprint(LLAMA_2_7B, 1, 10, "float16", query_tokens=11)
    with pytest.raises(FootprintError, match="int3"):
        footprint(LLAMA_2_7B, 1, 10, "int3")
    with pytest.raises(FootprintError, match="does not compute in float8"):
        footprint(LLAMA_2_7B, 1, 10, "fp8", attention="eager")


def test_counting_leaves_the_config_as_it_was():
    config = CONFIGS["phi3-longrope"]
    before = config.to_json_string(use_diff=False)
    kv_bytes(config, 1, 1, "float16")
    assert config.to_json_string(use_diff=False) == before
    assert config.rope_parameters["rope_type"] == "longrope"
