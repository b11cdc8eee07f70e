"""The CUDA caching allocator as an exact model, with the memory of a card below it and no GPU."""

from kvlab.memory.allocator.core import CachingAllocator, InvalidPointerError
from kvlab.memory.allocator.device import Device, GpuProcess
from kvlab.memory.allocator.export import memory_summary
from kvlab.memory.allocator.messages import AbsurdRequestError, CudaOutOfMemoryError
from kvlab.memory.allocator.settings import AllocatorSettings, SettingError

__all__ = [
    "AbsurdRequestError",
    "AllocatorSettings",
    "CachingAllocator",
    "CudaOutOfMemoryError",
    "Device",
    "GpuProcess",
    "InvalidPointerError",
    "SettingError",
    "memory_summary",
]
