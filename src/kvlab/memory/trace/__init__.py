"""A memory trace without a GPU: what a real model allocates at full size, and what a card would say to it."""

from kvlab.memory.trace.card import PhasePeak, TraceOom, TraceOutcome, run_on
from kvlab.memory.trace.record import CUBLAS_WORKSPACE_BYTES, Recorder, capture_generation, record
from kvlab.memory.trace.steps import AllocationTrace, Step

__all__ = [
    "CUBLAS_WORKSPACE_BYTES",
    "AllocationTrace",
    "PhasePeak",
    "Recorder",
    "Step",
    "TraceOom",
    "TraceOutcome",
    "capture_generation",
    "record",
    "run_on",
]
