"""Run a recording's requests on a card of another size: would it have fitted, where would it have died?"""

from kvlab.memory.allocator.core import CachingAllocator, InvalidPointerError
from kvlab.memory.allocator.device import Device
from kvlab.memory.allocator.messages import CudaOutOfMemoryError
from kvlab.memory.allocator.pool import Block
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.allocator.sizes import format_size
from kvlab.memory.replay.compare import Recording
from kvlab.memory.replay.held import InitialState
from kvlab.memory.replay.restore import restore
from kvlab.memory.replay.result import ReplayOom

_BEYOND_RECORDED_ADDRESSES = 1 << 64


def run_on_card(
    recording: Recording, initial: InitialState, settings: AllocatorSettings, gpu_memory_bytes: int
) -> ReplayOom | None:
    """The first out-of-memory of the run on a card where PyTorch may reserve ``gpu_memory_bytes``, or None.

    The recording says what is asked for, freed and used on which stream; when to grow, to flush and to
    retry is the model's decision. A recorded run of cudaFrees counts as the program's ``empty_cache``. A
    request that the recorded card refused (``oom``) is made here too; if this card serves it, it is given back
    at once, for what the program would have done with it is not in the recording.
    """
    device = Device(total_bytes=gpu_memory_bytes, next_address=_BEYOND_RECORDED_ADDRESSES)
    allocator = CachingAllocator(device, settings)
    waiting = restore(allocator, initial, recording.range_begins(initial, settings))
    for address, block in waiting.items():
        _wait(allocator, address, block)
    if allocator.reserved_bytes > gpu_memory_bytes:
        allocator.empty_cache()
    if allocator.reserved_bytes > gpu_memory_bytes:
        return _dead_on_arrival(allocator.reserved_bytes, gpu_memory_bytes)
    return _run(recording, allocator)


def _run(recording: Recording, allocator: CachingAllocator) -> ReplayOom | None:
    live: dict[int, int] = {}
    events, pool_ids = recording.events, recording.pool_ids()
    for place, event in enumerate(events):
        action, address = event.action, event.address
        if action in ("alloc", "oom"):
            try:
                served = allocator.malloc(event.size, event.stream, pool_id=pool_ids[place])
            except CudaOutOfMemoryError as error:
                return ReplayOom(event=place, tried_bytes=error.tried_bytes, message=str(error))
            if action == "alloc":
                live[address] = served
            else:
                allocator.free(served)
        elif action == "free_requested":
            _request_free(allocator, address, live.pop(address, address))
        elif action == "free_completed":
            allocator.finish(_own_stream(address))
        elif action in ("segment_free", "segment_unmap") and (
            place + 1 == len(events) or events[place + 1].action != action
        ):
            allocator.empty_cache()
    return None


def _request_free(allocator: CachingAllocator, recorded_address: int, address: int) -> None:
    try:
        _wait(allocator, recorded_address, allocator.free_request(address))
    except InvalidPointerError:
        return  # The trace frees what it did not allocate; ``compare`` has reported that.


def _wait(allocator: CachingAllocator, address: int, block: Block) -> None:
    block.stream_uses = {_own_stream(address)}
    allocator.pending.wait(block)


def _own_stream(address: int) -> int:
    """A stream for one free alone, so that it completes when the recording says and not before."""
    return -1 - address


def _dead_on_arrival(reserved_bytes: int, gpu_memory_bytes: int) -> ReplayOom:
    return ReplayOom(
        event=0,
        tried_bytes=reserved_bytes,
        message=(
            f"The recording begins with {format_size(reserved_bytes)} in segments that are in use, more than"
            f" the {format_size(gpu_memory_bytes)} of this card: the run would have died before that."
        ),
    )
