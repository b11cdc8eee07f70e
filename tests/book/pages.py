"""What a built book consists of: pages, links, anchors and images, read from its files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import yaml
from bs4 import BeautifulSoup


def pages_in_toc(source: Path) -> set[str]:
    """Every page the table of contents names, without suffix."""
    toc = yaml.safe_load((source / "book" / "_toc.yml").read_text(encoding="utf-8"))
    return {toc["root"], *_files(toc)}


def _files(entry: dict) -> list[str]:
    inner = [child for key in ("parts", "chapters", "sections") for child in entry.get(key, [])]
    own = [entry["file"]] if "file" in entry else []
    return own + [name for child in inner for name in _files(child)]


def pages_in_source(source: Path) -> set[str]:
    """Every text and staged lab that lies in the book's folder, without suffix."""
    paths = [*source.glob("book/*.md"), *source.glob("book/labs/*.ipynb")]
    return {path.relative_to(source).with_suffix("").as_posix() for path in paths}


def pages_in_html(html: Path) -> set[str]:
    """Every page that was built, without suffix; not the search page and the redirect to the first one."""
    paths = (path.relative_to(html) for path in html.rglob("*.html") if "_static" not in path.parts)
    return {path.with_suffix("").as_posix() for path in paths} - {"index", "search"}


def soup(html: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((html / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def broken_links(html: Path, page: str) -> list[str]:
    """Links, images, scripts and styles of ``page`` that lead to no file or anchor of the book."""
    document = soup(html, page)
    targets = [tag[name] for name in ("href", "src") for tag in document.find_all(**{name: True})]
    return [target for target in targets if not _resolves(html, page, target)]


def _resolves(html: Path, page: str, target: str) -> bool:
    if urlsplit(target).scheme:
        return True
    path, anchor = urldefrag(target)
    file = (html / f"{page}.html").parent / unquote(urlsplit(path).path) if path else html / f"{page}.html"
    if file.is_dir():
        file /= "index.html"
    if not file.is_file():
        return False
    if not anchor or file.suffix != ".html":
        return True
    return unquote(anchor) in _anchors(file.resolve())


@cache
def _anchors(file: Path) -> set[str]:
    document = BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser")
    return {tag["id"] for tag in document.find_all(id=True)}


def remote_assets(html: Path, page: str) -> list[str]:
    """Addresses on other hosts that a browser would fetch to show ``page``; links to read are not among them."""
    document = soup(html, page)
    sources = [tag["src"] for tag in document.find_all(src=True)]
    styles = [tag["href"] for tag in document.find_all("link", href=True)]
    return [address for address in sources + styles if urlsplit(address).netloc]
