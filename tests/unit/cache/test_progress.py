"""Progress counts finished forwards and notices the others."""

import pytest
import torch

from kvlab.cache.errors import ReuseError, TornForwardError
from kvlab.cache.progress import Progress


def finish(progress: Progress) -> None:
    progress.begun = progress.finished = True


def test_columns_count_once_the_last_layer_is_done():
    progress = Progress()
    progress.plan(5, None)
    assert progress.columns == 0
    finish(progress)
    assert progress.columns == 5
    progress.plan(2, None)
    progress.plan(2, None)  # the mask may be asked for twice
    assert progress.columns == 5
    finish(progress)
    assert progress.columns == 7


def test_a_forward_that_began_and_never_finished_is_refused_until_reset():
    progress = Progress()
    progress.plan(5, None)
    progress.begun = True
    with pytest.raises(TornForwardError, match=r"after 0 tokens died .* reset\(\)"):
        progress.plan(1, None)
    progress.reset()
    progress.plan(1, None)


def test_the_mask_is_read_until_every_row_has_begun():
    progress = Progress()
    progress.plan(2, torch.tensor([[1, 1], [0, 0]]))
    finish(progress)
    assert (progress.pads, progress.settled) == ([0, 2], False)
    progress.plan(2, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1]]))
    finish(progress)
    assert (progress.pads, progress.settled) == ([0, 3], True)
    progress.plan(1, torch.zeros(2, 5))  # not read any more: that would wait for the device in every step
    assert progress.pads == [0, 3]


def test_positions_follow_in_columns_or_in_the_rows_own_count():
    progress = Progress()
    progress.plan(4, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    progress.check_positions(torch.tensor([[0, 1, 2, 3]]))
    progress.check_positions(torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]]))
    progress.check_positions(torch.empty(2, 4, device="meta"))
    with pytest.raises(ReuseError, match=r"positions end at \[9, 9\]"):
        progress.check_positions(torch.tensor([[6, 7, 8, 9]] * 2))
