"""What a replay says."""

from pydantic import BaseModel, ConfigDict


class ReplayOom(BaseModel):
    """Where a run would have died on a smaller card: the number of the trace event, and PyTorch's message."""

    model_config = ConfigDict(frozen=True)

    event: int
    tried_bytes: int
    message: str


class ReplayResult(BaseModel):
    """How far the model agrees with a recording.

    ``exact`` is True if every address, every cudaMalloc and the final state agree, False if not, and None
    if there is nothing to judge; ``reason`` says why in the last two cases, and what the recording does not show
    where the disagreement may come from that. ``tie_break`` is the rule for equally large blocks under which it was
    judged: it differs between versions of torch (see ``TieBreak``).
    """

    model_config = ConfigDict(frozen=True)

    events: int
    alloc_events: int
    alloc_addresses_matched: int
    segment_allocs: int
    segment_allocs_matched: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    recorded_allocated_bytes: int
    recorded_reserved_bytes: int
    exact: bool | None
    reason: str | None = None
    tie_break: str
    oom: ReplayOom | None = None
