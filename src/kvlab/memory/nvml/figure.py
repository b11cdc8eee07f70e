"""Draw samples: memory over time with the program's events, and a sentence for those who cannot see it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.memory.nvml.readings import Mark, Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1 << 20
_LOOKS = (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#9467bd", ":"))


def memory_figure(samples: Sequence[Sample], marks: Sequence[Mark] = ()) -> "tuple[Figure, str]":
    """Used memory of each card, and resident memory of the process, in MiB over seconds.

    Returns the figure and one sentence for those who cannot see it. Raises ValueError without samples.
    """
    from matplotlib.figure import Figure

    lines = memory_lines(samples)
    if not lines:
        raise ValueError("no sample holds a figure of memory, so there is nothing to draw")
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, points) in enumerate(lines.items()):
        colour, style = _LOOKS[place % len(_LOOKS)]
        times, sizes = zip(*points, strict=True)
        axes.step(times, [b / _MIB for b in sizes], where="post", color=colour, linestyle=style, label=name)
    for mark in marks:
        axes.axvline(mark.t_s, color="#777777", linewidth=0.8, linestyle=":")
        axes.annotate(mark.name, (mark.t_s, 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=8,
                      ha="right", va="top")  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")
    axes.legend(loc="best")
    return figure, samples_sentence(samples, marks)


def memory_lines(samples: Sequence[Sample]) -> dict[str, list[tuple[float, int]]]:
    """For each card and for the process the (seconds, bytes) that were told, under the name of the line."""
    lines: dict[str, list[tuple[float, int]]] = {}
    for sample in samples:
        for card in sample.cards:
            if card.used_bytes is not None:
                lines.setdefault(f"GPU {card.card}, used", []).append((sample.t_s, card.used_bytes))
        if sample.process:
            name = f"process {sample.process.pid}, resident"
            lines.setdefault(name, []).append((sample.t_s, sample.process.resident_bytes))
    return lines


def samples_sentence(samples: Sequence[Sample], marks: Sequence[Mark] = ()) -> str:
    """What a drawing of these samples shows, for those who cannot see it."""
    told = "; ".join(
        f"{name}: {points[0][1] / _MIB:,.0f} MiB at first, {max(b for _, b in points) / _MIB:,.0f} MiB at most, "
        f"{points[-1][1] / _MIB:,.0f} MiB at the end"
        for name, points in memory_lines(samples).items()
    )
    events = f", with {len(marks)} event{'s' * (len(marks) > 1)} marked" if marks else ""
    return f"Memory in {len(samples):,} samples over {samples[-1].t_s - samples[0].t_s:.1f} s{events}: {told}."
