"""Text comes in whole characters, and nothing of a stop string gets out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvlab.service.text import TextStream


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def pieces(tokenizer, text: str, stop=()) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stop)
    out = []
    for token in tokenizer.encode(text):
        out.append(stream.push(token))
        if stream.stopped:
            return out, True
    return [*out, stream.finish()], stream.stopped


@given(text=st.text(max_size=40))
def test_the_pieces_are_the_text(tokenizer, text):
    assert "".join(pieces(tokenizer, text)[0]) == text


def test_no_piece_ends_within_a_character(tokenizer):
    assert [piece for piece in pieces(tokenizer, "é🙂")[0] if piece] == ["é", "🙂"]


def test_bytes_that_are_no_text_do_not_hold_up_the_rest(tokenizer):
    stream = TextStream(tokenizer)
    tokens = tokenizer.encode("🙂")[:1] * 20 + tokenizer.encode("end")
    assert "".join([stream.push(token) for token in tokens] + [stream.finish()]).endswith("end")


@given(text=st.text(alphabet="abc", max_size=30), stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4)))
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stop):
    found = [place for entry in stop if (place := text.find(entry)) >= 0]
    out, stopped = pieces(tokenizer, text, stop)
    assert stopped == bool(found)
    if not found:
        assert "".join(out) == text
    else:  # the stop string that is complete first, not the one that begins first
        complete = min((text.find(entry) + len(entry), text.find(entry)) for entry in stop if entry in text)[0]
        begins = min(place for entry in stop if 0 <= (place := text.find(entry)) <= complete - len(entry))
        assert "".join(out) == text[:begins]
