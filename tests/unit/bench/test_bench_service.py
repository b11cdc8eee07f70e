"""The service's bench: its soak accounts for every request, and its checks can fail."""

import threading

import httpx
import pytest

from kvlab.bench.overhead import engine_overhead
from kvlab.bench.soak import Sample, Soak, counted_outcomes, soak, soak_checks
from kvlab.service.launch import running
from kvlab.service.tiny import save_tiny_model

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def service(model):
    with running("--model", model, "--budget", "24MiB", "--max-total-tokens", "256") as service:
        yield service


def test_a_short_soak_holds_its_promises(service, model):
    result = soak(service, model, seconds=4, interval_s=0.5)
    assert result.seen["completed"] > 0
    resident = ("resident bytes",)  # says nothing within seconds
    checks = [check for check in soak_checks(result, 24 * MIB) if not any(word in check.promise for word in resident)]
    assert [f"{check.promise}: {check.measured} {check.reason}" for check in checks if not check.holds] == []


def test_a_request_that_is_counted_later_is_waited_for(service, model):
    expected = counted_outcomes(service).total() + 1
    url, body = f"{service.url}/v1/completions", {"model": model, "prompt": "x", "max_tokens": 3}
    later = threading.Timer(1.0, httpx.post, [url], {"json": body, "timeout": 120})
    later.start()
    assert counted_outcomes(service, expected).total() == expected
    later.join()


def flat(**changes) -> Soak:
    """A soak in which nothing grows and everything is counted, but for the changes."""
    sample = {"seconds": 0, "held_bytes": MIB, "front_rss_bytes": 300 * MIB, "engine_rss_bytes": 300 * MIB}
    sample |= {"threads": 9, "descriptors": 20}
    fields = {
        "seconds": 10,
        "sent": 12,
        "seen": {"completed": 8, "invalid": 2, "left": 2},
        "counted": {"completed": 9, "invalid": 2, "cancelled": 1, "out_of_memory": 0, "engine_lost": 0},
        "samples": [Sample(**sample) for _ in range(10)],
        "idle": [Sample(**sample), Sample(**sample)],
    }
    return Soak(**fields | changes)


def red(result: Soak) -> list[str]:
    return [check.promise for check in soak_checks(result, 24 * MIB) if not check.holds]


def test_a_flat_soak_is_green():
    assert red(flat()) == []


def test_a_request_that_nothing_accounts_for_is_red():
    assert "no outcome" in red(flat(sent=13))[0]


def test_an_outcome_that_the_clients_did_not_see_is_red():
    counted = flat().counted | {"invalid": 1, "completed": 10}
    assert "no outcome" in red(flat(counted=counted))[0]


def test_growth_is_red():
    grown = flat()
    grown.samples[-2:] = [entry.model_copy(update={"engine_rss_bytes": 320 * MIB}) for entry in grown.samples[-2:]]
    assert "engine" in red(grown)[0]
    leaking = flat()
    leaking.idle[1] = leaking.idle[1].model_copy(update={"held_bytes": 3 * MIB, "descriptors": 21})
    assert len(red(leaking)) == 2


def test_the_engine_writes_what_generate_writes(model):
    check = engine_overhead(model, "cpu", tokens=8, pairs=1)
    assert check.measured > 0
