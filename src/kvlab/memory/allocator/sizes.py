"""The sizes the CUDA caching allocator thinks in: how it rounds requests, sizes segments and prints bytes.

Source: ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
SEGMENT_GRAIN_BYTES = 2 * MIB


def round_size(requested_bytes: int, divisions: int = 0) -> int:
    """The block size a request needs (``round_size``): a multiple of 512 B, or a part of a power of two.

    ``divisions`` is the number of steps between two powers of two (``roundup_power2_divisions``); 0 or 1 is
    off.
    """
    if requested_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
        return _round_to_division(requested_bytes, divisions)
    return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _round_to_division(size: int, divisions: int) -> int:
    """``size`` rounded up to a step of its power of two (``roundup_power2_next_division``)."""
    power = 1 << (size.bit_length() - 1)
    step = power >> (divisions.bit_length() - 1)
    return -(-size // step) * step


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """The bytes one cudaMalloc asks for to serve a block of ``block_bytes`` (``get_allocation_size``).

    This, not the tensor, is what an out-of-memory message prints as "Tried to allocate".
    """
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return large_segment_bytes
    return -(-block_bytes // SEGMENT_GRAIN_BYTES) * SEGMENT_GRAIN_BYTES


def format_size(size_bytes: int) -> str:
    """Bytes as PyTorch's messages print them (``format_size`` in ``c10/core/CachingDeviceAllocator.cpp``)."""
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"
