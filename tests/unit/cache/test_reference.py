"""The reference itself: where nothing is evicted it is the model, and it can tell a wrong rule."""

import pytest
import torch
from reference import ShiftRule, reference_logits
from zoo import CELLS, SPECIMENS, build, text


@pytest.mark.parametrize(("name", "how"), CELLS)
def test_where_nothing_is_evicted_the_reference_is_the_unchanged_model(name, how):
    model, ids = build(name, how), text(12)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    got = reference_logits(model, SPECIMENS[name].rules(sinks=2, window=10), ids)
    assert float((got - expected).abs().max()) < 2e-5


def test_a_shift_rule_drops_in_bursts_from_high_to_low():
    seen = ShiftRule(high=4, low=2, rope=None).seen(8)
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [2, 3, 4],
        [2, 3, 4, 5],
        [4, 5, 6],
        [4, 5, 6, 7],
    ]
