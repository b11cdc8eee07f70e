"""The bench measures what it says: its instruments can tell, and each section runs at a small size."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from kvlab.bench.cache import (
    CELL_BYTES,
    PEERS,
    PLANS,
    RING,
    AppendRow,
    Bench,
    CacheBench,
    NewStorages,
    Peak,
    StepRow,
    append_checks,
    bench_cell,
    bench_prefills,
    bytes_checks,
    cell_config,
    copy_bandwidth,
    read_bandwidth,
    render,
    step_check,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    plan = dataclasses.replace(
        PLANS["quick"], seconds_per_cache=0, fewest_samples=1, watched_steps=20, prefill=(160, 32, 16, 1)
    )
    copied, read = copy_bandwidth(CPU, 2**22), read_bandwidth(CPU, 2**22)
    return Bench(plan, CPU, torch.float32, copied, read)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def test_a_cell_measures_every_cache_and_prices_it_against_the_floor(bench):
    rows = list(bench_cell(bench, "smollm2-135m", batch=2, window=128))
    assert [row.cache for row in rows] == list(PEERS)
    for row in rows:
        assert row.median_s > 0
        assert row.floor_bytes == 30 * 2 * 2 * (2 * 3 * 64 * 4)  # layers, k and v, read and write, new rows
        assert row.times_floor == pytest.approx(row.median_s * bench.copy_bytes_per_s / row.floor_bytes)
    assert rows[0].times_ring == 1


def test_a_cell_too_large_for_the_machine_takes_fewer_layers():
    config = cell_config("llama-3-8b", batch=4, window=16384, dtype=torch.float32)
    assert (config.num_hidden_layers, config.head_dim) == (3, 128)
    assert CELL_BYTES == 3 * (2 * 4 * 16384 * 8 * 128 * 4)
    assert cell_config("smollm2-135m", batch=1, window=512, dtype=torch.float32).num_hidden_layers == 30


def test_bytes_are_the_formula_and_steps_allocate_nothing(bench):
    for check in bytes_checks(bench):
        assert check.holds, check
        assert check.measured == 0


def test_a_prefill_peaks_at_the_window_and_a_full_cache_at_the_prompt(bench):
    rows, (peak, price) = bench_prefills(bench)
    held = {row.cache: row.held_bytes for row in rows}
    assert held["dynamic, growing"] == 160 * 2 * 3 * 64 * 4
    assert held[RING] == 32 * 2 * 3 * 64 * 4
    assert peak.holds, peak
    assert price.measured > 0
    assert price.holds is None


def append_row(cache: str, window: int, median_s: float) -> AppendRow:
    return AppendRow(
        shape="smollm2-135m", layers=30, batch=1, window=window, cache=cache, median_s=median_s,
        mean_s=median_s, times_ring=1, floor_bytes=1, times_floor=1,
    )  # fmt: skip


def test_append_promises_are_judged_on_smollm2_alone():
    rows = [
        append_row(RING, 512, 1.0),
        append_row(RING, 4096, 1.0),
        append_row("static sliding", 4096, 19.0),
        append_row(RING, 16384, 1.6),
        append_row(RING, 512, 9.0).model_copy(update={"batch": 4}),
    ]
    cheaper, growth = append_checks(rows)
    assert (cheaper.measured, cheaper.holds) == (19.0, False)
    assert (growth.measured, growth.holds) == (1.6, False)


@pytest.mark.parametrize(("ring_s", "holds", "is_slower"), [(0.9, True, False), (1.04, True, True), (1.2, False, True)])
def test_a_step_is_judged_against_the_fastest_peer_and_explained_where_it_is_slower(ring_s, holds, is_slower):
    rows = [
        StepRow(cache=name, median_s=seconds, times_ring=1, floor_bytes=1, times_floor=1)
        for name, seconds in {RING: ring_s, "slow": 5.0, "quick": 1.0}.items()
    ]
    check = step_check(rows)
    assert check.measured == pytest.approx(ring_s)
    assert check.holds is holds
    assert check.reason.startswith("fastest peer: quick")
    assert ("turns its sinks" in check.reason) is is_slower


def test_the_result_travels_as_json_and_prints_every_row(bench):
    prefills, checks = bench_prefills(bench)
    result = CacheBench(
        profile="quick", device="cpu", dtype="float32", threads=1, copy_bytes_per_s=1e9, read_bytes_per_s=1e9,
        appends=list(bench_cell(bench, "smollm2-135m", 1, 128)), step_window=4096,
        steps=[StepRow(cache=RING, median_s=1, times_ring=1, floor_bytes=1, times_floor=1)],
        prefill_tokens=160, prefill_window=32, prefill_chunk=16, prefills=prefills, checks=checks,
    )  # fmt: skip
    assert CacheBench.model_validate_json(result.model_dump_json()) == result
    page = io.StringIO()
    Console(file=page, width=200).print(render(result))
    for expected in [*PEERS, "ring, sinks not turned", "price of exact sinks", "Decode step at W=4096"]:
        assert expected in page.getvalue()


def test_the_watch_for_new_storages_sees_a_copy_and_no_view():
    known = torch.zeros(3)
    with NewStorages([known]) as watched:
        known.add_(1).view(3, 1)
        assert watched.count == 0
        torch.cat([known, known])
    assert watched.count == 1


def test_the_peak_follows_tensors_to_their_end_and_views_to_their_storage():
    with Peak(CPU) as peak:
        first = torch.zeros(1000)
        view = first.view(10, 100)
        del first
        second = torch.zeros(500)
        assert peak.live == 6000
        del view
        assert peak.live == 2000
        del second
    assert (peak.live, peak.bytes) == (0, 6000)
