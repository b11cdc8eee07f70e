"""The book of this checkout, built once from nothing, and a browser to open its pages with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
from sample import ROOT, Book, built
from visit import Browser, Server, open_browser, serve

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed with its module: while Playwright is open, this thread's event loop runs, and no test may have one."""
    yield from open_browser()


@pytest.fixture(scope="session")
def server(book: Book) -> Iterator[Server]:
    with serve(book.html) as address:
        yield address
