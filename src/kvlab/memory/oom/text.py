"""Makes any log readable to the message formats: colours, logger prefixes and line breaks must not matter.

A message is matched with all white space, quotes and letter case removed. So one that a terminal or a logger
broke over several lines, in the middle of a word even, reads the same as one on a single line.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

MAX_LINE_CHARS = 32_768
BLOCK_CHARS = 1 << 18
# Lines at the end of a block that are read again with the next one, so that no message is cut in two.
OVERLAP_LINES = 48
WRAP_LINES = 10
NUMBERS_APART = "\x1f"
HINTS = ("memory", "alloc", "oom", "assert", "bounds", "cublas", "_status_", "_error_", "cuda", "kv", "block")
HINTS += (
    "nvml",
    "buffer",
    "cache",
    "context size",
    "seq",
    "tensor is not",
    "vram",
    "signal",
    "exit ",
    "mmap",
)
HINTS += ("indexerror", "paging", "constant", "evict", "kill", "exited with", "exits with", "exceeds", "out of resource", "in object store")

ANSI = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")

# What loggers and runners put before each line of a message. Atomic, so that no line can make it backtrack.
PREFIX = re.compile(
    r"""(?>
      \s+
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\s,]\s?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s?\]?:?
    | \[\d\d/\d\d/\d{2,4}[-\s]\d\d:\d\d:\d\d\]
    | \[?\d\d[-/]\d\d\s\d\d:\d\d:\d\d(?:[.,]\d+)?\]?
    | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?
    | [A-Z][a-z]{2}\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d\s[\w.-]{1,64}\s[\w./-]{1,64}(?:\[\d{1,8}\])?:
    | \([\w.:-]{1,64}\spid=\d{1,10}(?:,\sip=[\d.]{7,15})?\)
    | \[(?:rank|default|TP|DP|PP)?\d{1,4}\]:?
    | \[(?:TRT|TRT-LLM|[DEIVW]|RANK\s\d{1,4})\]
    | \[\d{1,4},\d{1,4}\]<std(?:err|out)>:
    | \[?(?:TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?:?(?=[\s\[|:-]|$)
    | \[?[\w./-]{1,64}\.(?:py|cc|cpp|rs|go):\d{1,6}\]
    | std(?:err|out)\s[FP]\s
    | [\w.-]{1,64}\s{0,16}\|\s
    | [-|>\u2502\u2503]\s
    ){1,12}""",
    re.VERBOSE,
)

QUOTES = "\"'`\\\u2018\u2019\u201c\u201d"
INVISIBLE = "\u200b\ufeff\x00"
BOX_DRAWING = "".join(map(chr, range(0x2500, 0x2580)))  # rich frames tracebacks with it
_DROPPED = str.maketrans("", "", QUOTES + INVISIBLE + BOX_DRAWING)


def squeeze(line: str) -> str:
    """Lower case, without white space, quotes and escaped line breaks."""
    line = line.replace("\\n", " ").replace("\\t", " ").translate(_DROPPED)
    return "".join(line.split()).lower()


@dataclass
class Block:
    """Some lines of a text, squeezed into one string, with the way back to the lines."""

    numbered_lines: list[tuple[int, str]]
    squeezed: str
    starts: list[int]
    final: bool

    def index_at(self, position: int) -> int:
        """Index of the line that holds the squeezed character at `position`."""
        return bisect_right(self.starts, position) - 1

    def line_at(self, position: int) -> str:
        return self.numbered_lines[self.index_at(position)][1]

    def number_at(self, position: int) -> int:
        return self.numbered_lines[self.index_at(position)][0]

    def start_of_line(self, position: int) -> int:
        return self.starts[self.index_at(position)]

    def is_reread(self, position: int) -> bool:
        """True in the overlap: the next block sees this line too, and more of what follows it."""
        return not self.final and self.index_at(position) >= len(self.starts) - OVERLAP_LINES


def blocks(stream: TextIO) -> Iterator[Block]:
    """Cut a text into overlapping blocks of bounded size, so that memory does not depend on its length."""
    held: list[tuple[int, str]] = []
    size = 0
    for numbered in _pieces(stream):
        held.append(numbered)
        size += len(numbered[1])
        if size >= BLOCK_CHARS and len(held) > 2 * OVERLAP_LINES:
            yield _block(held, final=False)
            held = held[-OVERLAP_LINES:]
            size = sum(len(line) for _, line in held)
    if held:
        yield _block(held, final=True)


def _pieces(stream: TextIO) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, cut where one is absurdly long: matching is blind to a cut."""
    number = 1
    while piece := stream.readline(MAX_LINE_CHARS):
        if not piece.isspace():
            yield number, piece.rstrip("\n")
        number += piece.endswith("\n")


def _block(numbered_lines: list[tuple[int, str]], final: bool) -> Block:
    if not _may_tell_of_memory(numbered_lines):
        return Block(numbered_lines, "", [0] * len(numbered_lines), final)
    lines = [without_colour(line) for _, line in numbered_lines]
    starts, parts, position = [], [], 0
    for index, line in enumerate(lines):
        squeezed = squeeze(without_prefix(line))
        if _would_glue_numbers(parts, squeezed) and not _is_hard_wrapped(lines, index - 1):
            squeezed = NUMBERS_APART + squeezed
        starts.append(position)
        parts.append(squeezed)
        position += len(squeezed)
    return Block(numbered_lines, "".join(parts), starts, final)


def _may_tell_of_memory(numbered_lines: list[tuple[int, str]]) -> bool:
    """Every format holds one of these words, so most of a long log is passed over at the speed of `in`."""
    text = "\n".join(line for _, line in numbered_lines).lower()
    return any(word in text for word in HINTS)


def _would_glue_numbers(parts: list[str], following: str) -> bool:
    """A line that ends in a number before one that starts with a digit, a time that is no known prefix."""
    return bool(parts) and following[:1].isdigit() and bool(re.search(r"\d[.,]?$", parts[-1][-2:]))


def _is_hard_wrapped(lines: list[str], index: int) -> bool:
    """Whether a terminal cut this line at its width: none near it is longer, another is as long."""
    near = [len(line) for line in lines[max(index - WRAP_LINES, 0) : index + WRAP_LINES + 1]]
    return len(lines[index]) >= 20 and len(lines[index]) == max(near) and near.count(max(near)) > 1


def without_colour(line: str) -> str:
    return ANSI.sub("", line) if "\x1b" in line else line


def without_prefix(line: str) -> str:
    prefix = PREFIX.match(line)
    return line[prefix.end() :] if prefix else line
