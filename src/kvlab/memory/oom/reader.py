"""Find every memory failure in a text, and read it."""

import io
import re
import traceback
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.memory.oom.causes import POOL_SETTINGS, advice_for, cause_of
from kvlab.memory.oom.formats import FORMATS, Format
from kvlab.memory.oom.model import Diagnosis, Event, Family, Figures
from kvlab.memory.oom.template import anchor, compiled, figures_of, size
from kvlab.memory.oom.text import Block, blocks, without_colour

MAX_EVENTS = 1000
MAX_HITS_PER_BLOCK = 20_000
MAX_LINE_SHOWN = 240
MESSAGE_CHARS = 1600
# An exception's name so close before a message belongs to the message.
MENTION_REACH = 80
FOLLOW_LINES = 40

LISTED_PROCESS = re.compile(r"process\d{1,10}has(\d[\d.]{0,24})([kmgt]?i?b(?:ytes)?)memoryinuse")
FOREIGN_WORDS = "fortensorshape"

LOOKS_LIKE_ERROR = re.compile(
    r"error|exception|fatal|fail|abort|crash|killed|panic|exhausted|oom\b|^\W*(?:cuda|hip)? ?out of memory"
)
READS_LIKE_ADVICE = re.compile(
    r"\b(?:if you|in case|avoid|prevent|may|might|could|can (?:take|lead|cause|run)|consider|running out|risk|"
    r"instead of|protect|without|when you|handl\w+|catch\w*|except|def|assert|print|raise|import)\b"
)


@dataclass
class Found:
    """One failure before it is judged."""

    family: Family
    format: Format
    figures: Figures
    line: str
    line_number: int
    last_line_number: int
    foreign: bool = False


@dataclass
class Findings:
    """What a whole text held."""

    found: list[Found] = field(default_factory=list)
    truncated: bool = False
    pool_of: str | None = None


def diagnose(text: str) -> Diagnosis:
    """Read a message or a whole log. Never fails on any text; without a failure in it, `events` is empty."""
    return _judge(_read(io.StringIO(text, newline=None)))


def diagnose_file(path: str | Path) -> Diagnosis:
    """Read a log file of any size in bounded memory; bytes that are not UTF-8 are replaced."""
    with open(path, encoding="utf-8", errors="replace", newline=None) as lines:
        return _judge(_read(lines))


def diagnose_exception(error: BaseException) -> Diagnosis:
    """Read a live exception with its causes, innermost first, as its traceback prints them."""
    return diagnose("".join(traceback.format_exception(error)))


def _read(lines: Iterable[str]) -> Findings:
    findings = Findings()
    for block in blocks(lines):
        findings.pool_of = findings.pool_of or next((e for e in POOL_SETTINGS if e in block.squeezed), None)
        for found in _failures(block):
            if len(findings.found) >= MAX_EVENTS:
                findings.truncated = True
                return findings
            if not _tells_of_the_last(found, findings.found):
                findings.found.append(found)
    return findings


def _tells_of_the_last(found: Found, earlier: list[Found]) -> bool:
    """Merge a line that reports the consequence of the failure before it, unless their figures differ."""
    if not (found.format.follows and earlier) or earlier[-1].family != found.family:
        return False
    last = earlier[-1]
    if found.line_number - last.last_line_number > FOLLOW_LINES:
        return False
    if found.figures.tried and last.figures.tried and found.figures.tried != last.figures.tried:
        close = (
            abs(found.figures.tried.bytes - last.figures.tried.bytes) <= last.figures.tried.rounding_bytes + 1
        )
        if not close:
            return False
    last.figures.fill_from(found.figures)
    last.last_line_number = found.last_line_number
    return True


Hit = tuple[int, int, Format]  # where its first words stand, its rank, the format
ANCHORS = [(anchor(entry.start), entry) for entry in FORMATS]


def _failures(block: Block) -> Iterator[Found]:
    """The failures of a block in their order; words that could be prose count only where nothing better does."""
    hits = _hits(block.squeezed)
    spans = _spans(block, hits, mentions=False, taken=[])
    spans += _spans(block, hits, mentions=True, taken=spans)
    for start, end, entry, figures in sorted(spans, key=lambda span: span[0]):
        yield _found(entry, block, start, end, figures)


Span = tuple[int, int, Format, Figures]


def _spans(block: Block, hits: list[Hit], mentions: bool, taken: list[Span]) -> list[Span]:
    spans: list[Span] = []
    claimed_until = 0
    starts, ends = [s[0] for s in taken], [s[1] for s in taken]
    for index, (position, _, entry) in enumerate(hits):
        if entry.mention is not mentions or position < claimed_until or block.is_reread(position):
            continue
        before = bisect_right(starts, position + MENTION_REACH) - 1
        if before >= 0 and ends[before] > position:
            continue
        match = compiled(entry.start).match(block.squeezed, position)
        if not match or not _is_meant(entry, block, position):
            continue
        end = _message_end(hits, index, match.end(), len(block.squeezed))
        figures, claimed_until = _figures(entry, block.squeezed, match, end)
        spans.append((position, claimed_until, entry, figures))
    return spans


def _hits(squeezed: str) -> list[Hit]:
    hits: list[Hit] = []
    for priority, (literal, entry) in enumerate(ANCHORS):
        position = squeezed.find(literal)
        while position >= 0 and len(hits) < MAX_HITS_PER_BLOCK:
            hits.append((position, priority, entry))
            position = squeezed.find(literal, position + 1)
    hits.sort(key=lambda hit: hit[:2])
    return hits


def _message_end(hits: list[Hit], index: int, start: int, length: int) -> int:
    """A message reaches to the next one that starts as this one does, and no further than messages do."""
    literal = anchor(hits[index][2].start)
    following = (
        p for p, _, entry in hits[index + 1 :] if p >= start and anchor(entry.start)[:16] == literal[:16]
    )
    return min(next(following, length), start + MESSAGE_CHARS)


def _figures(entry: Format, squeezed: str, match: re.Match[str], end: int) -> tuple[Figures, int]:
    figures, claimed_until = figures_of(match), match.end()
    for template in entry.figures:
        detail = compiled(template).search(squeezed, match.start(), end)
        if detail:
            figures.fill_from(figures_of(detail))
            claimed_until = max(claimed_until, detail.end())
    listed = LISTED_PROCESS.findall(squeezed, match.start(), end) if figures.total else []
    figures.processes = tuple(size(number, unit) for number, unit in listed)
    figures.complete()
    return figures, claimed_until


def _found(entry: Format, block: Block, position: int, end: int, figures: Figures) -> Found:
    squeezed = block.squeezed
    number, line = block.numbered_lines[block.index_at(position)]
    family = entry.family
    if callable(family):
        family = family(squeezed[max(position - 300, 0) : position], squeezed[position : position + 600])
    return Found(
        family=family,
        format=entry,
        figures=figures,
        line=_shown(without_colour(line)),
        line_number=number,
        last_line_number=block.numbered_lines[block.index_at(max(end - 1, 0))][0],
        foreign=squeezed.startswith(FOREIGN_WORDS, end),
    )


def _is_meant(entry: Format, block: Block, position: int) -> bool:
    """Whether words that also occur in prose are an error here."""
    if entry.own_line:
        start = block.start_of_line(position)
        after = position + len(anchor(entry.start))
        ends_line = after in block.starts or after == len(block.squeezed)
        return bool(re.fullmatch(r"(?:[\w.]{0,60}\.)?(?:_?array)?", block.squeezed[start:position])) and (
            ends_line or block.squeezed[after] == ":"
        )
    if entry.mention:
        line = without_colour(block.numbered_lines[block.index_at(position)][1]).lower()[:2000]
        return bool(LOOKS_LIKE_ERROR.search(line)) and not READS_LIKE_ADVICE.search(line)
    return True


def _shown(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= MAX_LINE_SHOWN else line[: MAX_LINE_SHOWN - 1] + "…"


def _judge(findings: Findings) -> Diagnosis:
    events = [_event(found, findings.pool_of) for found in findings.found]
    if not events:
        return Diagnosis(advice=["No memory failure was found in this text."])
    first = next(event for verdict in (True, None, False) for event in events if event.is_oom is verdict)
    reading = first.model_dump(exclude={"line", "line_number"})
    return Diagnosis(**reading, events=events, truncated=findings.truncated)


def _event(found: Found, pool_of: str | None) -> Event:
    f, is_oom = found.figures, found.format.is_oom
    cause = cause_of(found.family, is_oom, found.format.cause, f)
    if cause == "device_full" and found.family == "torch_cuda" and pool_of:
        cause = "static_pool"
    advice = advice_for(found.family, is_oom, cause, f, pool_of)
    if found.foreign:
        advice.append(
            "PyTorch prints no tensor shape here: these words come from something that wrapped or edited it."
        )
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
