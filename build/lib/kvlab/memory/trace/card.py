"""Run a recorded trace on a modelled card: how high does memory go, and where does the run die?"""

from pydantic import BaseModel, ConfigDict

from kvlab.memory.allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError, Device
from kvlab.memory.snapshot.records import readable_frames
from kvlab.memory.trace.steps import AllocationTrace, Step


class PhasePeak(BaseModel):
    """The highest memory within one phase of a run, and what was allocated at its end."""

    model_config = ConfigDict(frozen=True)

    phase: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int


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
    oom, done, phase = None, 0, ""
    for done, step in enumerate(trace.steps):
        if step.phase != phase and done:
            peaks.append(_close_phase(allocator, phase))
        phase = step.phase
        try:
            if step.size_bytes:
                addresses[step.storage] = allocator.malloc(step.size_bytes, frames=step.frames)
            else:
                allocator.free(addresses.pop(step.storage))
        except CudaOutOfMemoryError as error:
            oom = _oom(done, step, error)
            break
    peaks.append(_close_phase(allocator, phase))
    outcome = TraceOutcome(
        events=len(trace.steps) if oom is None else done,
        peak_allocated_bytes=max(p.peak_allocated_bytes for p in peaks),
        peak_reserved_bytes=max(p.peak_reserved_bytes for p in peaks),
        phases=tuple(peaks),
        terms={**trace.terms, "other_bytes": device.other_bytes},
        oom=oom,
    )
    return outcome, allocator


def _close_phase(allocator: CachingAllocator, phase: str) -> PhasePeak:
    counters = allocator.stats.all
    peak = PhasePeak(
        phase=phase,
        peak_allocated_bytes=counters.allocated_bytes.peak,
        peak_reserved_bytes=counters.reserved_bytes.peak,
        end_allocated_bytes=counters.allocated_bytes.current,
    )
    allocator.reset_peak_stats()
    return peak


def _oom(number: int, step: Step, error: CudaOutOfMemoryError) -> TraceOom:
    return TraceOom(
        event=number,
        phase=step.phase,
        module=step.module,
        frames=readable_frames(step.frames),
        tried_bytes=error.tried_bytes,
        message=str(error),
    )
