"""A diagnosis for people: one table of figures a failure, and what to do."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlab.memory.oom.model import Diagnosis, Event

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
    """A table of the failures found, then the cause of the first memory failure and the advice."""
    if not diagnosis.events:
        return Text("No memory failure found.")
    parts: list[RenderableType] = [_table(diagnosis.events[:MAX_SHOWN])]
    hidden = len(diagnosis.events) - MAX_SHOWN
    if hidden > 0 or diagnosis.truncated:
        parts.append(Text(f"and {max(hidden, 0)} more{' or still more' if diagnosis.truncated else ''}"))
    parts.append(Text(f"\nCause: {diagnosis.cause}", style="bold"))
    parts += [Text(f"- {line}") for line in diagnosis.advice]
    return Group(*parts)


def _table(events: list[Event]) -> Table:
    printed = {title: key for title, key in FIGURES.items() if any(getattr(e, key) is not None for e in events)}
    table = Table("line", "family", "verdict", "cause", *printed)
    for event in events:
        figures = [_gib(getattr(event, key)) for key in printed.values()]
        table.add_row(str(event.line_number), event.family, VERDICT[event.is_oom], event.cause, *figures)
    return table


def _gib(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
