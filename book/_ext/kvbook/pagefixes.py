"""Takes out of finished pages what would mislead a screen reader and cannot be set by configuration."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

REPLACEMENTS = {
    # myst-nb gives every folded cell this name, which differs from the text the reader sees on it.
    ' aria-label="Toggle hidden content"': "",
    # docutils gives entries of a bibliography a role that was withdrawn, inside a list that then has no items.
    ' role="doc-biblioentry"': ' role="listitem"',
}


def repair(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    for wrong, right in REPLACEMENTS.items():
        if wrong in context.get("body", ""):
            context["body"] = context["body"].replace(wrong, right)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", repair)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
