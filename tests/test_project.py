"""The files around the package agree with one another, and imports keep their directions."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import yaml
from hypothesis import settings
from packaging.requirements import Requirement

from kvlab.lab.canonical import canonical

ROOT = Path(__file__).resolve().parents[1]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["dependencies"]) | set(project["optional-dependencies"]["dev"])


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return dict(re.match(r"([A-Za-z0-9_.-]+)==(.+)", line).groups() for line in lines)


def canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_environment_yml_installs_what_pyproject_declares():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert {line for line in pip if not line.startswith("--")} == declared()
    assert "--constraint constraints.txt" in pip
    assert "--editable ." in pip


def test_every_declared_package_is_pinned_to_a_version_it_allows():
    pins = {canonical_name(name): version for name, version in pinned().items()}
    for line in declared():
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonical_name(requirement.name)]), line


def test_no_pin_names_a_local_build():
    assert not [version for version in pinned().values() if "+" in version]


@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_lab_is_stored_in_canonical_form_without_outputs(lab):
    text = lab.read_text(encoding="utf-8")
    assert text == canonical(text), "run: python -m kvlab.lab.canonical labs/*.ipynb"


def test_there_are_labs():
    assert len(LABS) >= 3


@pytest.mark.parametrize(("lab", "following"), pairwise(LABS), ids=lambda path: path.stem)
def test_a_lab_ends_with_the_way_to_the_next_one(lab, following):
    last = nbformat.read(lab, as_version=4).cells[-1].source
    assert f"]({following.stem})" in last


PAGES = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]
YOURS = {"serve", "model", "inputs"}  # what a reader's own program has already


def names_nobody_made(page: str) -> set[str]:
    """Names that the Python on a page reads and neither makes nor imports, all its blocks taken together."""
    blocks = re.findall(r"^```(?:python|\{code-block\} py)\n(.*?)^```", page, re.M | re.S)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ExceptHandler) and node.name}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    made |= {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    return {node.id for node in names} - made - YOURS - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_code_to_paste_brings_what_it_uses(page):
    assert names_nobody_made(page.read_text(encoding="utf-8")) == set()


def test_a_name_that_is_not_imported_is_found():
    text = "```{code-block} py\nfrom torch.cuda import memory\n\nmemory.x(torch.OutOfMemoryError)\n```\n"
    assert names_nobody_made(text) == {"torch"}


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_imports_keep_the_directions_of_the_rooms():
    done = run(str(Path(sys.executable).with_name("lint-imports")))
    assert done.returncode == 0, done.stdout


def test_an_import_against_the_direction_is_found(tmp_path):
    (tmp_path / "kvlab").mkdir()
    for source in (ROOT / "src" / "kvlab").rglob("*.py"):
        target = tmp_path / source.relative_to(ROOT / "src")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    with (tmp_path / "kvlab" / "device.py").open("a") as device:
        device.write("\nfrom kvlab.memory import footprint as _footprint\n")
    config = ROOT / "pyproject.toml"
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--config", str(config), "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr


def test_style_is_kept():
    ruff = str(Path(sys.executable).with_name("ruff"))
    for arguments in (["check"], ["format", "--check"]):
        done = run(ruff, *arguments, "src", "tests", "book")
        assert done.returncode == 0, done.stdout


def test_code_on_the_page_is_no_wider_than_the_page():
    done = run(
        str(Path(sys.executable).with_name("ruff")), "format", "--check", "--isolated", "--line-length", "88", "labs"
    )
    assert done.returncode == 0, done.stdout + "\nrun: ruff format --isolated --line-length 88 labs"


def test_no_example_of_a_property_is_late_or_new_to_this_run(request):
    assert settings.default.deadline is None
    assert settings.default.derandomize or request.config.getoption("--hypothesis-profile")
