"""The bench of the allocator's model measures a run that goes through, and says what it rests on."""

import io

from rich.console import Console

from kvlab.bench import allocator
from kvlab.bench.allocator import AllocatorBench, bench_allocator, render


def test_it_runs_and_says_what_it_measured(monkeypatch):
    monkeypatch.setattr(allocator, "LIVE", 50)
    result = bench_allocator("quick")
    assert result.calls_per_s >= result.slowest_calls_per_s > 0
    assert all(size > 0 for size in result.bytes_per_live_block.values())
    assert AllocatorBench.model_validate_json(result.model_dump_json()) == result
    console = Console(file=io.StringIO(), width=120)
    console.print(render(result))
    assert "calls a second" in console.file.getvalue()
