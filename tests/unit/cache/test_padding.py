"""Left padding is read, anything else is refused."""

import pytest
import torch

from kvlab.cache.errors import PaddingError
from kvlab.cache.padding import read_left_padding


def test_rows_begin_after_their_zeros_and_may_not_have_begun():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert read_left_padding(mask, 4) == [0, 2, 4]


@pytest.mark.parametrize("row", [[1, 1, 1, 0], [0, 1, 0, 1], [1, 0, 1, 1]])
def test_right_padding_and_holes_are_refused(row):
    with pytest.raises(PaddingError, match="pad on the left, without holes"):
        read_left_padding(torch.tensor([row]), 4)


@pytest.mark.parametrize("shape", [(1, 3), (1, 5), (1, 1, 4, 4)])
def test_a_mask_that_is_not_as_wide_as_the_text_is_refused(shape):
    with pytest.raises(PaddingError, match="held text and chunk together are 4 columns"):
        read_left_padding(torch.ones(shape), 4)
