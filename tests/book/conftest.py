"""The book of this checkout, built once from nothing, and the server its pages are opened from."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
from sample import ROOT, Book, built
from visit import Server, serve

from kvlab.lab.runner import lab_names, run_labs
from kvlab.lab.stage import stage

sys.path.append(str(ROOT / "book" / "_ext"))


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """The whole book with its labs run and staged, apart from the checkout; runs that still stand are reused."""
    source = tmp_path_factory.mktemp("book")
    shutil.copy(ROOT / "_config.yml", source)
    shutil.copytree(ROOT / "labs", source / "labs")
    shutil.copytree(ROOT / "book", source / "book", ignore=shutil.ignore_patterns("_build", "labs"))
    stage(run_labs(lab_names()), source / "book" / "labs")
    return built(source)


@pytest.fixture(scope="session")
def server(book: Book) -> Iterator[Server]:
    with serve(book.html) as address:
        yield address
