"""The miniature checkout, as the current folder of a test."""

from __future__ import annotations

import pytest
from checkout import Checkout

from kvlab.lab import evidence, provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Checkout:
    made = Checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert provenance.repository() == tmp_path
    monkeypatch.setattr(evidence, "_open", None)
    return made
