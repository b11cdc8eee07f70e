"""Bytes by arithmetic from any transformers config: weights, KV cache, logits, scores; what fits, how far."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Column, Table
from transformers import PretrainedConfig

from kvlab.memory.shape import FootprintError, KVLayer, Shape, shape_of

GIB = 2**30

Dtype = str | torch.dtype
Logits = Literal["last", "all"]
Attention = Literal["sdpa", "eager"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPE_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}

# Bytes per attention score that eager attention holds at once in one layer: the scores, their upcast copy and
# the float32 softmax. In float32 there is no copy (4 + 4); CUDA fuses the upcast of float16 and stays at 8.
EAGER_SCORE_BYTES = {"float32": 8, "float16": 10, "bfloat16": 10}

NOT_COUNTED = [
    "activations of the layer that is running",
    "cuBLAS workspace (8.125 MiB; 32 MiB from compute capability 9)",
    "the allocator's rounding and fragmentation",
]


class Footprint(BaseModel):
    """Bytes of one forward of `query_tokens` that leaves `tokens` tokens of each of `batch` sequences cached.

    `terms` names every addend and sums to `total_bytes`; `formulas` says how each came about.
    """

    batch: int
    tokens: int
    query_tokens: int
    dtype: str
    kv_dtype: str
    attention: str
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    logits_bytes: int
    total_bytes: int
    terms: dict[str, int]
    formulas: dict[str, str]
    not_counted: list[str]


class Plan(Footprint):
    """A footprint held against the bytes that are there: what `kvlab plan` prints.

    `max_tokens` is per sequence at this batch; None if memory sets no limit (every layer has a window).
    """

    usable_bytes: int
    usable_note: str
    fits: bool
    max_tokens: int | None
    max_position_embeddings: int | None
    notes: list[str]

    def render(self) -> RenderableType:
        """The addends, largest first, and the answer, for people."""
        table = Table("term", Column("GiB", justify="right"), "how")
        for name, addend in sorted(self.terms.items(), key=lambda term: -term[1]):
            table.add_row(name, f"{addend / GIB:.3f}", self.formulas[name])
        table.add_section()
        table.add_row("total", f"{self.total_bytes / GIB:.3f}", f"not counted: {'; '.join(self.not_counted)}")
        table.add_row("usable", f"{self.usable_bytes / GIB:.3f}", self.usable_note)
        most = "any length" if self.max_tokens is None else f"{self.max_tokens} tokens"
        answer = "fits" if self.fits else "does not fit"
        reach = f"At batch {self.batch}, {most} per sequence would."
        return Group(table, f"It {answer}. {reach}", *self.notes)


def dtype_name(dtype: Dtype) -> str:
    """`torch.float16`, "torch.float16", "fp16" and "half" all are "float16"; FootprintError if unknown."""
    name = str(dtype).removeprefix("torch.").lower()
    name = DTYPE_ALIASES.get(name, name)
    if name not in ITEM_BYTES:
        raise FootprintError(f"dtype {str(dtype)!r} is not one of {', '.join(ITEM_BYTES)}")
    return name


def item_bytes(dtype: Dtype) -> int:
    """Bytes of one number."""
    return ITEM_BYTES[dtype_name(dtype)]


def weights_bytes(config: PretrainedConfig, dtype: Dtype) -> int:
    """Bytes of every parameter in `dtype`, tied ones once. Exact for weights that are not quantised."""
    return shape_of(config).parameters * item_bytes(dtype)


def buffers_bytes(config: PretrainedConfig, dtype: Dtype) -> int:
    """Bytes of the model's buffers: RoPE frequencies, which stay float32, and the like."""
    return shape_of(config).buffers.bytes_in(item_bytes(dtype))


def kv_bytes(config: PretrainedConfig, batch: int, tokens: int, dtype: Dtype) -> int:
    """Bytes the cache holds for `tokens` tokens of each of `batch` sequences.

    For a plain model this is 2 x layers x KV heads x head_dim x bytes x tokens x batch. Sliding layers count
    as `KVLayer.rows` says. Float32 states of linear attention stay float32 whatever `dtype` is.
    """
    size = item_bytes(dtype)
    return batch * sum(
        layer.rows(tokens) * layer.row_values * size + layer.state.bytes_in(size) for layer in shape_of(config).layers
    )


def kv_bytes_per_token(config: PretrainedConfig, dtype: Dtype, tokens: int = 0) -> int:
    """Bytes that one more token of one sequence adds at `tokens`; a full window adds nothing."""
    return kv_bytes(config, 1, tokens + 1, dtype) - kv_bytes(config, 1, tokens, dtype)


def logits_bytes(
    config: PretrainedConfig, batch: int, dtype: Dtype, query_tokens: int = 1, logits: Logits = "last"
) -> int:
    """Bytes of the logits [batch, positions, vocabulary].

    "last" is what `generate` asks of a model, one position; "all" is what a bare forward computes.
    """
    positions = query_tokens if logits == "all" else 1
    return batch * positions * shape_of(config).vocab_size * item_bytes(dtype)


def score_bytes(config: PretrainedConfig, batch: int, query_tokens: int, tokens: int, dtype: Dtype) -> int:
    """Peak bytes of one layer's eager scores [batch, heads, query_tokens, tokens], softmax included.

    The layers follow one another, so this counts once for the model.
    """
    return _score_term(shape_of(config), batch, query_tokens, tokens, dtype_name(dtype))[1]


def footprint(
    config: PretrainedConfig,
    batch: int,
    tokens: int,
    dtype: Dtype,
    *,
    query_tokens: int = 1,
    logits: Logits = "last",
    attention: Attention = "sdpa",
    kv_dtype: Dtype | None = None,
) -> Footprint:
    """Every addend of a forward of `query_tokens` after which `tokens` tokens per sequence are cached.

    query_tokens: 1 is a decode step, `tokens` a prefill in one go.
    attention: "sdpa" stands for kernels that keep no score matrix (flash, memory-efficient); "eager" adds it.
    kv_dtype: for a cache in another dtype than the weights, fp8 for one.
    """
    if batch < 1 or not 1 <= query_tokens <= tokens:
        raise FootprintError(
            f"batch {batch}, query_tokens {query_tokens}, tokens {tokens}: "
            "need batch >= 1 and 1 <= query_tokens <= tokens"
        )
    dtype, kv_dtype = dtype_name(dtype), dtype_name(kv_dtype or dtype)
    shape = shape_of(config)
    terms = [
        *_weight_terms(shape, item_bytes(dtype)),
        *_kv_terms(shape, batch, tokens, query_tokens, item_bytes(kv_dtype)),
        *_logits_terms(shape, batch, query_tokens if logits == "all" else 1, item_bytes(dtype)),
    ]
    if attention == "eager":
        terms.append(_score_term(shape, batch, query_tokens, tokens, dtype))
    addends = {name: count for name, count, _ in terms}
    return Footprint(
        batch=batch,
        tokens=tokens,
        query_tokens=query_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        weights_bytes=addends["weights"],
        kv_bytes=kv_bytes(config, batch, tokens, kv_dtype),
        kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype, tokens),
        logits_bytes=addends["logits"],
        total_bytes=sum(addends.values()),
        terms=addends,
        formulas={name: formula for name, _, formula in terms},
        not_counted=NOT_COUNTED,
    )


Term = tuple[str, int, str]  # name, bytes, how they came about


def _weight_terms(shape: Shape, size: int) -> list[Term]:
    return [
        ("weights", shape.parameters * size, f"{shape.parameters} parameters x {size} B"),
        ("buffers", shape.buffers.bytes_in(size), "RoPE frequencies and other buffers"),
    ]


def _logits_terms(shape: Shape, batch: int, positions: int, size: int) -> list[Term]:
    """The logits of the forward, and the float32 copy of the last position that `generate` samples from."""
    vocabulary = shape.vocab_size
    formula = f"{batch} x {positions} positions x {vocabulary} x {size} B"
    copied = f"last position, copied by generate: {batch} x {vocabulary} x 4 B"
    return [
        ("logits", batch * positions * vocabulary * size, formula),
        ("last_logits_float32", batch * vocabulary * 4, copied),
    ]


def _score_term(shape: Shape, batch: int, query_tokens: int, tokens: int, dtype: str) -> Term:
    if dtype not in EAGER_SCORE_BYTES:
        raise FootprintError(f"attention does not compute in {dtype}: choose float32, float16 or bfloat16")
    heads, each = shape.num_attention_heads, EAGER_SCORE_BYTES[dtype]
    formula = f"one layer: {batch} x {heads} heads x {query_tokens} x {tokens} x {each} B"
    return "attention_scores", batch * heads * query_tokens * tokens * each, formula


def _kv_terms(shape: Shape, batch: int, tokens: int, query_tokens: int, size: int) -> list[Term]:
    """The cache's addends that are not zero; they add up to `kv_bytes` and what the last chunk pins."""
    growing = [layer for layer in shape.layers if layer.grows]
    sliding = [layer for layer in shape.layers if layer.row_values and not layer.grows]
    windows = "/".join(str(window) for window in sorted({layer.window for layer in sliding}))

    def row_bytes(layer: KVLayer) -> int:
        return layer.rows(tokens) * layer.row_values * size

    def pinned_bytes(layer: KVLayer) -> int:
        return (layer.rows_after_chunk(tokens, query_tokens) - layer.rows(tokens)) * layer.row_values * size

    def term(name: str, layers: list[KVLayer], each: Callable[[KVLayer], int], rows: str) -> Term:
        widths = "/".join(str(width) for width in sorted({layer.row_values for layer in layers}))
        formula = f"{batch} sequences x {len(layers)} layers x {rows} x {widths} numbers x {size} B"
        return name, batch * sum(map(each, layers)), formula

    found = [
        term("kv_full_layers", growing, row_bytes, f"{tokens} rows"),
        term("kv_sliding_layers", sliding, row_bytes, f"min({tokens}, window {windows}) rows"),
        term("kv_pinned_by_last_chunk", sliding, pinned_bytes, "rows beyond the window"),
        (
            "linear_attention_state",
            batch * sum(layer.state.bytes_in(size) for layer in shape.layers),
            f"{batch} sequences x convolution and recurrent state, constant in tokens",
        ),
    ]
    return [entry for entry in found if entry[1]]


def max_tokens(
    config: PretrainedConfig,
    usable_bytes: int,
    batch: int,
    dtype: Dtype,
    *,
    attention: Attention = "sdpa",
    kv_dtype: Dtype | None = None,
) -> int | None:
    """The most tokens per sequence at which a decode step of `batch` sequences stays within `usable_bytes`.

    0 when not even one fits; None when no length fails, because every layer has a window or a fixed state.
    """

    def fits(tokens: int) -> bool:
        need = footprint(config, batch, tokens, dtype, attention=attention, kv_dtype=kv_dtype)
        return need.total_bytes <= usable_bytes

    return _last_that_fits(fits)


def tokens_in(space_bytes: int, config: PretrainedConfig, dtype: Dtype, block_tokens: int = 1) -> int | None:
    """Tokens that a KV space of `space_bytes` holds, in whole blocks of `block_tokens`.

    This is how a paged engine counts its pool: 1 GiB of SmolLM2-135M in bfloat16 and blocks of 128 is 46,592
    tokens, the figure vLLM 0.32 prints. Windows count as for one sequence; None means no limit.
    """

    def fits(blocks: int) -> bool:
        return kv_bytes(config, 1, blocks * block_tokens, dtype) <= space_bytes

    blocks = _last_that_fits(fits)
    return None if blocks is None else blocks * block_tokens


UNLIMITED = 2**48


def _last_that_fits(fits: Callable[[int], bool]) -> int | None:
    """The largest n for which `fits` holds; it turns false once and for good, and 0 is taken to fit."""
    if fits(UNLIMITED):
        return None
    low, high = 0, UNLIMITED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan(
    config: PretrainedConfig,
    batch: int,
    tokens: int,
    dtype: Dtype = "float16",
    *,
    usable_bytes: int,
    usable_note: str = "",
    attention: Attention = "sdpa",
    kv_dtype: Dtype | None = None,
) -> Plan:
    """Does a decode step of `batch` sequences of `tokens` tokens fit, and how far would it go?

    usable_bytes: what PyTorch may fill. usable_note: how that came about, for the record.
    """
    need = footprint(config, batch, tokens, dtype, attention=attention, kv_dtype=kv_dtype)
    return Plan(
        **need.model_dump(),
        usable_bytes=usable_bytes,
        usable_note=usable_note,
        fits=need.total_bytes <= usable_bytes,
        max_tokens=max_tokens(config, usable_bytes, batch, dtype, attention=attention, kv_dtype=kv_dtype),
        max_position_embeddings=shape_of(config).max_position_embeddings,
        notes=_notes(config, need),
    )


def _notes(config: PretrainedConfig, need: Footprint) -> list[str]:
    notes = []
    trained = shape_of(config).max_position_embeddings
    if getattr(config, "quantization_config", None):
        notes.append(f"the config declares quantised weights; they are counted in {need.dtype}")
    if trained and need.tokens > trained:
        notes.append(f"{need.tokens} tokens are more than the {trained} positions the model was trained for")
    return notes
