"""Read the out-of-memory messages of many engines: what was asked, what was there, why, what to do next."""

from kvlab.memory.oom.model import Cause, Diagnosis, Event, Family
from kvlab.memory.oom.reader import diagnose, diagnose_exception, diagnose_file, diagnose_stream
from kvlab.memory.oom.render import render

__all__ = [
    "Cause",
    "Diagnosis",
    "Event",
    "Family",
    "diagnose",
    "diagnose_exception",
    "diagnose_file",
    "diagnose_stream",
    "render",
]
