"""The book's own Sphinx extension: numbers, figures, verdicts and provenance, all taken from runs."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

PARTS = ("evidence", "images", "ledger", "runstatus", "pagefixes")


def setup(app: Sphinx) -> dict[str, Any]:
    for part in PARTS:
        app.setup_extension(f"{__name__}.{part}")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
