"""What makes a notebook evidence: records, provenance, claims, runner, figures."""

from kvlab.lab.evidence import close_lab, open_lab, record
from kvlab.lab.figures import show_figure, style
from kvlab.lab.show import show_table

__all__ = ["close_lab", "open_lab", "record", "show_figure", "show_table", "style"]
