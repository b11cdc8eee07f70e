"""On an out-of-memory, keep what an engineer will wish they had."""

from kvlab.recorder.flight import FlightRecorder, flight_recorder

__all__ = ["FlightRecorder", "flight_recorder"]
