"""The role that puts a number of a run into prose, so that text and run cannot disagree.

``{ev}`lab:key:spec` `` reads this build's run, ``{ev}`lab:@device:key:spec` `` a recording. ``spec`` is a format of
Python, or a binary unit and a format (``GiB.2f``) for bytes.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from kvbook.runs import EvidenceError, read_run, written_origin
from kvlab.lab.run import Metric

logger = logging.getLogger(__name__)

_UNIT_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BINARY_SPEC = re.compile(r"(KiB|MiB|GiB)(.*)")


class evidence_value(nodes.inline):
    """A value with its exact form and its origin."""


def written(metric: Metric, spec: str) -> str:
    """``metric`` as prose wants it; EvidenceError if ``spec`` does not fit the value."""
    value = metric.value
    if binary := _BINARY_SPEC.fullmatch(spec):
        if metric.unit != "bytes":
            raise EvidenceError(f"{spec} is for bytes, the unit is {metric.unit or 'none'}")
        unit, spec = binary.groups()
        return f"{_formatted(_number(value) / _UNIT_BYTES[unit], spec)}\u00a0{unit}"
    if spec:
        return _formatted(_number(value), spec)
    return _plain(value)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvidenceError(f"{value!r} is not a number and takes no format")
    return value


def _formatted(number: int | float, spec: str) -> str:
    try:
        return format(number, spec)
    except ValueError as error:
        raise EvidenceError(f"format {spec!r} does not fit {number!r}: {error}") from None


def _plain(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            raise EvidenceError(f"{value!r} needs a format, such as .1f")
        case list():
            return ", ".join(str(item) for item in value)
    return value


class EvidenceRole(SphinxRole):
    """``{ev}``: a number of a run, or a warning that fails a strict build."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            return [self._value()], []
        except EvidenceError as error:
            logger.warning("ev %s: %s", self.text, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.text)], []

    def _value(self) -> nodes.Node:
        lab, device, key, spec = _parsed(self.text)
        run = read_run(self.env, lab, device)
        if key not in run.metrics:
            raise EvidenceError(f"{lab} recorded no {key}; it has {', '.join(sorted(run.metrics)) or 'nothing'}")
        metric = run.metrics[key]
        text = written(metric, spec)
        origin = f"{key} ({metric.kind}): {written_origin(run)}"
        return evidence_value("", text, exact=str(metric.value), origin=origin)


def _parsed(text: str) -> tuple[str, str | None, str, str]:
    lab, *rest = text.split(":", 1)
    device = None
    if rest and rest[0].startswith("@"):
        device, *rest = rest[0][1:].split(":", 1)
    if not rest:
        raise EvidenceError("write lab:key:format or lab:@device:key:format")
    key, _, spec = rest[0].partition(":")
    return lab, device, key, spec


def _visit_html(translator: Any, node: evidence_value) -> None:
    attributes = {"value": node["exact"], "title": node["origin"]}
    translator.body.append(translator.starttag(node, "data", "", CLASS="ev", **attributes))


def _depart_html(translator: Any, node: evidence_value) -> None:
    translator.body.append("</data>")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_node(evidence_value, html=(_visit_html, _depart_html))
    app.add_role("ev", EvidenceRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
