"""The one form in which a lab is stored: no outputs, no counts, no editor's metadata, nbformat's own layout.

``python -m kvlab.lab.canonical labs/*.ipynb`` rewrites notebooks that were edited by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}


def canonical(text: str) -> str:
    """The canonical form of a notebook's JSON; the same text if it already is."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": tags} if (tags := cell.metadata.get("tags")) else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        before = path.read_text(encoding="utf-8")
        after = canonical(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"rewrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
