"""The ring: S sink slots and W window slots per layer, allocated once; layers that evict together share one.

Token p of a row (pads not counted) lives in slot p if p < S, else in slot S + (p - S) mod W, so what a slot
holds follows from the last p by arithmetic. The mask call of a forward plans the step, the layers then only
execute it.
"""

from collections.abc import Callable

import torch

from .chunk import ChunkStep, FirstStep
from .decode import DecodeStep
from .errors import BatchChangedError, UnsupportedModelError, UnsupportedOperationError
from .masks import MaskRequest
from .policy import check_dtype
from .progress import Progress
from .rotary import Rotation


class Ring:
    """Keys and values of L layers that share S, W and a mask.

    Allocated at the first token, for batch B and H key/value heads: ``keys`` and ``values``
    (L, B, H, S + W, head_dim), and ``sinks`` (L, B, H, S + 1, head_dim): the sink keys as first computed,
    plus a row for the keys that are no sinks. What a step needs of its ring it is handed at each call: held, it
    would close a cycle, and the buffers would outlive their cache until the next collection.
    """

    def __init__(
        self,
        sinks_count: int,
        window: int,
        rotations: list[Rotation | None],
        progress: Progress,
        *,
        turns: bool,
        dtype: torch.dtype | None,
        compileable: bool,
        position_limit: int | None,
        check_room: "Callable[[Ring, ChunkStep, int], None]",
    ):
        self.sinks_count, self.window = sinks_count, window
        self.rotations = rotations
        self.turns = turns and sinks_count > 0 and any(rotations)
        self.dtype = dtype
        self.compileable = compileable
        self.position_limit = position_limit
        self.check_room = check_room
        self.progress = progress
        self.keys: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the text; the buffers stay where they are."""
        self.step: FirstStep | ChunkStep | DecodeStep | None = None
        self.counted_on_device = False  # a compiled or captured step counts where the host does not see it
        if self.keys is not None:
            self.columns.zero_()

    @property
    def slots(self) -> int:
        """S + W."""
        return self.sinks_count + self.window

    @property
    def columns_seen(self) -> int:
        return int(self.columns) if self.counted_on_device else self.progress.columns

    @property
    def tokens_seen(self) -> int:
        """Real tokens of the longest row."""
        return max(self.columns_seen - min(self.progress.pads), 0)

    @property
    def tokens_held(self) -> int:
        return min(self.tokens_seen, self.slots)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes + self.sinks.nbytes

    def traced(self) -> bool:
        """Whether this is inside ``torch.compile`` or a graph capture, where host integers would freeze."""
        if self.keys is None or not self.progress.settled or self.position_limit is not None:
            return False
        return torch.compiler.is_compiling() or (
            self.keys.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )

    def build_mask(self, request: MaskRequest) -> torch.Tensor | None:
        """Plan a step and return its mask (see ``masks.MaskBuilder``)."""
        if request.query_length == 1 and self.traced():
            self.progress.check_whole()
            self.step = self.decode
            self.counted_on_device = True
            return self.decode.prepare(self, filled=None, storing_sinks=True, need_mask=True)
        return self._plan(request)

    @torch.compiler.disable
    @torch.no_grad()
    def _plan(self, request: MaskRequest) -> torch.Tensor | None:
        progress, q = self.progress, request.query_length
        if self.counted_on_device:
            progress.adopt(int(self.columns))
            self.counted_on_device = False
        self.step = None
        progress.plan(q, request.attention_mask)
        self._check_position()
        if progress.seen == 0 and progress.longest <= self.slots:
            self.step = FirstStep(q)
            return request.stock(q)
        if q == 1 and progress.settled and self.keys is not None:
            self.step = self.decode
            return self._plan_token(request.need_mask)
        chunk = ChunkStep(self, q)
        self.check_room(self, chunk, request.batch)
        self.step = chunk
        return chunk.mask(self, request.device)

    def _plan_token(self, need_mask: bool) -> torch.Tensor | None:
        progress = self.progress
        even = not progress.is_padded and not self.compileable
        return self.decode.prepare(
            self,
            filled=min(progress.longest, self.slots) if even else None,
            storing_sinks=self.compileable or progress.seen - max(progress.pads) < self.sinks_count,
            need_mask=need_mask,
        )

    def _check_position(self) -> None:
        columns = self.progress.seen + self.progress.planned
        if self.position_limit is not None and columns > self.position_limit:
            raise UnsupportedModelError(
                f"this model's rotary embedding changes its frequencies after {self.position_limit} tokens and "
                f"{columns} are asked for: held keys would no longer fit. Stay below, or use a fixed RoPE type"
            )

    def check_planned(self) -> None:
        """Raise if no mask was asked for, so the step could not be planned."""
        if self.step is None:
            raise UnsupportedOperationError(
                "no sink-and-window mask was asked for before this forward: a mask of your own (4-D), or attention "
                "other than eager and SDPA? Pass the 2-D mask, and use model.set_attn_implementation('sdpa')"
            )

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        """Store one layer's new tokens (B, H, q, head_dim); returns what its queries attend to."""
        self._check_shape(keys)
        held = self.step.append(self, layer, keys, values)
        if layer == len(self.rotations) - 1:
            self.columns.add_(keys.shape[2])
            self.step = None
        return held

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take all the room this ring will ever use, from the shape of one layer's keys and values."""
        check_dtype(self.dtype, keys.dtype)
        shape = (len(self.rotations), *keys.shape[:2])
        with torch.inference_mode(False):  # else a later step outside inference mode could not write
            # Zeroed, never empty: a NaN left in a masked slot would still poison the sum.
            self.keys = keys.new_zeros((*shape, self.slots, keys.shape[-1]))
            self.values = keys.new_zeros((*shape, self.slots, values.shape[-1]))
            self.sinks = keys.new_zeros((*shape, self.sinks_count + 1, keys.shape[-1]))
            self._view_layers()
            self.columns = torch.zeros((), dtype=torch.long, device=keys.device)
            self.decode = DecodeStep(self)

    def _view_layers(self) -> None:
        """One view a layer: a compiled step must not see the whole, or it would copy it to change a part."""
        self.layer_keys, self.layer_values, self.layer_sinks = (
            list(buffer) for buffer in (self.keys, self.values, self.sinks)
        )

    def __getstate__(self) -> dict:
        """Without the views: pickled, each would come back as a buffer of its own that no step writes to."""
        return {name: value for name, value in vars(self).items() if not name.startswith("layer_")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if self.keys is not None:
            self._view_layers()

    def _check_shape(self, keys: torch.Tensor) -> None:
        _, batch, heads, _, dim = self.keys.shape
        if (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype) != (batch, heads, dim, self.keys.dtype):
            raise BatchChangedError(
                f"allocated for (batch, heads, head_dim) {(batch, heads, dim)} in {self.keys.dtype}, got "
                f"{(keys.shape[0], keys.shape[1], keys.shape[3])} in {keys.dtype}; make a new cache"
            )
        if keys.device != self.keys.device:
            raise UnsupportedModelError(
                f"layers live on {self.keys.device} and {keys.device}; load the model on one device"
            )

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Rows become those of ``beam_idx`` (B,), in place, one layer at a time, after the progress did."""
        index = beam_idx.to(self.keys.device)
        for buffer in (self.keys, self.values, self.sinks):
            for layer in buffer:
                layer.copy_(layer.index_select(0, index))
        self.decode.set_padding(self.progress.pads)
