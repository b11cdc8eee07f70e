"""The numbers a model's memory follows from, read off the model itself without weights."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvlab.errors import KvlabError

# Layers whose bytes follow from the tensors one short forward leaves in them. Others (compressed layouts of
# single model families) keep more than that, so they are refused instead of guessed.
COUNTABLE_LAYERS = (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Models are built in this dtype: tensors that come out in it follow the model's dtype, others keep their own.
PROBE_DTYPE = torch.bfloat16
PROBE_TOKENS = 3


class FootprintError(KvlabError, ValueError):
    """The bytes of this model or request cannot be computed; the message says why and what to do."""


@dataclass(frozen=True)
class Amount:
    """Numbers that take the model's dtype, and bytes in a dtype of their own (float32 states, for one)."""

    values: int = 0
    fixed_bytes: int = 0

    def bytes_in(self, item_bytes: int) -> int:
        return self.values * item_bytes + self.fixed_bytes


@dataclass(frozen=True)
class KVLayer:
    """What one layer of the cache keeps for one sequence.

    row_values: numbers per token, keys and values together (and indexer keys where a model has them).
    window: rows kept at most; None when the layer grows with every token.
    state: convolution and recurrent state of linear attention, which does not grow.
    """

    row_values: int = 0
    window: int | None = None
    state: Amount = Amount()

    @property
    def grows(self) -> bool:
        return self.row_values > 0 and self.window is None

    def rows(self, tokens: int) -> int:
        """Rows held once `tokens` tokens are cached.

        A sliding layer counts its whole window W. That is what a static cache allocates, and what memory
        holds in a dynamic one after a decode step: its `keys` show W - 1 rows, a view of a storage of W.
        """
        return tokens if self.window is None else min(tokens, self.window)

    def rows_after_chunk(self, tokens: int, query_tokens: int) -> int:
        """Rows held right after a forward of `query_tokens`.

        A dynamic sliding layer keeps a view that pins the W - 1 rows it had and every row of the chunk, until
        the next forward.
        """
        if self.window is None:
            return tokens
        return min(tokens - query_tokens, self.window - 1) + query_tokens


@dataclass(frozen=True)
class Shape:
    """What a model's memory follows from, in numbers and not in bytes, so that any dtype can be applied."""

    parameters: int
    buffers: Amount
    layers: tuple[KVLayer, ...]
    vocab_size: int
    num_attention_heads: int
    max_position_embeddings: int | None


_shapes: dict[tuple[type, str], Shape] = {}


def shape_of(config: PretrainedConfig) -> Shape:
    """Count a model's parameters and see what its layers cache, without weights.

    The model is built on the meta device and reads three tokens there; what that forward leaves in a
    `DynamicCache` says how wide a row is. So grouped-query attention, head_dim, latent attention (MLA),
    sliding, shared, linear and attention-free layers need no table of architectures.
    Raises FootprintError where a model keeps its past elsewhere or in a layout that does not follow from it.
    """
    if not isinstance(config, PretrainedConfig):
        raise FootprintError(f"expected a transformers config, got {type(config).__name__}")
    key = (type(config), config.to_json_string(use_diff=False))
    if key not in _shapes:
        _shapes[key] = _probe(_with_plain_rope(config))
    return _shapes[key]


def _probe(config: PretrainedConfig) -> Shape:
    text_config = config.get_text_config(decoder=True)
    model = _build_on_meta(config)
    cache, vocab_size = _run_on_meta(model, config)
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),  # a tied tensor appears once
        buffers=_amount(model.buffers()),
        layers=tuple(_kv_layer(index, layer, config.model_type) for index, layer in enumerate(cache.layers)),
        vocab_size=vocab_size,
        num_attention_heads=max(
            getattr(layer, "num_attention_heads", None) or 0 for layer in text_config.per_layer_config
        ),
        max_position_embeddings=getattr(text_config, "max_position_embeddings", None),
    )


def _with_plain_rope(config: PretrainedConfig) -> PretrainedConfig:
    """A copy whose RoPE does not depend on the length.

    Dynamic types read the positions' values, and meta tensors have none; scaling them changes no shape.
    """
    config = copy.deepcopy(config)
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    per_layer_type = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in per_layer_type or [parameters]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"
    return config


def _build_on_meta(config: PretrainedConfig) -> torch.nn.Module:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            break
    else:
        raise FootprintError(f"model type {config.model_type!r} is no causal language model of transformers")
    try:
        with torch.device("meta"):
            return auto.from_config(config, dtype=PROBE_DTYPE, attn_implementation="eager").eval()
    except Exception as error:  # a model's own code may raise anything on a config it cannot use
        raise FootprintError(f"no {config.model_type} model follows from this config: {_line(error)}") from error


def _run_on_meta(model: torch.nn.Module, config: PretrainedConfig) -> tuple[DynamicCache, int]:
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device="meta")
    try:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            logits = model(input_ids=tokens, cache=cache, use_cache=True).logits
    except Exception as error:  # as above
        raise FootprintError(
            f"the cache of a {config.model_type} model cannot be sized without weights: {_line(error)}"
        ) from error
    return cache, logits.shape[-1]


def _kv_layer(index: int, layer: Any, model_type: str) -> KVLayer:
    kind = type(layer).__name__
    where = f"layer {index} of {model_type}"
    if type(layer) not in COUNTABLE_LAYERS:
        raise FootprintError(f"{where} caches in a {kind}, whose bytes do not follow from one row")
    row_values = _row_values(layer)
    state = _amount(_states(layer))
    if not isinstance(layer, DummyLayer) and not row_values and state == Amount():
        raise FootprintError(f"{where} left its {kind} empty: this model keeps its past outside the cache")
    window = getattr(layer, "sliding_window", None)
    if row_values and window is None and layer.keys.shape[-2] != PROBE_TOKENS:
        raise FootprintError(f"{where} caches {layer.keys.shape[-2]} rows for {PROBE_TOKENS} tokens")
    return KVLayer(row_values, window, state)


def _row_values(layer: Any) -> int:
    """Numbers per token of keys and values [1, heads, tokens, head_dim] and indexer keys [1, tokens, dim]."""
    tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    return sum(t.shape[1] * t.shape[3] if t.dim() == 4 else t.shape[2] for t in tensors if t is not None)


def _states(layer: Any) -> list[torch.Tensor]:
    by_index = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    return [state for states in by_index for state in states.values() if state is not None]


def _amount(tensors: Any) -> Amount:
    tensors = list(tensors)
    return Amount(
        values=sum(t.numel() for t in tensors if t.dtype == PROBE_DTYPE),
        fixed_bytes=sum(t.numel() * t.element_size() for t in tensors if t.dtype != PROBE_DTYPE),
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
