"""Draw a snapshot offline, with a sentence for each figure: blocks in their segments, memory over time."""

from typing import TYPE_CHECKING

from kvlab.memory.snapshot.records import ACTIVE_ALLOCATED, ACTIVE_PENDING_FREE, INACTIVE, Snapshot
from kvlab.memory.snapshot.summary import summarise
from kvlab.memory.snapshot.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1 << 20
_GIB = 1 << 30
_STYLES = {
    ACTIVE_ALLOCATED: ("#0072b2", None, "allocated"),
    ACTIVE_PENDING_FREE: ("#e69f00", "///", "freed, another stream still uses it"),
    INACTIVE: ("#f0f0f0", None, "free"),
}
_EDGE = "#333333"


def address_map(snapshot: Snapshot, *, max_segments: int = 40) -> "tuple[Figure, str]":
    """One bar for each segment, largest first, its blocks in order of address.

    Returns the figure and one sentence for those who cannot see it. At most ``max_segments`` are drawn; the
    sentence says how many there are.
    """
    segments = sorted(snapshot.segments, key=lambda s: (-s.total_size, s.address))[:max_segments]
    figure, axes = _figure(height=1.2 + 0.22 * max(len(segments), 1))
    for row, segment in enumerate(segments):
        for block in segment.blocks:
            colour, hatch, _ = _STYLES[block.state]
            axes.barh(
                row,
                block.size / _MIB,
                left=(block.address - segment.address) / _MIB,
                height=0.8,
                color=colour,
                hatch=hatch,
                edgecolor=_EDGE,
                linewidth=0.4,
            )
    axes.set_yticks(range(len(segments)), [f"{s.total_size / _MIB:.0f} MiB" for s in segments])
    axes.invert_yaxis()
    axes.set_xlabel("offset in the segment, MiB")
    axes.set_ylabel("segment")
    _legend(axes, [b.state for s in segments for b in s.blocks])
    return figure, _map_sentence(snapshot, len(segments))


def _map_sentence(snapshot: Snapshot, drawn: int) -> str:
    s = summarise(snapshot, top=0)
    shown = f"the {drawn} largest of {s.segment_count} segments" if drawn < s.segment_count else _count(drawn)
    return (
        f"Address map of {shown}: {_mib(s.allocated_bytes)} of {_mib(s.reserved_bytes)} reserved are"
        f" allocated; the {_mib(s.free_bytes)} free lie in {s.free_block_count} blocks, the largest"
        f" {_mib(s.largest_free_block_bytes)}, so fragmentation is {s.fragmentation:.2f}."
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"


def _count(segments: int) -> str:
    return "1 segment" if segments == 1 else f"{segments} segments"


def memory_over_time(snapshot: Snapshot, *, device: int = 0) -> "tuple[Figure, str]":
    """Requested and reserved memory after each recorded event, with a cross at each out-of-memory.

    Returns the figure and one sentence for those who cannot see it.
    """
    line = timeline(snapshot, device)
    figure, axes = _figure(height=3.6)
    reserved = [b / _GIB for b in line.reserved_bytes]
    requested = [b / _GIB for b in line.requested_bytes]
    axes.step(line.times_s, reserved, where="post", color="#d55e00", linestyle="--", label="reserved by PyTorch")
    axes.step(line.times_s, requested, where="post", color="#0072b2", label="requested by tensors")
    if line.oom_events:
        at = [i + 1 for i in line.oom_events]
        axes.plot(
            [line.times_s[i] for i in at],
            [reserved[i] for i in at],
            linestyle="none",
            marker="x",
            color=_EDGE,
            label="out of memory",
        )
    axes.set_xlabel("seconds since the first event" if line.has_clock else "event")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure, (
        f"Memory over {len(line.times_s) - 1:,} events: tensors ask for {requested[0]:.2f} GiB at first,"
        f" {max(requested):.2f} GiB at most and {requested[-1]:.2f} GiB at the end; PyTorch reserves"
        f" {reserved[0]:.2f} GiB at first and {max(reserved):.2f} GiB at most; {_ooms(len(line.oom_events))}."
    )


def _ooms(count: int) -> str:
    return {0: "it never runs out of memory", 1: "it runs out of memory once"}.get(
        count, f"it runs out of memory {count} times"
    )


def _figure(height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: "Axes", states: list[str]) -> None:
    from matplotlib.patches import Patch

    present = [style for state, style in _STYLES.items() if state in states]
    if present:
        axes.legend(
            handles=[Patch(facecolor=c, hatch=h, edgecolor=_EDGE, label=label) for c, h, label in present],
            loc="lower right",
        )
