"""One look for every figure of the book, and no figure without a sentence for those who cannot see it."""

from __future__ import annotations

import io
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.figure import Figure as MplFigure

from kvlab.lab.evidence import current
from kvlab.lab.run import Figure, LabError

COLOURS = ("#2f7fd6", "#d55e00", "#009e73", "#cc79a7", "#9467bd")
"""At least 3:1 against white and against the dark theme; lines differ in style too, not in colour alone."""

STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

_STYLE = {
    "figure.figsize": (7.2, 4.0),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": mpl.cycler(color=COLOURS) + mpl.cycler(linestyle=STYLES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@contextmanager
def style():
    """Draw inside ``with style():`` to get the book's look."""
    with mpl.rc_context(_STYLE):
        yield


def show_figure(figure: MplFigure, name: str, alt: str) -> None:
    """Save ``figure`` beside ``run.json`` as SVG and show it with ``alt`` as its text alternative.

    ``alt`` is a sentence that says what the figure shows; LabError if it is not one.
    """
    from IPython.display import display
    from matplotlib import pyplot

    if len(alt.split()) < 5 or not alt.rstrip().endswith("."):
        raise LabError(f"figure {name} needs a sentence as its alternative text, not {alt!r}")
    svg = _svg(figure, salt=name)
    pyplot.close(figure)
    lab = current()
    (lab.folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    lab.run.figures[name] = Figure(file=f"{name}.svg", alt=alt)
    display(
        {"image/svg+xml": svg, "text/plain": alt},
        raw=True,
        metadata={"image/svg+xml": {"alt": alt}},
    )


def _svg(figure: MplFigure, salt: str) -> str:
    """The figure as SVG that is the same for the same data: no date, fixed identifiers."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return buffer.getvalue()
