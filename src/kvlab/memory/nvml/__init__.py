"""Sample a GPU through NVML, or a process through /proc, while something runs; keep, read and draw the samples."""

from kvlab.memory.nvml.cards import GpuSource
from kvlab.memory.nvml.figure import memory_figure
from kvlab.memory.nvml.file import Recording, SampleFileError, read_samples
from kvlab.memory.nvml.process import ProcessSource, reset_peak
from kvlab.memory.nvml.readings import (
    CardReading,
    Mark,
    NoDriver,
    Notice,
    NvmlError,
    ProcessReading,
    ProcessUnreadable,
    ProcessUse,
    Sample,
    UnknownCard,
)
from kvlab.memory.nvml.sampler import (
    LONGEST_INTERVAL_S,
    SHORTEST_INTERVAL_S,
    IntervalError,
    Sampler,
    Sources,
    StopRequest,
    follow,
    sources_here,
)

__all__ = [
    "LONGEST_INTERVAL_S",
    "SHORTEST_INTERVAL_S",
    "CardReading",
    "GpuSource",
    "IntervalError",
    "Mark",
    "NoDriver",
    "Notice",
    "NvmlError",
    "ProcessReading",
    "ProcessSource",
    "ProcessUnreadable",
    "ProcessUse",
    "Recording",
    "Sample",
    "SampleFileError",
    "Sampler",
    "Sources",
    "StopRequest",
    "UnknownCard",
    "follow",
    "memory_figure",
    "read_samples",
    "reset_peak",
    "sources_here",
]
