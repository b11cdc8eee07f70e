"""The page of one failure: plain HTML in one file, without scripts and without anything from elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any

from kvlab.memory.ledger import Ledger
from kvlab.memory.nvml.figure import memory_lines, samples_sentence
from kvlab.memory.nvml.readings import Mark, Sample
from kvlab.memory.oom import Diagnosis

_MIB = 1 << 20
_LONGEST_MESSAGE = 1 << 16
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 236, 64, 44
_COLOURS = ("#2f7fd6", "#d55e00", "#009e73", "#9467bd")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow: auto; padding: .8rem; border: 1px solid #8888; max-height: 24rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; border-bottom: 1px solid #8884; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } tr.account { font-weight: 600 }
body { background: #fff; color: #111 } a { color: #0b57d0 }
@media (prefers-color-scheme: dark) { body { background: #121212; color: #eee } a { color: #9ec1ff } }
svg text { font: 12px system-ui, sans-serif; fill: currentColor }
"""

WHAT_FILES_ARE = {
    "message.txt": "the exception with its causes, as Python prints it",
    "diagnosis.json": "how the message reads; kvlab diagnose message.txt says the same",
    "ledger.json": "the accounts of that moment and the differences between them",
    "samples.jsonl": "the last minute, one JSON object a line",
    "snapshot.pickle": "the segments and blocks of the allocator, for kvlab snapshot",
    "memory_stats.json": "the counters of torch.cuda.memory_stats",
    "facts.json": "versions, device, settings and limits",
}


@dataclass(frozen=True)
class Page:
    """Everything the page shows; what is None or empty was not had."""

    at: datetime
    headline: str
    message: str | None
    diagnosis: Diagnosis | None
    ledger: Ledger | None
    samples: Sequence[Sample]
    marks: Sequence[Mark]
    facts: dict[str, Any]
    files: Sequence[str]
    lost: dict[str, str]


def render(page: Page) -> str:
    """The page as HTML."""
    title = f"Out of memory, {page.at:%Y-%m-%d %H:%M:%S} UTC"
    sections = [*_cause(page), *_ledger(page.ledger), *_samples(page), *_facts(page), *_files(page)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><main><h1>{title}</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def _cause(page: Page) -> Iterable[str]:
    yield "<h2>What failed</h2>\n"
    if page.message is None:
        yield "<p>The allocator found no memory. No exception has left the recorded block: the program caught it.</p>\n"
        if told := page.facts.get("told_by_allocator"):
            yield _table(["told by the allocator", "MiB"], [[k, _mib(v)] for k, v in told.items() if k != "device"])
        return
    yield f"<p><strong>{escape(page.headline[:1000])}</strong></p>\n"
    if page.diagnosis:
        yield f"<p>Most likely cause: <strong>{page.diagnosis.cause.replace('_', ' ')}</strong></p>\n<ul>"
        yield "".join(f"<li>{escape(line)}</li>" for line in page.diagnosis.advice) + "</ul>\n"
    yield f"<details><summary>The whole traceback</summary><pre>{escape(_shortened(page.message))}</pre></details>\n"


def _shortened(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2
    return f"{message[:half]}\n... {len(message) - 2 * half:,} characters left out here ...\n{message[-half:]}"


def _ledger(ledger: Ledger | None) -> Iterable[str]:
    yield "<h2>Where the bytes were</h2>\n"
    if ledger is None:
        yield "<p>The accounts could not be read.</p>\n"
        return
    yield "<p>Each account in bold, then what leads from it to the next.</p>\n"
    yield _table(
        ["account or difference", "bytes", "MiB", "how it is known"],
        [[name, _number(size), _mib(size), how] for name, size, how in ledger.rows()],
        bold=lambda row: not row[0].startswith("+"),
    )
    yield "".join(f"<p>{escape(note)}</p>\n" for note in ledger.notes)


def _samples(page: Page) -> Iterable[str]:
    yield "<h2>The last minute</h2>\n"
    lines = memory_lines(page.samples)
    if not lines:
        yield "<p>No samples.</p>\n"
        return
    sentence = samples_sentence(page.samples, page.marks)
    yield f"<figure>{_chart(lines, page.marks, sentence)}<figcaption>{escape(sentence)}</figcaption></figure>\n"


def _chart(lines: dict[str, list[tuple[float, int]]], marks: Sequence[Mark], sentence: str) -> str:
    """Memory over seconds as an SVG picture, from 0 to the largest figure."""
    begin = min(points[0][0] for points in lines.values())
    span = max(max(points[-1][0] for points in lines.values()) - begin, 1e-9)
    top = max(size for points in lines.values() for _, size in points) or 1

    def x(t_s: float) -> float:
        return _LEFT + (t_s - begin) / span * (_WIDTH - _LEFT - 8)

    def y(size: float) -> float:
        return _HEIGHT - _BOTTOM - size / top * (_HEIGHT - _BOTTOM - 12 - 16 * len(lines))

    base = _HEIGHT - _BOTTOM
    parts = [f'<path d="M{_LEFT} {base}H{_WIDTH - 8}M{_LEFT} {y(top):.1f}H{_WIDTH - 8}" stroke="#8888"/>']
    parts += [
        f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
        for at, label in ((base, "0"), (y(top), f"{top / _MIB:,.0f} MiB"))
    ]
    parts.append(f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 10}" text-anchor="end">{span:.1f} s</text>')
    for place, (name, points) in enumerate(lines.items()):
        look = f'stroke="{_COLOURS[place % 4]}" stroke-dasharray="{_DASHES[place % 4]}" stroke-width="2" fill="none"'
        path = " ".join(f"{x(t_s):.1f},{y(size):.1f}" for t_s, size in points)
        key = 14 + 16 * place
        parts.append(f'<polyline points="{path}" {look}/><path d="M{_LEFT + 8} {key - 4}h24" {look}/>')
        parts.append(f'<text x="{_LEFT + 40}" y="{key}">{escape(name)}</text>')
    for mark in marks:
        if mark.t_s >= begin:
            at = f"{min(x(mark.t_s), _WIDTH - 8):.1f}"
            parts.append(f'<path d="M{at} {y(top):.1f}V{base}" stroke="#888" stroke-dasharray="2 3"/>')
            parts.append(f'<text x="{at}" y="{base + 14}" text-anchor="middle">{escape(mark.name[:24])}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{escape(sentence)}">'
        f"{''.join(parts)}</svg>"
    )


def _facts(page: Page) -> Iterable[str]:
    yield "<h2>What ran</h2>\n"
    flat = {name: value for name, value in page.facts.items() if not isinstance(value, dict) and value is not None}
    limits = {k: f"{_mib(v)} MiB" for k, v in (page.facts.get("limits") or {}).items() if v is not None}
    yield _table(["fact", "value"], [[name.replace("_", " "), str(value)] for name, value in (flat | limits).items()])


def _files(page: Page) -> Iterable[str]:
    yield "<h2>What was kept</h2>\n<ul>"
    for name in page.files:
        yield f'<li><a href="{escape(name)}">{escape(name)}</a>: {escape(WHAT_FILES_ARE.get(name, ""))}</li>'
    yield "</ul>\n"
    if page.lost:
        yield "<p>What could not be kept:</p>\n<ul>"
        yield "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in page.lost.items()) + "</ul>\n"


def _table(header: list[str], rows: Iterable[list[str]], bold: Any = None) -> str:
    numeric = {place for place, name in enumerate(header) if name in ("bytes", "MiB")}
    head = "".join(
        f"<th{' class=n' if place in numeric else ''}>{escape(name)}</th>" for place, name in enumerate(header)
    )
    body = "".join(
        f"<tr{' class=account' if bold and bold(row) else ''}>"
        + "".join(f"<td{' class=n' if place in numeric else ''}>{escape(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _number(size: int | None) -> str:
    return "not told" if size is None else f"{size:,}"


def _mib(size: int | None) -> str:
    return "not told" if size is None else f"{size / _MIB:,.1f}"
