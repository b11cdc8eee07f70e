"""The engine under a real budget: who ends when the allocator refuses, and what is free afterwards."""

import subprocess
import sys

import pytest

from kvlab.budget import run_under_budget
from kvlab.memory.footprint import kv_bytes_per_token
from kvlab.model import load_config
from kvlab.service.engine_child import EXIT_OUT_OF_MEMORY
from kvlab.service.price import Price
from kvlab.service.rehearsal import SMALL_OBJECTS_BYTES
from kvlab.service.settings import EngineSettings

MIB = 2**20
BUDGET_BYTES = 16 * MIB

SHORT, LONG = (20, 30), (1_500, 30)  # prompt tokens, max_tokens
LOAD = [SHORT, SHORT, SHORT, LONG]
STATIC = {"policy": "static", "max_total_tokens": 256}
SLIDING = {"policy": "sliding", "max_total_tokens": 256}
GROWING = {"policy": "growing", "max_total_tokens": 256}
CASES = {
    "free": (LOAD, STATIC),
    "keep": (LOAD, {**STATIC, "on_oom": "keep"}),
    "exit": (LOAD, {**STATIC, "on_oom": "exit"}),
    "sliding": (LOAD, SLIDING),
    "turns": ([(5, 3), (5, 3)], GROWING),
    "no room for the prompt": ([SHORT, (2_500_000, 5), SHORT], GROWING),
    "told at once": ([(200, 3)] * 3, GROWING),
    "one static": ([(300, 100)], STATIC),
    "one growing": ([(300, 100)], GROWING),
    "one sliding": ([(300, 100)], SLIDING),
    "beyond the vocabulary": ([SHORT], GROWING),
}


def drive(meter, model, cases):
    """What the engine says to each case, in one process under one budget."""
    import queue

    import torch

    from kvlab.model import load_model
    from kvlab.service import engine as engine_room
    from kvlab.service.engine import Engine
    from kvlab.service.messages import Start, Stop
    from kvlab.service.rehearsal import step_room_bytes
    from kvlab.service.settings import EngineSettings

    def settings_of(fields):
        return EngineSettings(model=model, budget_bytes=meter.budget_bytes, **fields)

    def seen(name, commands, fields):
        said, waiting = [], queue.SimpleQueue()
        engine_room.STATUS_INTERVAL_S = 0.0 if name in always_told else 0.05
        engine = Engine(loaded, settings_of(fields), meter, lambda kind, content: said.append(content))
        token = 70_000 if name == "beyond the vocabulary" else 7
        for number, (prompt_tokens, max_tokens) in enumerate(commands):
            waiting.put(Start(number, token.to_bytes(4, "little") * prompt_tokens, max_tokens, 0.0, None, ()))
        waiting.put(Stop())
        error, before_bytes = None, meter.held_bytes
        try:
            engine.run(waiting)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        held_bytes = meter.held_bytes
        engine.last_error = None
        ended = [entry for round in said for entry in round.ended]
        tokens = [request for round in said for request, _ in round.tokens]
        statuses = [round.status for round in said if round.status]
        return {
            "error": error,
            "ended": {entry.request_id: entry.reason for entry in ended},
            "messages": {entry.request_id: entry.message for entry in ended},
            "tokens": {entry.request_id: tokens.count(entry.request_id) for entry in ended},
            "order": tokens,
            "rounds": [round.tokens for round in said],
            "held_bytes": held_bytes,
            "held_bytes_once_cleared": meter.held_bytes,
            "peak_bytes": max((status.held_bytes for status in statuses), default=0) - before_bytes,
            "evicted": statuses[-1].evicted_tokens if statuses else 0,
        }

    always_told = {"told at once", "one static", "one growing", "one sliding"}  # of these each step counts
    torch.set_num_threads(1)
    loaded = load_model(model)
    step_room_bytes(loaded, settings_of({"policy": "growing"}), 512)
    meter.arm()
    return {name: seen(name, *case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def cases(tiny_model):
    outcome = run_under_budget(drive, str(tiny_model), CASES, budget_bytes=BUDGET_BYTES)
    assert outcome.ok, outcome.error
    return outcome.value


def test_a_refused_allocation_ends_one_request_and_frees_what_it_held(cases):
    seen = cases["free"]
    assert seen["ended"] == {0: "length", 1: "length", 2: "length", 3: "out_of_memory"}
    assert seen["tokens"] == {0: 30, 1: 30, 2: 30, 3: 0}
    assert f"you tried to allocate {1_530 * 1024} bytes" in seen["messages"][3]
    assert seen["held_bytes"] < MIB


def test_an_exception_that_is_kept_keeps_the_memory_of_its_request(cases):
    seen = cases["keep"]
    assert seen["ended"][3] == "out_of_memory"
    assert seen["held_bytes"] > 6 * MIB
    assert seen["held_bytes_once_cleared"] < MIB


def test_an_engine_that_does_not_catch_loses_all_in_flight(cases):
    seen = cases["exit"]
    assert "DefaultCPUAllocator: can't allocate memory" in seen["error"]
    assert seen["ended"] == {}


def test_a_window_serves_the_same_load_on_the_same_budget(cases):
    seen = cases["sliding"]
    assert seen["tokens"] == {0: 30, 1: 30, 2: 30, 3: 30}
    assert seen["evicted"] == 1_500 + 30 - 1 - 256
    assert seen["held_bytes"] < MIB


def test_requests_take_turns_a_token_each(cases):
    assert cases["turns"]["order"] == [0, 1, 0, 1, 0, 1]


def test_a_prompt_that_there_is_no_room_to_take_in_ends_its_own_request_alone(cases):
    seen = cases["no room for the prompt"]
    assert seen["error"] is None
    assert seen["ended"] == {0: "length", 1: "out_of_memory", 2: "length"}
    assert seen["tokens"] == {0: 30, 1: 0, 2: 30}
    assert seen["held_bytes"] < MIB


def test_an_engine_speaks_within_a_round_where_its_steps_are_slow(cases):
    """With an interval of nought every step is slow: three requests of four chunks and two more tokens each."""
    rounds = cases["told at once"]["rounds"]
    assert len(rounds) >= 3 * 6
    assert max(map(len, rounds)) == 1


def test_a_failure_that_is_no_refusal_ends_the_engine_with_its_reason(cases):
    """A token beyond the vocabulary is an IndexError here; on CUDA it is an assert that spoils the device."""
    assert cases["beyond the vocabulary"]["error"] == "DeviceUnusable: IndexError: index out of range in self"


@pytest.mark.parametrize("policy", ["static", "growing", "sliding"])
def test_what_is_reserved_covers_what_is_held_and_little_more(cases, tiny_model, policy):
    config = load_config(tiny_model)
    bytes_per_token = kv_bytes_per_token(config, "float32")
    settings = EngineSettings(model="", policy=policy, max_total_tokens=256, budget_bytes=BUDGET_BYTES)
    reserved_bytes = Price.of(config, bytes_per_token, settings).tokens(400) * bytes_per_token
    seen = cases[f"one {policy}"]
    assert seen["ended"] == {0: "length"}
    assert 0.85 * reserved_bytes <= seen["peak_bytes"] <= reserved_bytes + SMALL_OBJECTS_BYTES


def test_an_engine_that_has_no_memory_for_a_command_ends_and_does_not_go_deaf():
    code = """
import queue, threading
from kvlab.service.engine_child import _listen

class Full:
    def recv(self):
        raise MemoryError

listening = threading.Thread(target=_listen, args=(Full(), queue.SimpleQueue()))
listening.start()
listening.join()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == EXIT_OUT_OF_MEMORY
