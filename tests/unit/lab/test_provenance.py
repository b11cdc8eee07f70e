"""A run says what it was made of."""

import subprocess

import pytest

from kvlab.lab import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("labs/01-a.ipynb", "book/recordings/cpu/01-a/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        (None, False),
        ("book/recordings/cpu/01-a/run.json", False),  # or every lab of one recording but the first would be
        ("book/recordings/cpu/02-b.json", False),
        ("labs/01-a.ipynb", True),
        ("labs/new.ipynb", True),
    ],
)
def test_a_checkout_is_dirty_with_any_change_but_a_kept_run(checkout, changed, dirty):
    if changed:
        (checkout / changed).write_text("[]")
    assert provenance.source("01-a")["dirty"] is dirty


def test_without_a_repository_nothing_is_said(checkout):
    (checkout / ".git").rename(checkout / "elsewhere")
    assert provenance.source("01-a")["dirty"] is None
