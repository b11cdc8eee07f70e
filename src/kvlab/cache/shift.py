"""ShiftingKVCache: evict by moving what stays to the front, per token or in bursts, never overlapping."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from .base import BoundedCache
from .errors import BatchChangedError, PolicyError, UnsupportedModelError, UnsupportedOperationError
from .gradients import without_gradients
from .masks import MaskOffset, MaskRequest, register_masks
from .policy import CachePolicy, check_dtype
from .progress import Progress
from .supported import check_model


class ShiftPlan:
    """What each token sees under water marks, and which columns have to stay; one for all layers.

    When ``high`` tokens of a row are held, its next token first drops the oldest until ``low`` are left:
    token p sees those from ``dropped(p)`` on, whatever the chunks.
    """

    def __init__(self, high: int, low: int):
        self.high, self.low = high, low
        self.progress = Progress()
        self.reset()

    def reset(self) -> None:
        self.progress.reset()
        self.front = 0  # the column in the first row of the buffers
        self.dropping = 0  # columns that the planned step drops
        self.planned = False

    def dropped(self, position):
        """Tokens dropped before token ``position`` of a row is stored, negative for none; ints or tensors."""
        burst = self.high - self.low
        return ((position - self.high) // burst + 1) * burst

    def build_mask(self, request: MaskRequest) -> torch.Tensor | None:
        progress, q = self.progress, request.query_length
        self.front += self.dropping if progress.finished else 0
        self.dropping = 0
        progress.plan(q, request.attention_mask)
        self.planned = True
        end = progress.seen + q
        oldest = min(pads + max(0, self.dropped(end - 1 - pads)) for pads in progress.pads)
        if q == 1:  # a token that is still padding in every row stays until the next one
            oldest = min(oldest, progress.seen)
        self.dropping = max(0, oldest - self.front)
        if progress.seen == 0 and self.dropping == 0 and q <= self.high:
            return request.stock(q)
        if q == 1 and not progress.is_padded and not request.need_mask:
            return None
        return self._mask(self.front + (self.dropping if q == 1 else 0), request.device)

    def _mask(self, first: int, device) -> torch.Tensor:
        """(b, 1, q, columns) for the columns from ``first`` on; pads see at least themselves."""
        progress = self.progress
        pads = torch.tensor(progress.pads, device=device)[:, None, None]
        column = torch.arange(first, progress.seen + progress.planned, device=device)
        query = torch.arange(progress.seen, progress.seen + progress.planned, device=device)[:, None]
        oldest = self.dropped(query - pads).clamp(min=0) + pads
        return (((column >= oldest) & (column <= query)) | (column == query))[:, None]


class ShiftingLayer(CacheLayerMixin):
    """Two buffers (B, H, high water mark, head_dim), the oldest token always in their first row."""

    is_sliding = False

    def __init__(self, plan: ShiftPlan, index: int, is_last: bool, is_sliding: bool, dtype: torch.dtype | None):
        super().__init__()
        self.plan, self.index, self.is_last, self.is_sliding = plan, index, is_last, is_sliding
        self.kept_dtype = dtype
        self.offset = MaskOffset(plan)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        check_dtype(self.kept_dtype, key_states.dtype)
        with torch.inference_mode(False):  # or a later step outside inference mode could not write to it
            self.keys, self.values = (
                states.new_zeros((*states.shape[:2], self.plan.high, states.shape[-1]))
                for states in (key_states, value_states)
            )
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Store q new tokens; returns the keys and values (B, H, columns, head_dim) the mask is for."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.keys.shape[0]:
            raise BatchChangedError(
                f"allocated for batch {self.keys.shape[0]}, got {key_states.shape[0]}; make a new cache"
            )
        if not self.plan.planned:
            raise UnsupportedOperationError(
                "no mask was asked for before this forward: pass the 2-D attention mask, with eager or SDPA attention"
            )
        if self.index == 0:
            if key_states.shape[2] > 1:
                self.plan.progress.check_positions((kwargs.get("kwargs") or {}).get("position_ids"))
            self.plan.progress.begun = True
        with torch.no_grad():
            held = self._append(self.keys, key_states), self._append(self.values, value_states)
        if self.is_last:
            self.plan.progress.finished = True
            self.plan.planned = False
        return without_gradients(held, key_states)

    def _append(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        plan, q = self.plan, states.shape[2]
        held = plan.progress.seen - plan.front
        if q > 1:
            everything = torch.cat([buffer[:, :, :held], states], dim=2)
            newest = everything[:, :, plan.dropping :]
            buffer[:, :, : newest.shape[2]].copy_(newest)
            return everything
        kept = held - plan.dropping
        if plan.dropping:
            # source and target overlap, and copy_ does not say in which order it goes
            buffer[:, :, :kept].copy_(buffer[:, :, plan.dropping : held].clone())
        buffer[:, :, kept : kept + 1].copy_(states)
        return buffer[:, :, : kept + 1]

    def get_mask_sizes(self, query_length: int):
        return query_length, self.offset

    def get_seq_length(self) -> int:
        return self.plan.progress.columns

    def get_max_length(self) -> int:
        return -1  # evicts, so any length goes through

    def reset(self) -> None:
        if self.index == 0:
            self.plan.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if not self.is_initialized:
            return
        if self.index == 0:
            self.plan.progress.reorder(beam_idx.tolist())
        for buffer in (self.keys, self.values):
            buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))


class ShiftingKVCache(BoundedCache):
    """Holds the last tokens of each sequence in a fixed buffer and moves them to the front to evict.

    ``policy``: ``CachePolicy(eviction="shift", …)``; with the default water marks every token moves the whole
    window. Keys keep the rotation they were computed with, as only distances matter; there are no sinks.
    """

    def __init__(self, model: PreTrainedModel | PreTrainedConfig, policy: CachePolicy):
        if policy.eviction != "shift":
            raise PolicyError(f"ShiftingKVCache needs a policy with eviction='shift', got {policy.eviction!r}")
        check_model(model)
        config = getattr(model, "config", model).get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(config)
        if len(set(kinds)) > 1:
            raise UnsupportedModelError(f"layers of kinds {sorted(set(kinds))} do not evict together")
        own = options[0].get("sliding_window")
        if own is not None and policy.high_water > own:
            raise UnsupportedModelError(f"every layer of this model sees {own} tokens; use high_water={own} or less")
        self.policy = policy
        self.plan = ShiftPlan(policy.high_water, policy.low_water)
        register_masks()
        last = len(kinds) - 1
        super().__init__(
            layers=[
                ShiftingLayer(self.plan, index, index == last, own is not None, policy.torch_dtype)
                for index in range(len(kinds))
            ]
        )

    def _croppable_tokens(self) -> int:
        return 0 if self.tokens_evicted else self.plan.progress.shortest

    def _take_back(self, count: int) -> None:
        left = self.plan.progress.columns - count
        self.plan.progress.adopt(left) if left else self.reset()

    @property
    def tokens_seen(self) -> int:
        return self.plan.progress.tokens_seen

    @property
    def tokens_held(self) -> int:
        plan = self.plan
        front = plan.front + (plan.dropping if plan.progress.finished else 0)
        return plan.progress.columns - max(front, min(plan.progress.pads))

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
