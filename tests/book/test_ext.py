"""How the extension writes values, reads its arguments and judges alternative text."""

from __future__ import annotations

import pytest
from kvbook import evidence, images
from kvbook.runs import EvidenceError

from kvlab.lab.run import Metric

pytestmark = pytest.mark.book


def metric(value, unit=""):
    return Metric(value=value, unit=unit, kind="exact")


@pytest.mark.parametrize(
    ("value", "unit", "spec", "text"),
    [
        (3 * 2**29, "bytes", "GiB.2f", "1.50\u00a0GiB"),
        (3 * 2**29, "bytes", "MiB,.1f", "1,536.0\u00a0MiB"),
        (46_080, "bytes", "KiB.0f", "45\u00a0KiB"),
        (46_080, "bytes", "", "46,080"),
        (8192, "tokens", ",d", "8,192"),
        (0.125, "", ".1%", "12.5%"),
        (True, "", "", "yes"),
        (False, "", "", "no"),
        ("IndexError", "", "", "IndexError"),
        ([1, 8192, 4096], "", "", "1, 8192, 4096"),
        (None, "", "", "none"),
    ],
)
def test_a_value_is_written_as_its_format_says(value, unit, spec, text):
    assert evidence.written(metric(value, unit), spec) == text


@pytest.mark.parametrize(
    ("value", "unit", "spec"),
    [
        (1.5, "s", ""),
        (1.5, "s", "d"),
        (8192, "tokens", "GiB.2f"),
        (2**30, "bytes", "GiB.2q"),
        (True, "", ".0f"),
        ("text", "", ".2f"),
        (None, "bytes", "GiB.2f"),
        ([1], "", "d"),
    ],
)
def test_a_format_that_does_not_fit_the_value_is_refused(value, unit, spec):
    with pytest.raises(EvidenceError):
        evidence.written(metric(value, unit), spec)


def test_a_reference_names_lab_device_key_and_format():
    assert evidence._parsed("02-x:key") == ("02-x", None, "key", "")
    assert evidence._parsed("02-x:key:GiB.2f") == ("02-x", None, "key", "GiB.2f")
    assert evidence._parsed("02-x:@h200:key:,d") == ("02-x", "h200", "key", ",d")
    for text in ("02-x", "02-x:@h200"):
        with pytest.raises(EvidenceError, match="write lab:key"):
            evidence._parsed(text)


def test_a_figure_is_named_by_lab_and_perhaps_device():
    assert images._parsed("02-x:memory") == ("02-x", None, "memory")
    assert images._parsed("02-x:@h200:memory") == ("02-x", "h200", "memory")
    for text in ("02-x", "02-x:h200:memory", "a:b:c:d"):
        with pytest.raises(EvidenceError, match="write lab:figure"):
            images._parsed(text)


@pytest.mark.parametrize("alt", ["", "  ", "../../_images/0af3.png", "memory.svg", "Memory over tokens"])
def test_alternative_text_that_tells_nothing_is_refused(alt):
    assert images.alt_problem(alt)


def test_a_sentence_is_alternative_text():
    assert images.alt_problem("Two lines: one rises until it is refused, one stays flat.") is None
