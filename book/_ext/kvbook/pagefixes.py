"""Takes out of finished pages what would mislead a screen reader and cannot be set by configuration."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_TOGGLE_LABEL = ' aria-label="Toggle hidden content"'
"""myst-nb gives every folded cell this name, which differs from the text the reader sees on it."""


def name_toggles_by_their_text(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        context["body"] = context["body"].replace(_TOGGLE_LABEL, "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", name_toggles_by_their_text)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
