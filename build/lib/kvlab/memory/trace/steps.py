"""A run as the allocator sees it: which storages came into being, how large, when each went, who asked."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """The allocation of a storage (``size_bytes`` above 0) or its free (0), and who asked for it."""

    storage: int
    size_bytes: int
    phase: str
    module: str = ""
    frames: tuple[dict[str, Any], ...] = ()


@dataclass
class AllocationTrace:
    """Everything a run asks of the allocator, in order.

    ``terms`` are bytes that no tensor shows and that were added by name.
    """

    steps: list[Step] = field(default_factory=list)
    terms: dict[str, int] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.phase for step in self.steps))

    def live_bytes(self) -> Iterator[int]:
        """Requested bytes alive after each step."""
        sizes: dict[int, int] = {}
        live = 0
        for step in self.steps:
            if step.size_bytes:
                sizes[step.storage] = step.size_bytes
            live += step.size_bytes or -sizes.pop(step.storage)
            yield live
