"""kvlab: reproduce, read and fix the out-of-memory of a KV cache that meets a long sequence."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.recorder import flight_recorder

__all__ = ["flight_recorder"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the flight recorder when it is first used: ``import kvlab`` loads nothing."""
    if name == "flight_recorder":
        from kvlab.recorder import flight_recorder

        return flight_recorder
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
