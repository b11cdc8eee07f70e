"""How many bytes one step needs beside the caches, measured before there is a limit."""

import mmap
import re
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from .messages import Start
from .sequence import Sequence, make_cache
from .settings import EngineSettings

MARGIN = 1.25
SMALL_OBJECTS_BYTES = 2**21  # what objects too small for a mapping of their own leave on the heap


def step_room_bytes(model: PreTrainedModel, settings: EngineSettings, longest_rows: int) -> int:
    """The most that a step holds beside its cache, at the longest text: a chunk of the prompt, and one token.

    A margin of a quarter is added, as kernels differ a little between lengths, and room for small objects. Each
    step runs twice, so that what is made once (threads, packed weights) is neither counted here nor made later,
    under the budget.
    """
    chunk = settings.prefill_chunk
    sequence = _long_sequence(model, settings, max(longest_rows, chunk), 4 * chunk)
    peaks = []
    for q in (chunk, chunk, 1, 1):
        sequence.waiting = torch.zeros(q, dtype=torch.int32)
        peaks.append(peak_bytes(model.device, sequence.step))
    return round(MARGIN * max(peaks[1], peaks[3])) + SMALL_OBJECTS_BYTES


def _long_sequence(model: PreTrainedModel, settings: EngineSettings, tokens: int, more: int) -> Sequence:
    """A request whose cache holds so many tokens, and has room for some more; no forward was needed for them."""
    sequence = Sequence(model, settings, Start(0, bytes(4), tokens + more, 1.0, None, ()))
    sequence.cache = make_cache(model, settings, sequence.request_tokens)
    at_once = settings.prefill_chunk if settings.policy == "sliding" else tokens
    for done in range(0, tokens, at_once):
        _fill(model, sequence.cache, min(at_once, tokens - done))
    return sequence


@torch.inference_mode()
def _fill(model: PreTrainedModel, cache, q: int) -> None:
    """Let q tokens of zeros through the cache as a forward would: one mask, and an update in every layer."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = torch.zeros(1, config.num_key_value_heads, q, dim, dtype=model.dtype, device=model.device)
    create_causal_mask(config, states.new_empty(1, q, 0), None, cache)
    for layer in range(config.num_hidden_layers):
        cache.update(states, states, layer)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """The most bytes held at once while ``run`` runs, above what was held before it.

    cuda: the allocator's own peak. cpu: the kernel's: VmPeak, the highest VmSize there ever was (proc(5)). Address
    space that cannot be touched, and costs nothing, first lifts VmSize to VmPeak, so that any rise shows.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    size, peak = _vm_bytes()
    with mmap.mmap(-1, peak - size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0):
        before = _vm_bytes()[0]
        run()
        return _vm_bytes()[1] - before


def _vm_bytes() -> tuple[int, int]:
    """VmSize and VmPeak of this process."""
    status = Path("/proc/self/status").read_text()
    size, peak = (1024 * int(re.search(rf"^{key}:\s+(\d+) kB", status, re.M)[1]) for key in ("VmSize", "VmPeak"))
    return size, peak
