"""Take apart the lines of several ranks, workers or containers that write into one log."""

import re
from collections.abc import Sequence
from itertools import groupby

# What names the writer, early in a line: `[rank3]:`, `(Worker_TP1 pid=42)`, `vllm-1  | `, `[1,3]<stderr>:`.
WRITER = re.compile(
    r"\[(?:rank|default)?\d{1,5}\]:|\(\w[^()]{0,80}\spid=\d{1,10}[^()]{0,60}\)|\[\d{1,4},\d{1,4}\]<std(?:err|out)>:"
    r"|^[\w.-]{1,64}\s{0,16}\|\s|\s(?:DP\d{1,3}\s)?TP\d{1,3}\]"
)
NEAR_CHARS = 120

Numbered = tuple[int, str]


def writer_of(line: str) -> str | None:
    found = WRITER.search(line, 0, NEAR_CHARS)
    return found and found[0]


def by_writer(lines: Sequence[Numbered]) -> list[Numbered]:
    """The lines of each writer together, wherever line after line names one; all others stay where they are."""
    ordered: list[Numbered] = []
    named = [(writer_of(line), (number, line)) for number, line in lines]
    for has_writer, run in groupby(named, key=lambda pair: pair[0] is not None):
        members = list(run)
        if has_writer:
            rank = {writer: place for place, writer in enumerate(dict.fromkeys(writer for writer, _ in members))}
            members.sort(key=lambda pair: rank[pair[0]])
        ordered += [line for _, line in members]
    return ordered
