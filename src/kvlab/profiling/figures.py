"""Draw a timeline offline, with a sentence for those who cannot see it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kvlab.printable import printable
from kvlab.profiling.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANGE_ROWS = 6
MOST_MARKS = 20
RESOLUTION = 1_500  # bars across the figure: what lies closer together is drawn as one

RANGE_COLOUR, CALL_COLOUR, KERNEL_COLOUR, FAILURE_COLOUR = "#2f7fd6", "#9467bd", "#009e73", "#d55e00"


def draw_timeline(timeline: Timeline, *, source: str) -> tuple[Figure, str]:
    """The timeline as a figure, and one sentence for those who cannot see it.

    One row for each range name, most time first, one for the calls and one for the kernels, and below them memory. A
    dashed line marks each failure. ``source`` ends the title: who recorded what.
    """
    from matplotlib.figure import Figure

    rows = _rows_of(timeline)
    heights = [0.5 + 0.28 * len(rows), 1.6] if timeline.memory else [0.5 + 0.28 * len(rows)]
    figure = Figure(figsize=(7.2, sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)
    end_s = _end(timeline)
    for row, (_, spans, colour) in enumerate(rows):
        axes[0, 0].broken_barh(_bars(spans, end_s / RESOLUTION), (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axes[0, 0].set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes[0, 0].set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes[0, 0].set_title(source, loc="left", fontsize=10)
    if timeline.memory:
        at, held = zip(*timeline.memory, strict=True)
        axes[1, 0].step(
            *_thinned(at, [size / 2**20 for size in held]), where="post", color=KERNEL_COLOUR, linestyle="-"
        )
        axes[1, 0].set_ylabel("MiB held")
        axes[1, 0].set_ylim(bottom=0)
    for panel in axes[:, 0]:
        for failure in timeline.failures[:MOST_MARKS]:
            panel.axvline(failure.at_s, color=FAILURE_COLOUR, linestyle="--", linewidth=1.4)
    axes[-1, 0].set_xlabel("seconds" + (" (dashed: a failure)" if timeline.failures else ""))
    axes[-1, 0].set_xlim(0, end_s * 1.01 or 1)
    return figure, _sentence(timeline, rows, end_s)


def _rows_of(timeline: Timeline) -> list[tuple[str, list[Span], str]]:
    named = _by_name(timeline.ranges)
    longest = sorted(named, key=lambda name: -sum(span.end_s - span.start_s for span in named[name]))[:MOST_RANGE_ROWS]
    rows = [(_short(name), named[name], RANGE_COLOUR) for name in sorted(longest, key=lambda n: named[n][0].start_s)]
    if timeline.calls:
        rows.append((timeline.calls_are, timeline.calls, CALL_COLOUR))
    if timeline.kernels:
        rows.append(("kernels", timeline.kernels, KERNEL_COLOUR))
    return rows


def _by_name(spans: list[Span]) -> dict[str, list[Span]]:
    named: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[span.name].append(span)
    return named


def _short(name: str) -> str:
    """A label that matplotlib takes as it is: printable, no mathematics, no longer than the margin."""
    text = printable(name, " ").replace("$", r"\$")
    return text if len(text) <= 22 else text[:21] + "…"


def _end(timeline: Timeline) -> float:
    ends = [span.end_s for spans in (timeline.ranges, timeline.calls, timeline.kernels) for span in spans]
    return max([*ends, *(at for at, _ in timeline.memory[-1:]), *(f.at_s for f in timeline.failures)], default=0.0)


def _bars(spans: list[Span], gap_s: float) -> list[tuple[float, float]]:
    """(start, length) of bars; spans closer together than ``gap_s`` are one, and none is thinner than that."""
    bars: list[list[float]] = []
    for span in sorted(spans, key=lambda one: one.start_s):
        if bars and span.start_s - bars[-1][1] < gap_s:
            bars[-1][1] = max(bars[-1][1], span.end_s)
        else:
            bars.append([span.start_s, max(span.end_s, span.start_s + gap_s)])
    return [(start, end - start) for start, end in bars]


def _thinned(at: tuple[float, ...], held: list[float]) -> tuple[list[float], list[float]]:
    """At most twice ``RESOLUTION`` points: of each stretch its lowest and its highest."""
    stride = -(-len(at) // RESOLUTION) or 1
    if stride == 1:
        return list(at), held
    kept = set()
    for start in range(0, len(at), stride):
        stretch = range(start, min(start + stride, len(at)))
        kept |= {min(stretch, key=held.__getitem__), max(stretch, key=held.__getitem__)}
    chosen = sorted(kept | {len(at) - 1})
    return [at[i] for i in chosen], [held[i] for i in chosen]


def _sentence(timeline: Timeline, rows: list, end_s: float) -> str:
    ran = ", ".join(f"{label} {_times(len(spans))}" for label, spans, _ in rows) or "nothing recorded"
    text = f"Timeline of {end_s:.2f} seconds: {ran}"
    if timeline.memory:
        text += f"; memory peaks at {max(held for _, held in timeline.memory) / 2**20:,.1f} MiB"
    if timeline.failures:
        last = timeline.failures[-1]
        text += f"; {_short(last.name)} fails at {last.at_s:.2f} s ({last.said})"
    return text + "."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
