"""Read a text, a file or a live exception into a diagnosis."""

import io
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from kvlab.memory.oom.advice import POOL_SETTINGS, advice_for
from kvlab.memory.oom.causes import cause_of
from kvlab.memory.oom.model import Diagnosis, Event
from kvlab.memory.oom.scan import Found, failures
from kvlab.memory.oom.text import blocks

MAX_EVENTS = 1000
FOLLOW_LINES = 40


@dataclass
class Findings:
    """What a whole text held. pool_of: an engine named in it that takes most of the device at start."""

    found: list[Found] = field(default_factory=list)
    truncated: bool = False
    pool_of: str | None = None


def diagnose(text: str) -> Diagnosis:
    """Read a message or a whole log. Never fails on any text; without a failure in it, `events` is empty."""
    return diagnose_stream(io.StringIO(text, newline=None))


def diagnose_stream(stream: TextIO) -> Diagnosis:
    """Read a text of any length, standard input for one, in bounded memory."""
    return _judge(_read(stream))


def diagnose_file(path: str | Path) -> Diagnosis:
    """Read a log file, UTF-8 or (with its mark, as PowerShell writes it) UTF-16; other bytes are replaced."""
    with open(path, "rb") as file:
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    with open(path, encoding=encoding, errors="replace", newline=None) as stream:
        return diagnose_stream(stream)


def diagnose_exception(error: BaseException) -> Diagnosis:
    """Read a live exception with its causes, innermost first, as its traceback prints them."""
    return diagnose("".join(traceback.format_exception(error)))


def _read(stream: TextIO) -> Findings:
    findings = Findings()
    for block in blocks(stream):
        if not findings.pool_of:
            findings.pool_of = next((name for name in POOL_SETTINGS if name in block.squeezed), None)
        for found in failures(block):
            if len(findings.found) == MAX_EVENTS:
                findings.truncated = True
                return findings
            last = findings.found[-1] if findings.found else None
            if last and _belongs_to(found, last):
                continue
            if last and _was_announced(found, last):
                findings.found.pop()
            findings.found.append(found)
    return findings


def _belongs_to(found: Found, last: Found) -> bool:
    """Merge a line that reports the consequence of the failure before it, unless their sizes differ."""
    far = found.line_number - last.last_line_number > FOLLOW_LINES
    if not found.format.follows or far or found.family != last.family:
        return False
    here, there = found.figures.tried, last.figures.tried
    if here and there and abs(here.bytes - there.bytes) > here.rounding_bytes + there.rounding_bytes + 1:
        return False
    last.figures.fill_from(found.figures)
    last.last_line_number = found.last_line_number
    return True


def _was_announced(found: Found, last: Found) -> bool:
    """Whether the line before only said that something died, and this one says of what."""
    near = found.line_number - last.last_line_number <= last.announces
    same = found.family == last.family and found.format.is_oom is not False
    return bool(last.announces) and near and same


def _judge(findings: Findings) -> Diagnosis:
    events = [_event(found, findings.pool_of) for found in findings.found]
    if not events:
        return Diagnosis(advice=["No memory failure was found in this text."])
    # What surely ran out of memory is the first memory failure, before what may have and what did not.
    first = next(event for verdict in (True, None, False) for event in events if event.is_oom is verdict)
    return Diagnosis(**first.model_dump(exclude={"line", "line_number"}), events=events, truncated=findings.truncated)


def _event(found: Found, pool_of: str | None) -> Event:
    f, is_oom = found.figures, found.format.is_oom
    cause = cause_of(found.family, is_oom, found.format.cause, f)
    if cause == "device_full" and found.family == "torch_cuda" and pool_of and not found.loading_weights:
        cause = "static_pool"
    advice = advice_for(found, cause, pool_of)
    if found.foreign:
        advice.append("PyTorch prints no tensor shape here: something wrapped or edited its message.")
    return Event(
        family=found.family,
        is_oom=is_oom,
        tried_bytes=f.tried and f.tried.bytes,
        total_bytes=f.total and f.total.bytes,
        free_bytes=f.free and f.free.bytes,
        allocated_bytes=f.allocated and f.allocated.bytes,
        reserved_bytes=f.reserved and f.reserved.bytes,
        reserved_unallocated_bytes=f.unallocated and f.unallocated.bytes,
        cause=cause,
        advice=advice,
        line=found.line,
        line_number=found.line_number,
    )
