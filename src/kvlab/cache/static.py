"""StaticKVCache: one fixed buffer per layer, allocated whole, as in the incident."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .base import BoundedCache
from .errors import BatchChangedError, CapacityError, PolicyError, TornForwardError
from .gradients import without_gradients
from .shapes import head_dim, num_key_value_heads


class StaticKVLayer(CacheLayerMixin):
    """Keys and values of one layer: two buffers (B, num_key_value_heads, max_total_tokens, head_dim)."""

    is_sliding = False
    is_croppable = True

    def __init__(self, max_total_tokens: int):
        super().__init__()
        self.max_total_tokens = max_total_tokens
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        with torch.inference_mode(False):  # or a later step outside inference mode could not write to it
            return states.new_zeros((batch, heads, self.max_total_tokens, dim))

    def update(self, key_states, value_states, *args, **kwargs):
        """Write q tokens behind the last one; returns views of the ``seen + q`` tokens held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.keys.shape[0]:
            raise BatchChangedError(
                f"allocated for batch {self.keys.shape[0]}, got {key_states.shape[0]}; make a new cache"
            )
        end = self.seen + key_states.shape[-2]
        if end > self.max_total_tokens:
            raise CapacityError(
                f"the buffer holds {self.max_total_tokens} tokens, {self.seen} are stored and {key_states.shape[-2]} "
                f"more do not fit; allocate at least {end}"
            )
        with torch.no_grad():
            self.keys[:, :, self.seen : end].copy_(key_states)
            self.values[:, :, self.seen : end].copy_(value_states)
        self.seen = end
        return without_gradients((self.keys[:, :, :end], self.values[:, :, :end]), key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.max_total_tokens

    def reset(self) -> None:
        self.seen = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.seen:
            index = beam_idx.to(self.keys.device)
            self.keys.copy_(self.keys.index_select(0, index))
            self.values.copy_(self.values.index_select(0, index))


class StaticKVCache(BoundedCache):
    """One buffer of ``max_total_tokens`` rows per layer, for keys and for values, whether used or not.

    ``model``: the model, or its config for a shape without weights.
    With ``batch_size`` the buffers are allocated now, keys then values, layer by layer, on ``device`` in
    ``dtype`` (default: the model's); without it each layer allocates at its first token.
    Appending beyond ``max_total_tokens`` raises ``CapacityError``.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        max_total_tokens: int,
        batch_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        config = getattr(model, "config", model).get_text_config(decoder=True)
        if max_total_tokens < 1:
            raise PolicyError(f"max_total_tokens must be at least 1, got {max_total_tokens}")
        super().__init__(layers=[StaticKVLayer(max_total_tokens) for _ in range(config.num_hidden_layers)])
        if batch_size is not None:
            self.early_initialization(
                batch_size,
                num_key_value_heads(config),
                head_dim(config),
                dtype or getattr(model, "dtype", None) or torch.float32,
                torch.device(device or getattr(model, "device", "cpu")),
            )

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 0 and self.layers[-1].seen != self.layers[0].seen:
            raise TornForwardError(
                f"the forward after {self.layers[-1].seen} tokens died before every layer had stored its keys: "
                "reset() and run the text again"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _croppable_tokens(self) -> int:
        return self.layers[0].seen

    def _take_back(self, count: int) -> None:
        for layer in self.layers:
            layer.seen -= count

    def activate_past_recording(self) -> None:
        """Nothing to do: what is stored is never overwritten, so assisted decoding can always go back."""

    @property
    def tokens_seen(self) -> int:
        return self.layers[0].seen

    @property
    def tokens_held(self) -> int:
        return self.layers[0].seen

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
