"""What the front and the engine say to each other: plain data, pickled, over one socket pair."""

from dataclasses import dataclass, field
from typing import Literal

EndReason = Literal["stop", "length", "cancelled", "out_of_memory", "invalid"]


@dataclass(frozen=True)
class Start:
    """Generate up to ``max_tokens`` after ``prompt``, token ids as int32 bytes; ids in ``stop_ids`` end the text."""

    request_id: int
    prompt: bytes
    max_tokens: int
    temperature: float
    seed: int | None
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    """Drop a request at the next step."""

    request_id: int


@dataclass(frozen=True)
class Stop:
    """Finish what is in flight and end."""


Command = Start | Cancel | Stop


@dataclass(frozen=True)
class Ready:
    """The engine serves. ``step_room_bytes`` is what one step may need beside the caches."""

    pid: int
    device: str
    step_room_bytes: int
    bytes_per_token: int


@dataclass(frozen=True)
class Refused:
    """The engine cannot start as asked; a restart would not help."""

    message: str


@dataclass(frozen=True)
class Ended:
    """A request is over and the engine holds nothing for it any more."""

    request_id: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True)
class Status:
    """What the engine holds at this moment. ``evicted_tokens`` counts from the start of the process."""

    held_bytes: int
    kv_tokens: int
    evicted_tokens: int
    cuda: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """What came of one step of each request in flight, or of some of them: tokens, and requests that are over.

    An engine with nothing to do says an empty one from time to time, as a sign of life.
    """

    tokens: list[tuple[int, int]]
    ended: list[Ended]
    status: Status | None
