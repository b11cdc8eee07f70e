"""Record which memory a program asks for, on fake tensors (no GPU, no weights, full size) or on real ones.

A fake tensor has a shape but no data. Every storage that comes into being is an allocation and its
finalizer is the free, so both stand in the order of a real run.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab.memory.trace.steps import AllocationTrace, Step

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""PyTorch's default cuBLAS workspace (``:4096:2:16:8``); 32 MiB on compute capability 9.0 and newer.
Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``."""

_TORCH_FOLDER = str(Path(torch.__file__).parent)
_USES_CUBLAS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})


@contextmanager
def record(*, fake: bool = True, cublas_workspace_bytes: int = 0) -> Iterator["Recorder"]:
    """Record all allocations within the block; the trace is ``recorder.trace``.

    Set ``recorder.phase`` to name what follows. Fake tensors are CPU tensors, where SDPA takes the flash
    kernel (its output and one float32 row of log sums), the nearest to flash attention on CUDA; reading a
    value back to the host fails. Not seen: what a kernel needs inside itself, and the cuBLAS workspace,
    which is therefore added as a term at the first matrix product.
    """
    trace = AllocationTrace(terms={"cublas_workspace_bytes": cublas_workspace_bytes})
    recorder = Recorder(trace)
    with FakeTensorMode() if fake else nullcontext(), recorder:
        try:
            yield recorder
        finally:
            recorder.close()


def capture_generation(
    config: "PretrainedConfig",
    make_cache: "Callable[[PreTrainedModel], Cache]",
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int = 1,
    prefill_chunk_size: int | None = None,
    dtype: torch.dtype = torch.float16,
    attn_implementation: str = "sdpa",
    cublas_workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> AllocationTrace:
    """What generating ``new_tokens`` after ``prompt_tokens`` allocates, at full size and without weights.

    All ``batch_size`` sequences are equally long. ``make_cache`` gets the model and runs on fake tensors
    too. The prompt is fed at once, or ``prefill_chunk_size`` tokens at a time. Phases are "weights",
    "cache", "prefill", "decode 2", ...: the prefill yields the first new token.
    ``attn_implementation="eager"`` materialises the scores; in float16 it counts one float32 copy of them
    more than CUDA makes.
    """
    from transformers import AutoModelForCausalLM

    with (
        record(cublas_workspace_bytes=cublas_workspace_bytes) as recorder,
        torch.no_grad(),
        _default_dtype(dtype),
    ):
        recorder.phase = "weights"
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        recorder.name_modules(model.eval())
        recorder.phase = "cache"
        cache = make_cache(model)
        recorder.phase = "prefill"
        prompt = torch.zeros(batch_size, prompt_tokens, dtype=torch.long)
        for tokens in prompt.split(prefill_chunk_size or prompt_tokens, dim=1):
            next_tokens = _next_tokens(model, tokens, cache)
        for number in range(2, new_tokens + 1):
            recorder.phase = f"decode {number}"
            next_tokens = _next_tokens(model, next_tokens, cache)
    return recorder.trace


def _next_tokens(model: "PreTrainedModel", tokens: torch.Tensor, cache: "Cache") -> torch.Tensor:
    logits = model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build in ``dtype``: a module of fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Recorder(TorchDispatchMode):
    """Notes each new storage and its end, with the phase and the module that is running."""

    def __init__(self, trace: AllocationTrace) -> None:
        super().__init__()
        self.trace = trace
        self.phase = ""
        self._alive: set[int] = set()
        self._next = 0
        self._modules: list[str] = []
        self._hooks: list[Any] = []
        self._workspace_due = trace.terms["cublas_workspace_bytes"]
        self._open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self._workspace_due and func.overloadpacket.__name__ in _USES_CUBLAS:
            self._allocate(self._workspace_due)
            self._workspace_due = 0
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def name_modules(self, model: torch.nn.Module) -> None:
        """Let allocations carry the name of the innermost module that is running."""
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, n=name: self._modules.append(n)))
            self._hooks.append(module.register_forward_hook(self._leave))

    def close(self) -> None:
        """Stop: what dies from now on belongs to the end of the recording, not to the run."""
        self._open = False
        for hook in self._hooks:
            hook.remove()

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive and storage.nbytes():
            self._alive.add(key)
            weakref.finalize(storage, self._free, key, self._allocate(storage.nbytes())).atexit = False

    def _allocate(self, size_bytes: int) -> int:
        self._next += 1
        self.trace.steps.append(Step(self._next, size_bytes, self.phase, self._module(), _frames()))
        return self._next

    def _free(self, key: int, number: int) -> None:
        self._alive.discard(key)
        if self._open:
            self.trace.steps.append(Step(number, 0, self.phase, self._module()))

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""


def _frames(depth: int = 4) -> tuple[dict[str, Any], ...]:
    """The innermost calls outside PyTorch and this recorder, in the form a snapshot writes them."""
    found: list[dict[str, Any]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        filename = frame.f_code.co_filename
        if filename != __file__ and not filename.startswith(_TORCH_FOLDER):
            found.append({"filename": filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back
    return tuple(found)
