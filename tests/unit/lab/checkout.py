"""A checkout in miniature: one lab and one claim, so that runner and ledger work on something small and real."""

from __future__ import annotations

from pathlib import Path

import nbformat
import yaml

from kvlab.lab.canonical import METADATA

PARAMETERS = 'device = "cpu"\nprofile = "quick"\nanswer = 42'
OPEN = """
import torch
from kvlab.lab import close_lab, open_lab, record
open_lab("01-tiny", device=torch.device(device), profile=profile, answer=answer)
"""
RECORD = 'record("answer", answer, "", "exact");'

CLAIM = {
    "id": "tiny-1",
    "lab": "01-tiny",
    "section": "Tiny",
    "statement": "The answer is 42.",
    "prediction": "42",
    "falsifier": "another number",
    "rules": [
        {"when": "answer == 42", "verdict": "holds", "because": "it is"},
        {"when": "answer == 41", "verdict": "does not hold", "because": "it is one less"},
    ],
    "expected": "holds",
}


class Checkout:
    """A folder with ``labs`` and ``book`` in which ``01-tiny`` can be written with any cells."""

    def __init__(self, root: Path):
        self.root = root
        (root / "labs").mkdir()
        (root / "book").mkdir()
        self.write_claims([CLAIM])
        self.write_lab([OPEN, RECORD, "close_lab();"])

    def write_claims(self, claims: list[dict]) -> None:
        (self.root / "book" / "claims.yml").write_text(yaml.safe_dump(claims))

    def write_lab(self, cells: list[str], *, parameters: str | None = PARAMETERS, kernel: bool = True) -> None:
        notebook = nbformat.v4.new_notebook(metadata=METADATA if kernel else {})
        if parameters is not None:
            notebook.cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(notebook, self.root / "labs" / "01-tiny.ipynb")
