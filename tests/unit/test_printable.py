"""What is printed of a text that anyone may have made."""

import sys

from kvlab.printable import printable


def test_nothing_that_steers_a_terminal_or_breaks_a_line_is_left():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    left = printable(everything)
    assert len(left) == len(everything)
    assert left.isprintable()
    assert not {"\x1b", "\x07", "\n", "\r", "\x9b", "\u202e", "\ud800"} & set(left)


def test_what_prints_stays_as_it_is_and_the_place_of_the_rest_may_be_a_space():
    assert printable("gemm<float, 128> é 漢 [red]") == "gemm<float, 128> é 漢 [red]"
    assert printable("a\x1b[2J\n", " ") == "a [2J "
    assert printable("a\n") == "a\N{REPLACEMENT CHARACTER}"
