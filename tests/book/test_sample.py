"""A small book: what the extension makes of runs, and that each mistake of an author stops the build."""

from __future__ import annotations

import nbformat
import pytest
from browsing import in_a_browser
from pages import broken_links, pages_in_html, pages_in_source, pages_in_toc, remote_assets, soup
from sample import ALT, INTRO, LAB, TOC, Book, built, sample_notebook, sample_run, write_sample
from visit import MODES, serve, visit

pytestmark = pytest.mark.book

RECORDED = f"book/recordings/a-gpu/{LAB}"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Book:
    """The sample book with a recording whose source is older, in a checkout with files that are no pages."""
    root = write_sample(tmp_path_factory.mktemp("small"))
    (root / RECORDED).mkdir(parents=True)
    run = sample_run()
    run.metrics["tokens"] = run.metrics["tokens"].model_copy(update={"value": 6000})
    run.write(root / RECORDED / "run.json")
    for stray in ("README.md", ".pytest_cache/README.md", ".venv/lib/package/notes.md", "src/notes.md"):
        (root / stray).parent.mkdir(parents=True, exist_ok=True)
        (root / stray).write_text("# Not a page\n")
    intro = root / "book" / "intro.md"
    intro.write_text(intro.read_text() + f"\nThere it was {{ev}}`{LAB}:@a-gpu:tokens`.\n")
    return built(root)


def test_it_builds_without_a_warning(small):
    assert small.returncode == 0, small.log


def test_only_the_pages_of_the_contents_are_built(small):
    assert pages_in_html(small.html) == pages_in_toc(small.source)


def test_numbers_come_from_the_run_with_exact_value_and_origin(small):
    numbers = soup(small.html, "book/intro").find_all("data")
    assert [number.text for number in numbers] == ["1.5\u00a0MiB", "8,192", "6,000"]
    assert [number["value"] for number in numbers] == ["1572864", "8192", "6000"]
    assert "kv_bytes (exact): lab 02-sample, a processor (cpu), 2026-01-02" in numbers[0]["title"]


def test_figures_carry_their_alternative_text(small):
    for page in ("book/intro", f"book/labs/{LAB}"):
        assert [picture["alt"] for picture in soup(small.html, page).find_all("img")] == [ALT]
    assert f"From lab {LAB}" in soup(small.html, "book/intro").figure.text


def test_a_verdict_links_to_the_section_that_settles_it(small):
    claim = soup(small.html, "book/claims").find(id="ledger-cause-1")
    live, recorded = claim.select("ul.claim-verdicts li")
    assert " ".join(live.text.split()) == "This build (cpu): does not hold an index past the end raises IndexError"
    assert live.a["href"] == f"labs/{LAB}.html#claim-cause-1"
    assert broken_links(small.html, "book/claims") == []
    assert recorded.select_one(".older").text == "older source"
    assert not live.select(".older")


def test_the_ledger_says_how_to_run_a_claim_again(small):
    claim = soup(small.html, "book/claims").find(id="ledger-cause-1")
    assert claim.code.text == "OutOfMemoryError"
    assert claim.find_all("code")[-1].text == "kvlab labs --lab 02 --fresh"


def test_a_claim_without_a_run_is_not_run_yet_everywhere(small):
    claim = soup(small.html, "book/claims").find(id="ledger-cause-2")
    assert [verdict.text for verdict in claim.select(".verdict")] == ["not run yet", "not run yet"]
    assert claim.find("a", class_="reference") is None


def test_verdicts_are_counted_for_each_device(small):
    rows = [row.find_all(["th", "td"]) for row in soup(small.html, "book/claims").select("table.counts tbody tr")]
    counts = {row[0].select_one(".verdict").text: [cell.text.strip() for cell in row[1:]] for row in rows}
    assert counts["does not hold"] == ["1", "1"]
    assert counts["not run yet"] == ["1", "1"]
    assert counts["holds"] == ["0", "0"]


def test_status_tells_what_ran_where_and_from_what(small):
    live, recorded = soup(small.html, "book/intro").select("table.lab-status tbody tr")
    assert live.text.split()[:4] == [LAB, "green", "60.0", "s"]
    assert "this build: cpu, quick, 2026-01-02 03:04 UTC, 0000000000" in live.text
    assert "recorded, a-gpu" in recorded.text
    assert "older source" in recorded.text
    facts = [entry.text.strip() for entry in soup(small.html, "book/intro").select("dl.facts")[0].find_all("dd")]
    assert facts == ["cpu", "a processor", "16.0\u00a0GiB", "3.11.7", "2.13.0"]


MISTAKES = {
    f"{{ev}}`{LAB}:no_such_key`": "recorded no no_such_key; it has",
    f"{{ev}}`{LAB}:seconds:q`": "format 'q' does not fit 1.25",
    f"{{ev}}`{LAB}:tokens:GiB.2f`": "GiB.2f is for bytes, the unit is tokens",
    f"{{ev}}`{LAB}`": "write lab:key:format",
    "{ev}`99-none:tokens`": "no run of 99-none",
    f"{{ev}}`{LAB}:@no-gpu:tokens`": f"no recording of {LAB} on no-gpu",
    f"{{ev}}`{LAB}:@misfiled:tokens`": "is a run of 03-other",
    f"{{ev}}`{LAB}:@unfinished:tokens`": "never finished",
    f"{{ev}}`{LAB}:@garbled:tokens`": "is not a run.json",
    f"```{{recorded-figure}} {LAB}:no_such\n```": "drew no no_such",
    f"```{{recorded-figure}} {LAB}\n```": "write lab:figure",
    "![](../book/_static/favicon.svg)": "favicon.svg has no alternative text",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Book:
    """The sample book with every mistake at once: each has to be named."""
    notebook = sample_notebook(alt=None, label="claim-cause-I")
    toc = TOC + "  - file: book/not-written\n"
    intro = "# Broken\n\n" + "\n\n".join(MISTAKES)
    root = write_sample(tmp_path_factory.mktemp("broken"), notebook=notebook, toc=toc, intro=intro)
    for device, run in {"misfiled": sample_run(lab="03-other"), "unfinished": sample_run(finished_at=None)}.items():
        folder = root / "book" / "recordings" / device / LAB
        folder.mkdir(parents=True)
        run.write(folder / "run.json")
    garbled = root / "book" / "recordings" / "garbled" / LAB
    garbled.mkdir(parents=True)
    (garbled / "run.json").write_text("{")
    return built(root)


def test_a_book_with_a_mistake_is_red(broken):
    assert broken.returncode == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_named_with_its_line(broken, mistake):
    before = "\n\n".join(list(MISTAKES)[: list(MISTAKES).index(mistake)])
    line = 3 + (before.count("\n") + 2 if before else 0)
    said = [
        said for said in broken.log.splitlines() if MISTAKES[mistake] in said and f"intro.md:{line}: WARNING" in said
    ]
    assert said, broken.log


def test_a_figure_of_a_lab_without_alternative_text_is_named(broken):
    assert any(f"{LAB}.ipynb" in said and "has no alternative text" in said for said in broken.log.splitlines())


def test_a_verdict_without_its_section_is_named(broken):
    assert "undefined label: 'claim-cause-1'" in broken.log


def test_a_page_of_the_contents_that_is_not_there_is_named(broken):
    assert "nonexisting document 'book/not-written'" in broken.log


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Book:
    """A book that builds, but whose first page breaks every rule of the browser checks."""
    intro = INTRO + (
        '\n<img src="http://other.invalid/a.png" alt="A picture that lies on another host.">\n'
        '\n<div style="width: 900px; color: #999; background: #aaa">Wide and pale.</div>\n'
        "\n<style>html .highlight .kn { color: #777; background: #888 }</style>\n"
        "\n```python\nimport os\nimport sys\n```\n"
        "\n<script>throw new Error('broken script')</script>\n"
        "\n[nowhere](../book/claims.md)\n"
        '\n<a href="claims.html#no-such-anchor">nowhere</a>\n'
    )
    root = write_sample(tmp_path_factory.mktemp("faulty"), intro=intro)
    nbformat.write(sample_notebook(), root / "book" / "labs" / "03-unlisted.ipynb")
    return built(root)


def test_the_link_check_finds_a_dead_anchor(faulty):
    assert faulty.returncode == 0, faulty.log
    assert broken_links(faulty.html, "book/intro") == ["claims.html#no-such-anchor"]


def test_the_host_check_finds_a_file_of_another_host(faulty):
    assert remote_assets(faulty.html, "book/intro") == ["http://other.invalid/a.png"]


def test_the_page_check_finds_a_page_missing_from_the_contents(faulty):
    assert pages_in_source(faulty.source) - pages_in_toc(faulty.source) == {"book/labs/03-unlisted"}


def contrast(violations: list[dict]) -> list[dict]:
    """The elements that are too pale."""
    return [node for found in violations if found["id"] == "color-contrast" for node in found["nodes"]]


def test_the_browser_checks_find_every_fault(faulty):
    with serve(faulty.html) as server:
        seen = in_a_browser(visit, server, "book/intro.html")
    assert seen.remote == ["http://other.invalid/a.png"]
    assert any("broken script" in error for error in seen.errors)
    pale = {mode: [node["html"] for node in contrast(found)] for mode, found in seen.violations.items()}
    assert sorted(mode for mode in pale if '<span class="kn">import</span>' in pale[mode]) == ["dark", "light"]
    assert any("Wide and pale" in html for html in pale["light"])
    assert seen.width["phone"] > MODES["phone"]
