"""The claims ledger as a page: every claim, what was predicted, what would refute it, and the verdict of each device.

Verdicts are computed here from the runs by the rules of ``book/claims.yml``, as in the labs and in the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from kvbook.runs import all_claims, all_runs, any_on_gpu, is_older, labs_of, recorded_devices
from kvbook.tables import definitions, link, paragraph, table
from kvlab.lab.claims import Claim, judge
from kvlab.lab.run import Run, VerdictName

logger = logging.getLogger(__name__)

Runs = dict[tuple[str, str | None], Run | None]

_MEANINGS: dict[VerdictName, str] = {
    "holds": "The prediction came true and the refutation did not happen.",
    "holds in part": "True under a condition, which the verdict names.",
    "does not hold": "The experiment showed something else.",
    "not run on this device": "The experiment needs another device. Not a pass.",
    "not run yet": "No run has judged it. Not a pass.",
}
assert set(_MEANINGS) == set(get_args(VerdictName))


@dataclass(frozen=True)
class Verdict:
    """What one device says about one claim."""

    verdict: VerdictName
    because: str
    older: bool


@dataclass(frozen=True)
class Column:
    """One device: the machine that built this book, or a recorded one."""

    device: str | None
    title: str


class ClaimsTable(SphinxDirective):
    """``{claims-table}``: an overview, then every claim in the article's order."""

    def run(self) -> list[nodes.Node]:
        claims = all_claims(self.env)
        runs = all_runs(self.env, self.get_location())
        columns = _columns(self.env, runs)
        verdicts = {claim.id: [self._verdict(claim, column, runs) for column in columns] for claim in claims}
        overview: list[nodes.Node] = [_counts(claims, columns, verdicts)]
        for index, column in enumerate(columns):
            overview += _glance(claims, column, verdicts, index)
        if not any_on_gpu(runs):
            overview.insert(0, paragraph("No run on a GPU has been recorded yet.", classes=["not-run"]))
        return [*overview, *self._sections(claims, columns, verdicts)]

    def _verdict(self, claim: Claim, column: Column, runs: Runs) -> Verdict:
        run = runs.get((claim.lab, column.device))
        judgement = judge(claim, run)
        if run is None or judgement.verdict == "not run yet":
            verdict = Verdict(judgement.verdict, "", older=False)
        else:
            verdict = Verdict(judgement.verdict, judgement.because, is_older(run))
        if run is not None and not judgement.as_expected and not is_older(run):
            message = "claim %s came out %r on %s, the ledger expects %r: %s"
            values = (claim.id, judgement.verdict, column.title, claim.expected, judgement.because)
            logger.warning(message, *values, location=self.get_location())
        return verdict

    def _sections(self, claims: list[Claim], columns: list[Column], verdicts: dict) -> Iterator[nodes.section]:
        for title, group in _by_section(claims).items():
            section = self._section(f"ledger {title}", title)
            section += [self._claim(claim, columns, verdicts[claim.id]) for claim in group]
            yield section

    def _claim(self, claim: Claim, columns: list[Column], verdicts: list[Verdict]) -> nodes.section:
        section = self._section(f"ledger-{claim.id}", claim.id)
        section["classes"].append("claim")
        section += paragraph(self._inline(claim.statement), classes=["claim-statement"])
        lines = [self._verdict_line(claim, *pair) for pair in zip(columns, verdicts, strict=True)]
        section += nodes.bullet_list("", *lines, classes=["claim-verdicts"])
        details = [("Predicted", claim.prediction), ("Would refute it", claim.falsifier)]
        pairs = [(term, self._inline(text)) for term, text in details if text]
        if claim.rules and claim.lab in labs_of(self.env):
            command = f"kvlab labs --lab {claim.lab.split('-')[0]} --fresh"
            pairs.append(("Run it yourself", nodes.literal(command, command)))
        if pairs:
            section += definitions(pairs, classes=["claim-details"])
        return section

    def _verdict_line(self, claim: Claim, column: Column, verdict: Verdict) -> nodes.list_item:
        parts: list[Any] = [nodes.inline("", f"{column.title}: ", classes=["where"])]
        parts.append(_badge(verdict.verdict, self._evidence_link(claim, verdict)))
        if verdict.older:
            parts += [" ", nodes.inline("", "older source", classes=["older"])]
        if verdict.because:
            parts += [" ", self._inline(verdict.because)]
        return nodes.list_item("", paragraph(*parts))

    def _evidence_link(self, claim: Claim, verdict: Verdict) -> nodes.Node:
        """The verdict as a link to the lab's section ``(claim-<id>)=``; a label that is not there fails the build."""
        if claim.lab not in labs_of(self.env) or verdict.verdict == "not run yet":
            return nodes.Text(verdict.verdict)
        return link(self.env, "ref", f"claim-{claim.id}".lower(), verdict.verdict)

    def _section(self, name: str, title: str) -> nodes.section:
        section = nodes.section("", nodes.title("", title), names=[nodes.fully_normalize_name(name)])
        self.state.document.note_explicit_target(section, section)
        self.set_source_info(section)
        return section

    def _inline(self, text: str) -> list[nodes.Node]:
        parsed, _ = self.parse_inline(text, lineno=self.lineno)
        return parsed


def _by_section(claims: list[Claim]) -> dict[str, list[Claim]]:
    """The claims of each part of the article, parts in the order of their first claim."""
    sections: dict[str, list[Claim]] = {}
    for claim in claims:
        sections.setdefault(claim.section, []).append(claim)
    return sections


def _columns(env: BuildEnvironment, runs: Runs) -> list[Column]:
    kinds = sorted({run.device.kind for (_, device), run in runs.items() if run and device is None})
    title = f"This build ({', '.join(kinds)})" if kinds else "This build"
    return [Column(None, title), *(Column(device, f"Recorded ({device})") for device in recorded_devices(env))]


def _badge(verdict: VerdictName, *content: nodes.Node) -> nodes.inline:
    return nodes.inline("", "", *content, classes=["verdict", f"verdict-{verdict.replace(' ', '-')}"])


def _counts(claims: list[Claim], columns: list[Column], verdicts: dict[str, list[Verdict]]) -> nodes.table:
    """The legend, with the number of claims for each verdict and device."""
    counts = [Counter(verdicts[claim.id][index].verdict for claim in claims) for index in range(len(columns))]
    rows = []
    for verdict, meaning in _MEANINGS.items():
        legend = [_badge(verdict, nodes.Text(verdict)), nodes.inline("", f" {meaning}", classes=["meaning"])]
        rows.append([legend, *(str(count[verdict]) for count in counts)])
    return table(["Verdict", *(column.title for column in columns)], rows, classes=["counts"])


def _glance(claims: list[Claim], column: Column, verdicts: dict[str, list[Verdict]], index: int) -> list[nodes.Node]:
    """All claims on one screen, a link for each."""
    parts = [(title, _chips(group, verdicts, index)) for title, group in _by_section(claims).items()]
    return [nodes.rubric("", column.title), definitions(parts, classes=["glance"])]


def _chips(claims: list[Claim], verdicts: dict[str, list[Verdict]], column: int) -> list[nodes.Node]:
    chips = [_chip(claim.id, verdicts[claim.id][column].verdict) for claim in claims]
    return [node for chip in chips for node in (chip, nodes.Text(" "))]


def _chip(claim: str, verdict: VerdictName) -> nodes.inline:
    spoken = nodes.inline("", f": {verdict}", classes=["spoken"])
    return _badge(verdict, nodes.reference("", claim, spoken, refid=f"ledger-{claim}", internal=True))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("claims-table", ClaimsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
