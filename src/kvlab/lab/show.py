"""How a lab writes a value, a row or a figure into the notebook."""

from __future__ import annotations

from typing import Any

_UNITS = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]


def written_bytes(number: int | float) -> str:
    """``1073741824`` as ``1.00 GiB``: binary units, two decimals."""
    for size, unit in _UNITS:
        if abs(number) >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"


def written_value(value: Any, unit: str) -> str:
    """A value as a reader wants it: bytes in binary units beside the exact number, others with separators."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "bytes" and isinstance(value, int | float):
        exact = f"{value:,.0f} bytes"
        return exact if abs(value) < 2**10 else f"{written_bytes(value)} ({exact})"
    if isinstance(value, int):
        return f"{value:,} {unit}".strip()
    if isinstance(value, float):
        return f"{value:,.4g} {unit}".strip()
    if isinstance(value, list):
        return ", ".join(written_value(item, "") for item in value) + (f" {unit}" if unit else "")
    return f"{value} {unit}".strip()


def show_markdown(text: str) -> None:
    """Show ``text`` as Markdown in a notebook, as plain text elsewhere."""
    from IPython.display import display

    display({"text/markdown": text, "text/plain": text}, raw=True)


def show_table(header: list[str], rows: list[list[Any]]) -> None:
    """Show rows as a table in the theme's own style; ``None`` is an empty cell, but every column has a name."""
    if not all(name.strip() for name in header):
        raise ValueError(f"a column without a name cannot be read aloud: {header}")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    show_markdown("\n".join(lines))


def _cell(cell: Any) -> str:
    return "" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ")
