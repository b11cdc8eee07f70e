"""Docutils tables, lists and links built in code, for the pages that are made from runs."""

from __future__ import annotations

from collections.abc import Sequence

from docutils import nodes
from sphinx import addnodes
from sphinx.environment import BuildEnvironment

Cell = str | nodes.Node | Sequence[nodes.Node]


def _inline(cell: Cell) -> list[nodes.Node]:
    if isinstance(cell, str):
        return [nodes.Text(cell)]
    return [cell] if isinstance(cell, nodes.Node) else list(cell)


def paragraph(*cells: Cell, classes: Sequence[str] = ()) -> nodes.paragraph:
    return nodes.paragraph("", "", *(node for cell in cells for node in _inline(cell)), classes=list(classes))


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], classes: Sequence[str] = ()) -> nodes.table:
    """A table whose cells are text or inline nodes; the first cell of a row names it."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1, stub=int(column == 0)) for column in range(len(header))]
    group += nodes.thead("", _row(header))
    group += nodes.tbody("", *map(_row, rows))
    return nodes.table("", group, classes=["kvlab", *classes])


def _row(cells: Sequence[Cell]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", paragraph(cell)) for cell in cells))


def definitions(pairs: Sequence[tuple[str, Cell]], classes: Sequence[str] = ()) -> nodes.definition_list:
    items = [
        nodes.definition_list_item("", nodes.term("", term), nodes.definition("", paragraph(cell)))
        for term, cell in pairs
    ]
    return nodes.definition_list("", *items, classes=list(classes))


def link(env: BuildEnvironment, reftype: str, target: str, text: str) -> addnodes.pending_xref:
    """A link to a page (``doc``) or label (``ref``); one that leads nowhere is a warning."""
    reference = addnodes.pending_xref("", nodes.inline("", text), refdomain="std", reftype=reftype, reftarget=target)
    reference.update_all_atts({"refdoc": env.docname, "refexplicit": True, "refwarn": True})
    return reference
