"""Makes any log readable to the message formats: colours, logger prefixes and line breaks must not matter.

A message is matched with all white space, quotes and letter case removed. So one that a terminal or a logger
broke over several lines, in the middle of a word even, reads the same as one on a single line.
"""

import html
import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from kvlab.memory.oom.interleave import by_writer

MAX_LINE_CHARS = 32_768
BLOCK_CHARS = 1 << 18
# Lines at the end of a block that are read again with the next one, so that no message is cut in two.
OVERLAP_LINES = 48
WRAP_LINES = 10
TERMINAL_WIDTHS = (80, 100, 120, 132)
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
HINTS += (
    "indexerror",
    "paging",
    "constant",
    "evict",
    "kill",
    "winerror",
    "exited with",
    "exits with",
    "exceeds",
    "out of resource",
    "in object store",
)

ANSI = re.compile(
    r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])"
    # as syslog, JSON and Python's repr write the escape character
    r"|(?:\#033|\\033|\\x1b|\\u001b|\^\[)\[[0-9;]{0,16}m"
)
ANSI_SIGNS = ("\x1b", "033[", "1b[", "^[[")
TAG = re.compile(
    r"</?(?:br|p|pre|code|samp|span|div|b|i|em|strong|font|li|ul|ol|td|tr|a|blockquote)\b[^<>]{0,200}>", re.I
)

# What loggers and runners put before each line of a message. Atomic, so that no line can make it backtrack.
PREFIX = re.compile(
    r"""(?>
      \s+
    | \[\d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d(?:\s[A-Z_]{2,8}\d{1,4}){1,5}\]
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.:Z+-]{0,20}\s[\w.-]{1,64}\s[\w./-]{1,64}\[\d{1,8}\]:
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\s,]\s?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s?\]?:?
    | \[\d\d/\d\d/\d{2,4}[-\s]\d\d:\d\d:\d\d\]
    | \[?\d\d[-/]\d\d\s\d\d:\d\d:\d\d(?:[.,]\d+)?\]?
    | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?
    | [A-Z][a-z]{2}\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d\s[\w.-]{1,64}\s[\w./-]{1,64}(?:\[\d{1,8}\])?:
    | \[?[DEIVWF]\d{3,4}\s\d\d:\d\d:\d\d(?:\.\d+)?(?:\s{1,6}\d{1,8})?\s[\w./-]{1,64}:\d{1,6}\]
    | \([\w.:-]{1,64}(?:\s[\w.:-]{1,16}){0,3}\spid=\d{1,10}(?:,\sip=[\d.]{7,15})?\)
    | \(raylet(?:,\sip=[\d.]{7,15})?\)
    | \[pod/[\w./-]{1,128}\]
    | \#\#\[\w{1,16}\]
    | \d{1,3}:\s
    | E\s{3}
    | \|?\s?[\w.<>]{1,64}:[\w.<>]{1,64}:\d{1,6}\s-\s
    | [\w.]{1,64}\s-\s(?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s-\s)
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


# Who writes one JSON object a line, and where in it the text stands.
JSON_TEXTS = ("log", "message", "msg", "textPayload", "text", "event", "error", "exception", "traceback", "exc_info")
JSON_NAMES = ("target", "logger", "logger_name")
JSON_SIGNS = frozenset(("stream", "time", "timestamp", "@timestamp", "ts", "level", "severity", "levelname"))


def _in_json(line: str) -> list[str]:
    """The lines of text in a logger's JSON object; anything else as it is."""
    if line[:1] != "{" or line[-1:] != "}":
        return [line]
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    texts = [entry[key] for key in JSON_TEXTS if isinstance(entry.get(key), str)]
    if not texts or not JSON_SIGNS & entry.keys():
        return [line]
    names = [entry[key] for key in JSON_NAMES if isinstance(entry.get(key), str)]
    return "\n".join(names + texts).splitlines()


def _pieces(stream: TextIO) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, cut where one is absurdly long: matching is blind to a cut."""
    number = 1
    while piece := stream.readline(MAX_LINE_CHARS):
        piece = piece.replace("\0", "")  # UTF-16 that is not marked as such
        for line in _in_json(piece.strip()) if piece[:1] in (" ", "{") else (piece.rstrip("\n"),):
            if line and not line.isspace():
                yield number, line
        number += piece.endswith("\n")


def _block(numbered_lines: list[tuple[int, str]], final: bool) -> Block:
    if not _may_tell_of_memory(numbered_lines):
        return Block(numbered_lines, "", [0] * len(numbered_lines), final)
    # What the next block sees again stays behind what it does not.
    seen_again = 0 if final else OVERLAP_LINES
    numbered_lines = by_writer(numbered_lines[: len(numbered_lines) - seen_again]) + by_writer(
        numbered_lines[len(numbered_lines) - seen_again :]
    )
    lines = [without_markup(line) for _, line in numbered_lines]
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
    """Whether a terminal cut this line at its width: none near it is longer, and another or every terminal is
    as wide."""
    near = [len(line) for line in lines[max(index - WRAP_LINES, 0) : index + WRAP_LINES + 1]]
    width = len(lines[index])
    return width >= 20 and width == max(near) and (near.count(width) > 1 or width in TERMINAL_WIDTHS)


def without_markup(line: str) -> str:
    """Without terminal colours and HTML."""
    if any(sign in line for sign in ANSI_SIGNS):
        line = ANSI.sub("", line)
    if "<" in line:
        line = TAG.sub("", line)
    return html.unescape(line).replace("\xa0", " ") if "&" in line else line


def without_prefix(line: str) -> str:
    return line[len(prefix_of(line)) :]


def prefix_of(line: str) -> str:
    prefix = PREFIX.match(line)
    return prefix[0] if prefix else ""
