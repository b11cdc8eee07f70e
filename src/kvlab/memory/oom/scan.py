"""Find the message formats in a block of text. What was found is judged in `reader`."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvlab.memory.oom.formats import FORMATS, Format
from kvlab.memory.oom.model import Family, Figures
from kvlab.memory.oom.template import anchor, compiled, figures_of
from kvlab.memory.oom.text import Block, prefix_of, squeeze, without_markup, without_prefix

MAX_HITS_PER_BLOCK = 20_000
MAX_LINE_SHOWN = 240
MAX_LINE_JUDGED = 2000
MESSAGE_CHARS = 1600
# An exception's name or an explanation so close to a message belongs to the message.
MENTION_REACH = 80
TRACEBACK_CHARS = 8000
# Frames of a traceback that say that an engine's pool was not there yet.
LOADING = ("load_model(", "load_weights(", "create_weights(", "make_layers(")
FOREIGN_WORDS = "fortensorshape"

LISTED_PROCESS = "Process {n} has {process} memory in use"
LOOKS_LIKE_ERROR = re.compile(
    r"error|exception|fatal|fail|abort|crash|killed|panic|exhausted|oom\b"
    r"|cannot|unable|not enough|insufficient|^\W*(?:cuda |hip )?out of memory"
)
# What stands before words that any program may write: nothing, or something that announces an error.
ANNOUNCES_ERROR = re.compile(
    r"^\W{0,4}(?:[\w.]*\.)?$|(?:error|exception|fatal|panic|critical|exhausted|killed)\w*\W{0,2}[:\])]|fail|[:\]]\s*$"
)
ERROR_LEVEL = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b")
IN_BRACKETS = re.compile(r"\(\s*$")
EXCEPTION_NAME = re.compile(r"(?:.{0,40}exceptiontype:\W{0,4})?(?:[\w.]{0,60}\.)?(?:_?array)?")
# A traceback shows the line of code that raised, and after it what was raised.
RAISING_CODE = re.compile(r"(?:^|\braise\s+[\w.]{1,64}\()\s*[bfr]?[\"']$")
TRACEBACK_LINES = 12
READS_LIKE_ADVICE = re.compile(
    r"^\W*(?:fix|feat|chore)\w*\b"
    r"|\b(?:if you|in case|avoid|prevent|may|might|could|can (?:take|lead|cause|run)|consider|running out|risk"
    r"|refer to|how to|instead of|protect|without|when you|handl\w+|catch\w*|except|def|assert|print|raise|import)\b"
)


@dataclass
class Found:
    """One failure before it is judged.

    announces: within so many lines comes one that tells the same and more. foreign: its engine would not have
    written what follows. loading_weights: it struck before the engine's pool was allocated.
    """

    family: Family
    format: Format
    figures: Figures
    line: str
    line_number: int
    last_line_number: int
    announces: int
    foreign: bool
    loading_weights: bool


Hit = tuple[int, int, Format]  # where a format's first words stand, its rank, the format
Span = tuple[int, int, Format, Figures]  # from where to where a message reaches

ANCHORS = [(anchor(entry.start), entry) for entry in FORMATS]


def failures(block: Block) -> Iterator[Found]:
    """The failures of a block in order; words that could be prose count only where nothing better does."""
    hits = _hits(block.squeezed)
    spans = _spans(block, hits, mentions=False, taken=[])
    spans += _spans(block, hits, mentions=True, taken=spans)
    for span in sorted(spans, key=lambda span: (block.number_at(span[0]), span[0])):
        yield _found(block, *span)


def _hits(squeezed: str) -> list[Hit]:
    hits: list[Hit] = []
    for rank, (literal, entry) in enumerate(ANCHORS):
        position = squeezed.find(literal)
        while position >= 0 and len(hits) < MAX_HITS_PER_BLOCK:
            hits.append((position, rank, entry))
            position = squeezed.find(literal, position + 1)
    hits.sort(key=lambda hit: hit[:2])
    return hits


def _spans(block: Block, hits: list[Hit], mentions: bool, taken: list[Span]) -> list[Span]:
    spans: list[Span] = []
    claimed_until = 0
    starts = [span[0] for span in taken]
    for index, (position, _, entry) in enumerate(hits):
        if entry.mention is not mentions or position < claimed_until or block.is_reread(position):
            continue
        nearest = bisect_right(starts, position + MENTION_REACH) - 1
        if nearest >= 0 and taken[nearest][1] > position - MENTION_REACH:
            continue
        match = compiled(entry.start).match(block.squeezed, position)
        if not match or block.squeezed.startswith(entry.denials, match.end()) or not _is_meant(entry, block, position):
            continue
        end = _message_end(hits, index, match.end(), len(block.squeezed))
        figures, claimed_until = _read_figures(entry, block.squeezed, match, end)
        spans.append((position, claimed_until, entry, figures))
    return spans


def _is_meant(entry: Format, block: Block, position: int) -> bool:
    """Whether words that also occur in prose are an error here."""
    if entry.own_line:
        before = block.squeezed[block.start_of_line(position) : position]
        after = position + len(anchor(entry.start))
        ends_line = after in block.starts or after == len(block.squeezed) or block.squeezed[after] == ":"
        return ends_line and bool(EXCEPTION_NAME.fullmatch(before))
    if entry.mention or entry.term:
        line = _as_prose(block.line_at(position))
        if READS_LIKE_ADVICE.search(line):
            return False
        if entry.term:
            return True
        before, words, after = line.partition(_first_words(entry))
        if entry.family == "unknown":
            if ERROR_LEVEL.search(prefix_of(block.line_at(position)[:MAX_LINE_JUDGED])):
                return bool(words)
            all_in_brackets = IN_BRACKETS.search(before) and not re.search(r"\w", after)
            return bool(words and (all_in_brackets or ANNOUNCES_ERROR.search(before)))
        return bool(LOOKS_LIKE_ERROR.search(line))
    return True


@lru_cache(maxsize=8)
def _as_prose(line: str) -> str:
    return without_prefix(without_markup(line[:MAX_LINE_JUDGED])).lower()


def _message_end(hits: list[Hit], index: int, start: int, length: int) -> int:
    """A message reaches to the next one that begins alike, and no further than messages do."""
    this = hits[index][2]
    for place in range(index + 1, len(hits)):
        position, _, other = hits[place]
        if position >= start + MESSAGE_CHARS:
            break
        if position >= start and _begins_alike(this, other):
            return position
    return min(length, start + MESSAGE_CHARS)


def _begins_alike(this: Format, other: Format) -> bool:
    if anchor(other.start)[:16] == anchor(this.start)[:16]:
        return True
    return bool(this.figures) and this.figures is other.figures and "outofmemory." in anchor(other.start)


def _read_figures(entry: Format, squeezed: str, match: re.Match[str], end: int) -> tuple[Figures, int]:
    figures, claimed_until = figures_of(match), match.end()
    for template in entry.figures:
        detail = compiled(template).search(squeezed, match.start(), end)
        if detail:
            figures.fill_from(figures_of(detail))
            claimed_until = max(claimed_until, detail.end())
    if figures.total:
        listed = compiled(LISTED_PROCESS).finditer(squeezed, match.start(), end)
        figures.processes = tuple(figures_of(process).process for process in listed)
    figures.complete()
    return figures, claimed_until


def _found(block: Block, start: int, end: int, entry: Format, figures: Figures) -> Found:
    squeezed, family = block.squeezed, entry.family
    if callable(family):
        prefix = squeeze(prefix_of(without_markup(block.line_at(start))))
        family = family(squeezed[max(start - 300, 0) : start] + prefix, squeezed[start : start + 600])
    before = squeezed[max(start - TRACEBACK_CHARS, 0) : start]
    return Found(
        family=family,
        format=entry,
        figures=figures,
        line=_shown(block.line_at(start)),
        line_number=block.number_at(start),
        last_line_number=block.number_at(max(end - 1, 0)),
        announces=entry.announces or (TRACEBACK_LINES if _is_code(entry, block.line_at(start)) else 0),
        foreign=squeezed.startswith(FOREIGN_WORDS, end),
        loading_weights=any(frame in before for frame in LOADING),
    )


def _first_words(entry: Format) -> str:
    return entry.start.partition("{")[0].strip().lower()


def _is_code(entry: Format, line: str) -> bool:
    before, words, _ = _as_prose(line).partition(_first_words(entry))
    return bool(words) and bool(RAISING_CODE.search(before.strip()))


def _shown(line: str) -> str:
    line = " ".join(without_markup(line).split())
    return line if len(line) <= MAX_LINE_SHOWN else line[: MAX_LINE_SHOWN - 1] + "…"
