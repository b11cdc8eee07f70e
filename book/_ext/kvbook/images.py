"""Figures with alternative text: every image of the book says in a sentence what it shows.

A lab gives the text with the figure, as output metadata; ``{recorded-figure}`` takes file and text from a run.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from myst_nb.core.render import MimeData, NbElementRenderer
from sphinx.application import Sphinx
from sphinx.directives.patches import Figure
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from kvbook.runs import EvidenceError, read_run, run_folder, written_origin

logger = logging.getLogger(__name__)

_FILE = re.compile(r"\S+\.(png|svg|jpe?g|gif|webp)", re.IGNORECASE)
_FEWEST_WORDS = 5

_render_image = NbElementRenderer.render_image


def alt_problem(alt: str) -> str | None:
    """Why ``alt`` does not tell a reader what the image shows; None if it does."""
    if not alt.strip():
        return "has no alternative text"
    if _FILE.fullmatch(alt.strip()):
        return f"has a file name as alternative text: {alt}"
    if len(alt.split()) < _FEWEST_WORDS:
        return f"needs a sentence as alternative text, not {alt!r}"
    return None


def render_image_with_alt(renderer: NbElementRenderer, data: MimeData) -> list[nodes.Element]:
    """myst-nb reads width and height from an output's metadata; this reads ``alt`` as well."""
    rendered = _render_image(renderer, data)
    alt = data.output_metadata.get(data.mime_type, {}).get("alt")
    for image in rendered:
        if alt:
            image["alt"] = alt
    return rendered


def check_images(app: Sphinx, document: nodes.document) -> None:
    for image in document.findall(nodes.image):
        if problem := alt_problem(image.get("alt", "")):
            logger.warning("image %s %s", image["uri"], problem, location=(app.env.docname, _line(image)))


def _line(node: nodes.Node | None) -> int | None:
    """Line of the innermost element around ``node`` that knows its own."""
    while node is not None and not node.line:
        node = node.parent
    return node and node.line


class RecordedFigure(Figure, SphinxDirective):
    """``{recorded-figure} lab:figure`` or ``lab:@device:figure``: a run's figure, its text and where it is from."""

    def run(self) -> list[nodes.Node]:
        try:
            return self._figure(*_parsed(self.arguments[0]))
        except EvidenceError as error:
            logger.warning("recorded-figure %s: %s", self.arguments[0], error, location=self.get_location())
            return []

    def _figure(self, lab: str, device: str | None, name: str) -> list[nodes.Node]:
        run = read_run(self.env, lab, device)
        if name not in run.figures:
            raise EvidenceError(f"{lab} drew no {name}; it has {', '.join(sorted(run.figures)) or 'no figure'}")
        path = run_folder(self.env, lab, device) / run.figures[name].file
        if not path.is_file():
            raise EvidenceError(f"{path.relative_to(self.env.srcdir)} is missing")
        self.arguments[0] = f"/{path.relative_to(self.env.srcdir).as_posix()}"
        self.options["alt"] = run.figures[name].alt
        rendered = super().run()
        for figure in rendered:
            if isinstance(figure, nodes.figure):
                figure += nodes.legend("", nodes.paragraph("", f"From {written_origin(run)}.", classes=["origin"]))
        return rendered


def _parsed(argument: str) -> tuple[str, str | None, str]:
    match argument.split(":"):
        case [lab, name]:
            return lab, None, name
        case [lab, device, name] if device.startswith("@"):
            return lab, device[1:], name
    raise EvidenceError("write lab:figure or lab:@device:figure")


def setup(app: Sphinx) -> dict[str, Any]:
    NbElementRenderer.render_image = render_image_with_alt
    app.add_directive("recorded-figure", RecordedFigure)
    app.connect("doctree-read", check_images)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
