"""A timeline holds what its source recorded, from either source, and its drawing comes with a sentence."""

import gzip
import io
import json
import sqlite3

import pytest
import torch
from nsys_exports import CALLS, KERNELS, MEMORY, MIB, needs_recorded, recorded, write_export

from kvlab.profiling import nvtx
from kvlab.profiling.figures import RESOLUTION, draw_timeline
from kvlab.profiling.timeline import Span, Timeline, TraceError, timeline_of_export, timeline_of_trace


def svg(figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def test_an_export_becomes_a_timeline(tmp_path):
    line = timeline_of_export(write_export(tmp_path / "a.sqlite"))
    assert (len(line.calls), len(line.kernels)) == (len(CALLS), len(KERNELS))
    assert (line.ranges[0].name, line.ranges[0].start_s, line.ranges[0].end_s) == (
        "request",
        0.0,
        pytest.approx(9.55e-6),
    )
    assert max(held for _, held in line.memory) == 30 * MIB
    assert len(line.memory) == sum(kind == 2 for *_, kind, _ in MEMORY)
    assert [(f.name, f.at_s, f.said) for f in line.failures] == [
        ("cudaMalloc_v3020", pytest.approx(8.6e-6), "returned 2")  # 600, "not yet", is no failure
    ]


def test_an_export_without_a_table_has_a_timeline_of_the_rest(tmp_path):
    for missing in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUDA_GPU_MEMORY_USAGE_EVENTS", "StringIds"):
        line = timeline_of_export(write_export(tmp_path / "a.sqlite", without=(missing,)))
        assert len(line.kernels) == len(KERNELS)
        figure, sentence = draw_timeline(line, source="a test")
        assert svg(figure)
        assert sentence.endswith(".")


@pytest.fixture
def trace(tmp_path):
    """A profiled program whose last allocation is refused."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        with nvtx.range("prefill"):
            kept = torch.ones(MIB)
        with pytest.raises(RuntimeError), nvtx.range("decode"):
            torch.empty(1 << 50)
        del kept
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_trace_of_the_profiler_shows_the_refusal_and_its_size(trace):
    line = timeline_of_trace(trace)
    assert [span.name for span in line.ranges] == ["prefill", "decode"]
    assert line.calls_are == "operators"
    assert "aten::ones" in {span.name for span in line.calls}
    assert max(held for _, held in line.memory) == 4 * MIB
    (failure,) = line.failures
    assert failure.said == f"{4 << 50:,} bytes refused"
    decode = line.ranges[1]
    assert decode.start_s <= failure.at_s <= decode.end_s


def test_a_part_of_a_timeline_keeps_what_touches_it_and_its_memory(trace):
    line = timeline_of_trace(trace)
    decode = line.ranges[1]
    part = line.between(decode.start_s, decode.end_s)
    assert (part.ranges[-1].name, part.ranges[-1].start_s) == ("decode", 0)
    assert part.ranges[-1].end_s == pytest.approx(decode.end_s - decode.start_s)
    assert part.memory[0] == (0, 4 * MIB)
    assert part.failures[0].at_s == pytest.approx(line.failures[0].at_s - decode.start_s)
    assert line.between(decode.end_s + 1, decode.end_s + 2) == Timeline(memory=[(0, 0)], calls_are="operators")


def test_a_trace_may_be_compressed(trace):
    packed = trace.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert timeline_of_trace(packed) == timeline_of_trace(trace)


def test_cuda_calls_take_the_place_of_operators(tmp_path):
    path = tmp_path / "cuda.json"
    names = {"cuda_runtime": "cudaMalloc", "cpu_op": "aten::mm", "kernel": "gemm", "user_annotation": "decode"}
    events = [{"ph": "X", "cat": c, "name": n, "ts": 10 + i, "dur": 2} for i, (c, n) in enumerate(names.items())]
    path.write_text(json.dumps({"traceEvents": events}))
    line = timeline_of_trace(path)
    assert line.calls_are == "CUDA calls"
    assert [[span.name for span in part] for part in (line.calls, line.kernels, line.ranges)] == [
        ["cudaMalloc"],
        ["gemm"],
        ["decode"],
    ]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"traceEvents": 5}', "[[[["])
def test_what_is_no_trace_is_refused_or_empty(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    try:
        assert timeline_of_trace(path) == Timeline(calls_are="operators")
    except TraceError as error:
        assert "\n" not in str(error)
    with pytest.raises(TraceError, match="cannot read"):
        timeline_of_trace(tmp_path)


def test_the_drawing_names_what_it_shows(tmp_path):
    figure, sentence = draw_timeline(timeline_of_export(write_export(tmp_path / "a.sqlite")), source="a test")
    assert sentence == (
        "Timeline of 0.00 seconds: request once, prefill once, decode 3 times, CUDA calls 7 times, kernels "
        "3 times; memory peaks at 30.0 MiB; cudaMalloc_v3020 fails at 0.00 s (returned 2)."
    )
    drawn = svg(figure)
    for label in ("prefill", "decode", "CUDA calls", "kernels", "MiB held", "a test"):
        assert f"<!-- {label} -->" in drawn


def test_a_figure_stays_small_whatever_was_recorded():
    calls = [Span("c", i * 1e-6, (i + 1) * 1e-6) for i in range(0, 200_000, 2)]
    memory = [(i * 2e-6, i) for i in range(100_000)]
    figure, _ = draw_timeline(Timeline(calls=calls, memory=memory), source="a test")
    assert len(svg(figure)) < 400_000
    bars, line = figure.axes[0].collections[0], figure.axes[1].lines[0]
    assert len(bars.get_paths()) <= RESOLUTION
    assert len(line.get_xdata()) <= 2 * RESOLUTION + 2
    assert max(line.get_ydata()) == pytest.approx((len(memory) - 1) / MIB)


def test_names_that_mean_something_to_the_drawing_are_only_names():
    span = Span("$\\frac{\x1b[2J$ <b>", 0, 1)
    figure, sentence = draw_timeline(Timeline(ranges=[span]), source="a test")
    assert "\x1b" not in svg(figure) + sentence


def test_nothing_recorded_is_drawn_as_nothing():
    figure, sentence = draw_timeline(Timeline(), source="a test")
    assert svg(figure)
    assert sentence == "Timeline of 0.00 seconds: nothing recorded."


@needs_recorded
def test_a_recorded_export_is_drawn():
    line = timeline_of_export(recorded())
    connection = sqlite3.connect(f"{recorded().as_uri()}?mode=ro&immutable=1", uri=True)
    assert (len(line.kernels),) == connection.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    connection.close()
    assert "kernels" in draw_timeline(line, source="a test")[1]
