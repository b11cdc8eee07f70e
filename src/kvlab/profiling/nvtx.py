"""Ranges that name what a program is doing: in Nsight Systems through NVTX, in torch.profiler by record_function.

``with nvtx.range("prefill"):`` costs one comparison where neither listens. NVTX comes with PyTorch's CUDA builds;
a CPU build has none of it, and takes it from NVIDIA's package ``nvtx`` where that is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

try:
    from torch._C import _nvtx

    _push, _pop = _nvtx.rangePushA, _nvtx.rangePop
except ImportError:
    try:
        from nvtx import pop_range as _pop
        from nvtx import push_range as _push
    except ImportError:
        _push = _pop = None

_profiler_enabled = torch._C._autograd._profiler_enabled
_NOTHING = contextlib.nullcontext()


def has_nvtx() -> bool:
    """Whether ranges reach NVTX here, and so Nsight Systems, where the program runs under it."""
    return _push is not None


class _Range:
    """One stretch of work under one name, for as long as the ``with`` statement lasts."""

    __slots__ = ("_name", "_recorded")

    def __init__(self, name: str):
        self._name = name
        self._recorded = torch.profiler.record_function(name) if _profiler_enabled() else None

    def __enter__(self) -> None:
        if _push is not None:
            _push(self._name)
        if self._recorded is not None:
            self._recorded.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(*error)
        if _push is not None:
            _pop()


def range(name: str) -> contextlib.AbstractContextManager[None]:
    """A named range for a ``with`` statement; it ends when an exception leaves it, too.

    Listened to by Nsight Systems where :func:`has_nvtx`, and by ``torch.profiler`` if that was on at the beginning.
    """
    if _push is None and not _profiler_enabled():
        return _NOTHING
    return _Range(name)


@contextlib.contextmanager
def update_ranges(cache: Any) -> Iterator[None]:
    """While inside, every ``cache.update``, which is one layer's append, is a range: ``evict`` or ``append``.

    It is ``evict`` when the cache drops tokens in this forward: when it holds ``tokens_held`` and the new ones make
    more than ``policy.max_total_tokens``. For a ring, dropping the oldest *is* the write of the newest, so the range
    is that write; for a cache that shifts, it holds the move as well. A cache without a policy never evicts.
    Nothing is wrapped if nothing listens at the beginning.
    """
    if _push is None and not _profiler_enabled():
        yield
        return
    plain = cache.update
    policy = getattr(cache, "policy", None)

    def update(key_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        evicts = policy is not None and cache.tokens_held + key_states.shape[2] > policy.max_total_tokens
        with range("evict" if evicts else "append"):
            return plain(key_states, *arguments, **named)

    cache.update = update
    try:
        yield
    finally:
        del cache.update
