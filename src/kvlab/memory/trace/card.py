"""Run a recorded trace on a modelled card: how high does memory go, and where does the run die?"""

from pydantic import BaseModel, ConfigDict

from kvlab.memory.allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError, Device
from kvlab.memory.snapshot.records import readable_frames
from kvlab.memory.trace.steps import AllocationTrace, Step


class PhasePeak(BaseModel):
    """The highest memory within one phase of a run, and what was allocated at its end."""

    phase: str
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    end_allocated_bytes: int = 0


class TraceOom(BaseModel):
    """Where a run died: the step, what the model was doing, and what PyTorch would have printed."""

    model_config = ConfigDict(frozen=True)

    event: int
    phase: str
    module: str
    frames: tuple[str, ...]
    tried_bytes: int
    message: str


class TraceOutcome(BaseModel):
    """A run on a modelled card: its peaks, phase by phase, the terms added by name, and where it died."""

    model_config = ConfigDict(frozen=True)

    events: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: tuple[PhasePeak, ...]
    terms: dict[str, int]
    oom: TraceOom | None = None


def run_on(
    trace: AllocationTrace, device: Device, settings: AllocatorSettings | None = None
) -> tuple[TraceOutcome, CachingAllocator]:
    """Run a trace to its end or to its out-of-memory; ``events`` is the number of steps that succeeded.

    Returns the outcome and the allocator as the run left it, with its whole history, for ``snapshot()`` and
    ``memory_summary``. Memory outside PyTorch (the CUDA context) belongs into ``device.other_bytes``.
    """
    allocator = CachingAllocator(device, settings, max_history=None)
    addresses: dict[int, int] = {}
    peaks: list[PhasePeak] = []
    oom, done = None, 0
    for done, step in enumerate(trace.steps):
        try:
            if step.size_bytes:
                addresses[step.storage] = allocator.malloc(step.size_bytes, frames=step.frames)
            else:
                allocator.free(addresses.pop(step.storage))
        except CudaOutOfMemoryError as error:
            oom = _oom(done, step, error)
        _note_peak(peaks, step.phase, allocator)
        if oom:
            break
    outcome = TraceOutcome(
        events=len(trace.steps) if oom is None else done,
        peak_allocated_bytes=allocator.stats.all.allocated_bytes.peak,
        peak_reserved_bytes=allocator.stats.all.reserved_bytes.peak,
        phases=tuple(peaks),
        terms={**trace.terms, "other_bytes": device.other_bytes},
        oom=oom,
    )
    return outcome, allocator


def _note_peak(peaks: list[PhasePeak], phase: str, allocator: CachingAllocator) -> None:
    """Take the step just made into the peak of its phase; the allocator's own peaks stay those of the whole run."""
    allocated_bytes = allocator.stats.all.allocated_bytes.current
    reserved_bytes = allocator.stats.all.reserved_bytes.current
    if not peaks or peaks[-1].phase != phase:
        peaks.append(PhasePeak(phase=phase))
    peak = peaks[-1]
    peak.peak_allocated_bytes = max(peak.peak_allocated_bytes, allocated_bytes)
    peak.peak_reserved_bytes = max(peak.peak_reserved_bytes, reserved_bytes)
    peak.end_allocated_bytes = allocated_bytes


def _oom(number: int, step: Step, error: CudaOutOfMemoryError) -> TraceOom:
    return TraceOom(
        event=number,
        phase=step.phase,
        module=step.module,
        frames=readable_frames(step.frames),
        tried_bytes=error.tried_bytes,
        message=str(error),
    )
