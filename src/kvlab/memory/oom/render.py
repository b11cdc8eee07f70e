"""A diagnosis for people: the failures found, the figures of the one that is judged, and what to do."""

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvlab.memory.oom.model import Diagnosis, Event, Reading

FIGURES = {
    "tried": "tried_bytes",
    "total": "total_bytes",
    "free": "free_bytes",
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "reserved, unallocated": "reserved_unallocated_bytes",
}
VERDICT = {True: "out of memory", False: "not out of memory", None: "cannot tell"}
MAX_SHOWN = 20


def render(diagnosis: Diagnosis) -> RenderableType:
    """The failures found, one a row; the figures of the one that is judged; its cause and the advice."""
    if not diagnosis.events:
        return Text("No memory failure found.")
    parts: list[RenderableType] = [_failures(diagnosis.events[:MAX_SHOWN])]
    hidden = len(diagnosis.events) - MAX_SHOWN
    if hidden > 0 or diagnosis.truncated:
        parts.append(Text(f"and {max(hidden, 0)} more{' or still more' if diagnosis.truncated else ''}"))
    if any(getattr(diagnosis, key) is not None for key in FIGURES.values()):
        parts.append(_figures(diagnosis))
    parts.append(Text(f"\nCause: {diagnosis.cause}", style="bold"))
    parts += [Text(f"- {line}") for line in diagnosis.advice]
    return Group(*parts)


def _failures(events: list[Event]) -> Table:
    table = Table("line", "family", "verdict", "cause", Column("tried", justify="right"))
    for event in events:
        table.add_row(str(event.line_number), event.family, VERDICT[event.is_oom], event.cause, _gib(event.tried_bytes))
    return table


def _figures(reading: Reading) -> Table:
    table = Table("printed or following", Column("bytes", justify="right"), Column("that is", justify="right"))
    for title, key in FIGURES.items():
        if (count := getattr(reading, key)) is not None:
            table.add_row(title, f"{count:,}", _gib(count))
    return table


def _gib(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.2f} MiB"
