"""Which part of an exception says that memory ran out, of what arose in the recorded block."""

import sys
from collections.abc import Container, Iterator
from types import FrameType, TracebackType

from kvlab.memory.oom import diagnose

LONGEST = 1 << 20  # characters of a message that are read; no allocator says as much


def chain(error: BaseException, handled_before: Container[int] = ()) -> Iterator[BaseException]:
    """The exception that leaves a block, those it came from, and those in its groups, each once.

    Python calls the ``__context__`` of an exception whatever was being handled when it was raised, in the block or
    around it. What was handled around it is left out: ``handled_before`` (ids) the block began, or while a generator in
    which the block stands was called or closed. The latter was caught by a frame that is still running, and that no
    exception of the chain has come through.
    """
    running = set(_stack())
    seen: set[int] = set()
    passed: set[FrameType] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        passed |= set(_frames(one.__traceback__))
        waiting += [] if one.__cause__ is None else [one.__cause__]
        context = None if one.__suppress_context__ else one.__context__
        if context is not None and id(context) not in handled_before:
            caught_by = next(_frames(context.__traceback__), None)
            waiting += [] if caught_by in running - passed else [context]
        if isinstance(one, BaseExceptionGroup):  # others may have an attribute of this name too
            waiting += one.exceptions


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """From the frame that caught it to the one that raised it."""
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this one exception says that memory ran out, by its type or by its message."""
    if isinstance(error, MemoryError) or is_from_allocator(error):
        return True
    try:
        text = str(error)
    except BaseException:  # an exception that cannot say what it is
        return False
    return diagnose(f"{type(error).__name__}: {text[:LONGEST]}").is_oom is True


def is_from_allocator(error: BaseException) -> bool:
    """Whether it is of the type that PyTorch's observers are told of beforehand."""
    torch = sys.modules.get("torch")
    return bool(torch) and isinstance(error, torch.OutOfMemoryError)
