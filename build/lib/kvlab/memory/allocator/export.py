"""What the model shows of itself: PyTorch's snapshot dictionary and PyTorch's own memory summary table."""

from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvlab.memory.allocator.pool import ALLOCATED, FREE, PENDING, Block

if TYPE_CHECKING:
    from kvlab.memory.allocator.core import CachingAllocator

_STATE_NAMES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}


def memory_summary(allocator: "CachingAllocator", *, abbreviated: bool = False) -> str:
    """The table of ``torch.cuda.memory_summary``, printed by PyTorch's own function from the model's
    counters."""
    from torch.cuda import memory

    original = memory.memory_summary
    names = original.__globals__ | {
        "memory_stats": lambda device: allocator.memory_stats(),
        "_get_device_index": lambda device, optional: allocator.device.index,
    }
    summary = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    return summary(abbreviated=abbreviated)


def export_snapshot(allocator: "CachingAllocator") -> dict[str, Any]:
    """The dictionary of ``torch.cuda.memory._snapshot`` (``torch/csrc/cuda/memory_snapshot.cpp``)."""
    device = allocator.device.index
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device + 1)]
    traces[device] = [_event(number, *entry) for number, entry in enumerate(allocator.history)]
    return {
        "segments": [_segment(run, device) for run in segment_runs(allocator)],
        "device_traces": traces,
        "allocator_settings": allocator.settings.as_snapshot(),
        "external_annotations": [],
    }


def segment_runs(allocator: "CachingAllocator") -> list[list[Block]]:
    """Each segment as its blocks in order, by address; an expandable one as one entry for each mapped run."""
    heads = [b for b in allocator.blocks() if b.mapped and (b.prev is None or not b.prev.mapped)]
    return [_run(head) for head in sorted(heads, key=lambda b: b.address)]


def _run(block: Block | None) -> list[Block]:
    blocks = []
    while block is not None and block.mapped:
        blocks.append(block)
        block = block.next
    return blocks


def _segment(blocks: list[Block], device: int) -> dict[str, Any]:
    head = blocks[0]
    active = [b for b in blocks if b.state != FREE]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(b.size for b in blocks),
        "allocated_size": sum(b.size for b in blocks if b.state == ALLOCATED),
        "active_size": sum(b.size for b in active),
        "requested_size": sum(b.requested for b in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": head.pool.id,
        "is_expandable": head.expandable is not None,
        "frames": [],
        "blocks": [
            {
                "address": b.address,
                "size": b.size,
                "requested_size": b.requested,
                "state": _STATE_NAMES[b.state],
                "frames": list(b.frames),
            }
            for b in blocks
        ],
    }


def _event(
    number: int, action: str, address: int, size: int, stream: int, pool_id: tuple[int, int], frames: Any
) -> dict[str, Any]:
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": stream,
        "pool_id": pool_id,
        "time_us": number,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": list(frames),
    }
