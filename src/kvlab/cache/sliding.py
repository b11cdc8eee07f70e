"""SlidingWindowCache: attention sinks and a ring; exact, constant in bytes, constant work per token."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from .base import BoundedCache
from .errors import PrefillChunkError, UnsupportedModelError
from .masks import IMPLEMENTATIONS, register_masks
from .policy import CachePolicy
from .ring import Ring
from .rotary import find_rotations, position_limit
from .shapes import head_dim, num_key_value_heads
from .steps import ChunkStep

CHUNK_LIMIT_BYTES = 2**30


class RingLayer(CacheLayerMixin):
    """One layer's place in a ring: what transformers talks to."""

    def __init__(self, ring: Ring, index: int, is_sliding: bool, is_compileable: bool):
        super().__init__()
        self.ring, self.index = ring, index
        self.is_sliding, self.is_compileable = is_sliding, is_compileable

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.ring.keys is None:
            self.ring.allocate(key_states, value_states)
        self.is_initialized = True

    @torch.no_grad()
    def update(self, key_states, value_states, *args, **kwargs):
        """Store q new tokens; returns the keys and values (B, H, columns, head_dim) the mask is for."""
        return self.ring.append(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int):
        return query_length, self.ring.offset

    def get_seq_length(self):
        return self.ring.columns if self.ring.traced() else self.ring.columns_seen

    def get_max_length(self) -> int:
        return -1  # evicts, so any length goes through

    def reset(self) -> None:
        if self.index == 0:
            self.ring.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.index == 0 and self.ring.keys is not None:
            self.ring.reorder(beam_idx)


class SlidingWindowCache(BoundedCache):
    """Holds the first ``policy.sinks`` and the last ``policy.window`` tokens of each sequence.

    ``model``: the model the cache is for, whose rotation is probed with two one-token forwards; or a config,
    for shapes without weights.
    ``compileable``: let ``generate`` compile the decode step on CUDA; costs a mask in every step.
    ``chunk_limit_bytes``: a prefill chunk that needs more room than this, beside the held window, is refused.

    Layers with a sliding window of their own that fits into the policy keep it, exactly as the model has it;
    all others follow the policy.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        policy: CachePolicy,
        *,
        compileable: bool = False,
        chunk_limit_bytes: int = CHUNK_LIMIT_BYTES,
    ):
        self.policy = policy
        self.chunk_limit_bytes = chunk_limit_bytes
        self._config = getattr(model, "config", model).get_text_config(decoder=True)
        check_model(model, self._config)
        self._itemsize = (getattr(model, "dtype", None) or torch.float32).itemsize
        kinds, options = get_layer_types_and_kwargs(self._config)
        rotations = find_rotations(model)
        self.rings = {}
        for kind in dict.fromkeys(kinds):
            sinks, window = self._keep(kind, options[kinds.index(kind)])
            self.rings[kind] = Ring(
                sinks,
                window,
                [rotation for rotation, other in zip(rotations, kinds, strict=True) if other == kind],
                turns=policy.rotate_sinks,
                compileable=compileable,
                position_limit=position_limit(self._config),
                check_room=self._check_room,
            )
        register_masks()
        super().__init__(
            layers=[
                RingLayer(
                    self.rings[kind], kinds[:index].count(kind), kind == "sliding_attention", compileable
                )
                for index, kind in enumerate(kinds)
            ]
        )

    def _keep(self, kind: str, options: dict) -> tuple[int, int]:
        """Sinks and window of the layers of one kind: a model's own window stays as it is where it fits."""
        policy, own = self.policy, options.get("sliding_window")
        if kind == "full_attention":
            return policy.sinks, policy.window
        if kind != "sliding_attention":
            raise UnsupportedModelError(
                f"layers of kind {kind!r} do not keep keys and values of single tokens; use the model's own "
                "cache"
            )
        if set(getattr(self._config, "layer_types", None) or [kind]) == {"sliding_attention"}:
            if policy.max_total_tokens > own:
                raise UnsupportedModelError(
                    f"every layer of this model sees {own} tokens and the policy keeps "
                    f"{policy.max_total_tokens}; "
                    f"use max_total_tokens={own} or less"
                )
            return policy.sinks, policy.window
        return (0, own) if own <= policy.max_total_tokens else (policy.sinks, policy.window)

    def _check_room(self, step: ChunkStep, batch: int) -> None:
        needed = self._chunk_bytes(batch, step.q, step.columns)
        if needed <= self.chunk_limit_bytes:
            return
        # one layer's columns and the mask grow with q and q squared: halve until it fits
        q = step.q
        while q > 1 and self._chunk_bytes(batch, q, step.columns_of(q)) > self.chunk_limit_bytes:
            q //= 2
        raise PrefillChunkError(
            f"a chunk of {step.q} tokens needs {needed} bytes beside the window, the limit is "
            f"{self.chunk_limit_bytes}; pass prefill_chunk_size={q} to generate, or feed chunks of {q} tokens"
        )

    def _chunk_bytes(self, batch: int, q: int, columns: int) -> int:
        """Room for one layer's columns, the mask and (eager) the scores of a chunk of q queries."""
        config = self._config
        columns_bytes = 2 * batch * columns * num_key_value_heads(config) * head_dim(config) * self._itemsize
        per_score = 1 + self._itemsize
        if config._attn_implementation == "eager":
            per_score += config.num_attention_heads * (2 * self._itemsize + 4)
        return columns_bytes + batch * q * columns * per_score

    @property
    def _ring(self) -> Ring:
        return self.rings.get("full_attention") or next(iter(self.rings.values()))

    @property
    def tokens_seen(self) -> int:
        return self._ring.columns_seen

    @property
    def tokens_held(self) -> int:
        return self._ring.tokens_held

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())


def check_model(model: PreTrainedModel | PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Raise ``UnsupportedModelError`` for what a window cache cannot serve, with the reason."""
    implementation = config._attn_implementation
    if implementation not in (None, *IMPLEMENTATIONS):
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} takes no mask of ours; "
            "use model.set_attn_implementation('sdpa')"
        )
