"""The book builds from nothing without a warning, and every page of it is whole."""

from __future__ import annotations

import json

import pytest
from kvbook.images import alt_problem
from pages import broken_links, pages_in_html, pages_in_source, pages_in_toc, remote_assets, soup
from sample import ROOT

pytestmark = pytest.mark.book

PAGES = sorted(pages_in_toc(ROOT))


def test_the_book_builds_without_a_warning(book):
    assert book.returncode == 0, book.log
    assert "WARNING" not in book.log


def test_pages_are_those_of_the_table_of_contents(book):
    assert pages_in_html(book.html) == pages_in_toc(book.source) == pages_in_source(book.source)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(book, page):
    assert broken_links(book.html, page) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_file_of_another_host_is_needed(book, page):
    assert remote_assets(book.html, page) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_says_in_a_sentence_what_it_shows(book, page):
    pictures = soup(book.html, page).find_all("img")
    assert [problem for picture in pictures if (problem := alt_problem(picture.get("alt", "")))] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_heading_of_the_first_level_and_a_language(book, page):
    document = soup(book.html, page)
    assert len(document.select("article.bd-article h1")) == 1
    assert document.html["lang"] == "en"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_folder_of_the_machine_it_was_built_on(book, page):
    text = (book.html / f"{page}.html").read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert str(book.source) not in text


def test_the_search_index_knows_the_terms_of_the_subject(book):
    index = (book.html / "searchindex.js").read_text(encoding="utf-8")
    terms = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    assert {"evict", "segment", "cach", "window"} <= set(terms)
