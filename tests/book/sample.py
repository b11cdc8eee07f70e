"""A small book that stands by itself: this project's extension and configuration, one lab, one claim.

The run is a real :class:`Run`, written and read like any other; its numbers are those of this file, for the
checks of the page only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import nbformat

from kvlab.lab.provenance import sha256_of, src_sha256
from kvlab.lab.run import Device, Figure, Metric, Run, Source

ROOT = Path(__file__).resolve().parents[2]
LAB = "02-sample"
ALT = "One line that rises from zero to the budget and stops there."
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" viewBox="0 0 200 100">'
    '<rect width="200" height="100" fill="#fff"/><path d="M10 90L190 10" stroke="#2f7fd6"/></svg>'
)
CLAIMS = f"""\
- id: cause-1
  lab: {LAB}
  section: Root cause
  statement: Writing past a fixed buffer raises `OutOfMemoryError`.
  prediction: It raises something else.
  falsifier: An out-of-memory exception.
  rules:
    - {{when: "exception == 'IndexError'", verdict: does not hold, because: an index past the end raises IndexError}}
  expected: does not hold
- id: cause-2
  lab: 99-later
  section: Root cause
  statement: Something that no lab has looked at.
"""
TOC = """\
format: jb-book
root: book/intro
chapters:
  - file: book/labs/02-sample
  - file: book/claims
"""
INTRO = """\
# Sample

The cache holds {ev}`02-sample:kv_bytes:MiB.1f`, {ev}`02-sample:tokens` tokens.

```{recorded-figure} 02-sample:memory
:name: memory
Memory over tokens.
```

```{lab-status}
```

```{machine-details}
```
"""
CLAIMS_PAGE = """\
# Claims

```{claims-table}
```
"""


def sample_run(**changes: object) -> Run:
    """A finished run of the sample lab, with ``changes`` to its fields."""
    fields = {
        "lab": LAB,
        "profile": "quick",
        "parameters": {"device": "cpu"},
        "started_at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "finished_at": datetime(2026, 1, 2, 3, 5, tzinfo=UTC),
        "duration_s": 60.0,
        "device": Device(kind="cpu", name="a processor", total_bytes=2**34),
        "software": {"python": "3.11.7", "torch": "2.13.0"},
        "source": Source(commit="0" * 40, dirty=False, lab_sha256=None, src_sha256="", environment_sha256=""),
        "metrics": {
            "kv_bytes": Metric(value=3 * 2**19, unit="bytes", kind="exact"),
            "tokens": Metric(value=8192, unit="tokens", kind="exact"),
            "seconds": Metric(value=1.25, unit="s", kind="timing"),
            "exception": Metric(value="IndexError", unit="", kind="exact"),
            "silent": Metric(value=True, unit="", kind="exact"),
            "shape": Metric(value=[1, 8192, 4096], unit="", kind="exact"),
        },
        "figures": {"memory": Figure(file="memory.svg", alt=ALT)},
    }
    return Run(**(fields | changes))


def sample_notebook(alt: str | None = ALT, label: str = "claim-cause-1") -> nbformat.NotebookNode:
    """An executed lab with one figure and the section that settles the claim."""
    figure = nbformat.v4.new_output(
        "display_data",
        data={"image/svg+xml": SVG, "text/plain": "figure"},
        metadata={"image/svg+xml": {"alt": alt} if alt is not None else {}},
    )
    cells = [
        nbformat.v4.new_markdown_cell("# A lab"),
        nbformat.v4.new_markdown_cell(f"({label})=\n## Past the end"),
        nbformat.v4.new_code_cell("show()", execution_count=1, outputs=[figure]),
    ]
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def write_sample(root: Path, *, notebook: nbformat.NotebookNode | None = None, **pages: str) -> Path:
    """Write the sample book to ``root``; ``pages`` replaces texts (intro, claims, toc) to break one thing at a time."""
    for name in ("_config.yml", "book/_ext", "book/_static", "book/_templates", "book/references.bib"):
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)
    staged = root / "book" / "labs"
    (staged / LAB).mkdir(parents=True)
    (staged / LAB / "memory.svg").write_text(SVG)
    notebook = notebook or sample_notebook()
    source = root / "labs" / f"{LAB}.ipynb"
    for path in (source, staged / f"{LAB}.ipynb"):
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
    hashes = {"lab_sha256": sha256_of(source, root=source.parent), "src_sha256": src_sha256()}
    run = sample_run()
    run.source = run.source.model_copy(update=hashes)
    run.write(staged / LAB / "run.json")
    (root / "book" / "claims.yml").write_text(CLAIMS)
    (root / "book" / "intro.md").write_text(pages.get("intro", INTRO))
    (root / "book" / "claims.md").write_text(pages.get("claims", CLAIMS_PAGE))
    (root / "book" / "_toc.yml").write_text(pages.get("toc", TOC))
    return root


def build(root: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Build the book in ``root`` as the Makefile does, from nothing, into ``output``."""
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", ".", "--toc", "book/_toc.yml"]
    command += ["--path-output", str(output), "-W", "-n", "--keep-going"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800, check=False)


@dataclass(frozen=True)
class Book:
    """A built book: its source tree, its pages, and what the build said."""

    source: Path
    html: Path
    returncode: int
    log: str


def built(source: Path) -> Book:
    done = build(source, source / "out")
    return Book(source, source / "out" / "_build" / "html", done.returncode, done.stdout + done.stderr)
