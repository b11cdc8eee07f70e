"""SlidingWindowCache: attention sinks and a ring; exact, constant in bytes, constant work per token."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .base import BoundedCache
from .errors import PolicyError
from .gradients import without_gradients
from .masks import MaskOffset, register_masks
from .policy import CachePolicy
from .progress import Progress
from .ring import Ring
from .room import ChunkRoom
from .rotary import find_rotations, position_limit
from .supported import check_model, kept_tokens

CHUNK_LIMIT_BYTES = 2**30


class RingLayer(CacheLayerMixin):
    """One layer's place in a ring: what transformers talks to."""

    def __init__(self, ring: Ring, index: int, *, is_first: bool, is_last: bool, is_sliding: bool):
        super().__init__()
        self.ring, self.index = ring, index
        self.offset = MaskOffset(ring)
        self.is_first, self.is_last = is_first, is_last  # of the whole cache
        self.is_sliding, self.is_compileable = is_sliding, ring.compileable

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.ring.keys is None:
            self.ring.allocate(key_states, value_states)
        self.keys, self.values = self.ring.layer_keys[self.index], self.ring.layer_values[self.index]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Store q new tokens; returns the keys and values (B, H, columns, head_dim) the mask is for."""
        with torch.no_grad():
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.ring.check_planned()
            progress = self.ring.progress
            if self.is_first:
                if key_states.shape[2] > 1:
                    progress.check_positions((kwargs.get("kwargs") or {}).get("position_ids"))
                progress.begun = True
            held = self.ring.append(self.index, key_states, value_states)
            if self.is_last:
                progress.finished = True
        return without_gradients(held, key_states)

    def __getstate__(self) -> dict:
        """A copy takes its views from its own ring, at the next token."""
        return vars(self) | {"keys": None, "values": None, "is_initialized": False}

    def get_mask_sizes(self, query_length: int):
        return query_length, self.offset

    def get_seq_length(self):
        return self.ring.columns if self.ring.traced() else self.ring.columns_seen

    def get_max_length(self) -> int:
        return -1  # evicts, so any length goes through

    def reset(self) -> None:
        if self.is_first:
            self.ring.progress.reset()
        if self.index == 0:
            self.ring.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        progress = self.ring.progress
        if self.is_first and progress.is_padded:
            progress.reorder(beam_idx.tolist())
        if self.index == 0 and self.ring.keys is not None:
            self.ring.reorder(beam_idx)


class SlidingWindowCache(BoundedCache):
    """Holds the first ``policy.sinks`` and the last ``policy.window`` tokens of each sequence.

    ``model``: the model the cache is for, whose rotation is probed with two one-token forwards; or a config,
    for shapes without weights.
    ``compileable``: let ``generate`` compile the decode step on CUDA; costs a mask in every step.
    ``chunk_limit_bytes``: a prefill chunk that needs more room than this, beside the held window, is refused.

    A forward that dies before its last layer has stored its keys is noticed by the next one. One that dies later
    (the last attention, the final norm, the logits) has counted its tokens: compare ``tokens_seen`` before you try
    again, or ``reset()``. One cache belongs to one model and one thread; neither is checked.

    Layers with a sliding window of their own that fits into the policy keep it, exactly as the model has it; all
    others follow the policy.

    Padding belongs on the left. The 2-D attention mask is read until every row has begun and not after, as reading it
    would wait for the device in every step.

    A decode step that is compiled or captured together with its mask counts on the device: reading the counters then
    waits for it, until the next step outside.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        policy: CachePolicy,
        *,
        compileable: bool = False,
        chunk_limit_bytes: int = CHUNK_LIMIT_BYTES,
    ):
        if policy.eviction != "ring":
            raise PolicyError(f"SlidingWindowCache needs a policy with eviction='ring', got {policy.eviction!r}")
        check_model(model)
        config = getattr(model, "config", model).get_text_config(decoder=True)
        itemsize = (getattr(model, "dtype", None) or torch.float32).itemsize
        self.policy = policy
        self.room = ChunkRoom.of(config, itemsize, chunk_limit_bytes)
        self.progress = Progress()
        kinds, kept = kept_tokens(config, policy)
        rotations = find_rotations(model)
        self.rings = {
            kind: Ring(
                *kept[kind],
                [rotation for rotation, other in zip(rotations, kinds, strict=True) if other == kind],
                self.progress,
                turns=policy.rotate_sinks,
                dtype=policy.torch_dtype,
                compileable=compileable,
                position_limit=position_limit(config),
                check_room=self.room.check,
            )
            for kind in kept
        }
        register_masks()
        super().__init__(
            layers=[
                RingLayer(
                    self.rings[kind],
                    kinds[:index].count(kind),
                    is_first=index == 0,
                    is_last=index == len(kinds) - 1,
                    is_sliding=kind == "sliding_attention",
                )
                for index, kind in enumerate(kinds)
            ]
        )

    def _croppable_tokens(self) -> int:
        if any(ring.tokens_seen > ring.slots for ring in self.rings.values()):
            return 0
        return self._ring.columns_seen - max(self.progress.pads)

    def _take_back(self, count: int) -> None:
        left = self._ring.columns_seen - count
        if left == 0:
            return self.reset()
        self.progress.adopt(left)
        for ring in self.rings.values():
            ring.columns.fill_(left)

    @property
    def _ring(self) -> Ring:
        return self.rings.get("full_attention") or next(iter(self.rings.values()))

    @property
    def tokens_seen(self) -> int:
        return self._ring.tokens_seen

    @property
    def tokens_held(self) -> int:
        return self._ring.tokens_held

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())
