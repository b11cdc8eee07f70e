"""The few functions of PromQL that a lab uses where there is no Prometheus do what Prometheus does."""

from __future__ import annotations

import math
import socket
import sys
import threading

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_at_hand import needs_promtool, promtool
from waiting import until

from kvlab.service.monitoring import monitoring_files
from kvlab.service.monitoring.plain import HELD_MINUTES, PlainAlerts
from kvlab.service.monitoring.scrapes import Scrapes, held_for, increase, predict_linear, scraping

TEXT = """\
# TYPE asked_total counter
asked_total{outcome="completed",tenant="a"} %d
asked_total{outcome="completed",tenant="b"} 10
asked_total{outcome="never_fits",tenant="a"} 1
"""


def test_series_that_share_the_labels_asked_for_are_summed_scrape_by_scrape():
    scrapes = Scrapes()
    for at_s, asked in ((1.0, 3), (2.0, 5)):
        scrapes.add(at_s, TEXT % asked)
    assert scrapes.points("asked_total", outcome="completed") == [(1.0, 13.0), (2.0, 15.0)]
    assert scrapes.points("asked_total") == [(1.0, 14.0), (2.0, 16.0)]
    assert scrapes.points("asked_total", tenant="nobody") == []


def test_a_counter_that_falls_has_started_again_from_nought():
    points = [(0.0, 5.0), (1.0, 7.0), (2.0, 1.0), (3.0, 4.0)]
    assert increase(points, 3.0, 10.0) == 2 + 1 + 3


def test_only_the_window_counts():
    points = [(float(second), float(second)) for second in range(10)]
    assert increase(points, 9.0, 3.0) == 3
    assert increase(points, 9.0, 0.5) == 0


@given(st.floats(-5, 5), st.floats(-100, 100), st.floats(0, 60))
def test_a_straight_line_is_predicted_where_it_goes(slope, offset, ahead_s):
    points = [(float(second), offset + slope * second) for second in range(8)]
    expected = offset + slope * (7 + ahead_s)
    assert math.isclose(predict_linear(points, 7.0, 5.0, ahead_s), expected, abs_tol=1e-9)


def test_one_point_predicts_nothing():
    assert predict_linear([(1.0, 4.0)], 1.0, 5.0, 10.0) is None


def test_an_alert_fires_only_after_its_time_without_a_break():
    true_at = [(float(second), second != 3) for second in range(8)]
    assert held_for(true_at, 3.0) == [7.0]
    assert held_for(true_at, 0.0) == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]


VALUES = [1003, 1009, 1012, 5, 30, 31, 31, 90]  # a sample a second; the counter starts again once


@needs_promtool
@pytest.mark.parametrize(
    ("expression", "ours"),
    [
        ("predict_linear(x[5500ms], 10)", lambda points: predict_linear(points, 7.0, 5.5, 10.0)),
        # Prometheus stretches the seven seconds between its samples to the window
        ("increase(x[7500ms]) * 7 / 7.5", lambda points: increase(points, 7.0, 7.5)),
    ],
)
def test_prometheus_says_the_same(tmp_path, expression, ours):
    points = [(float(second), float(value)) for second, value in enumerate(VALUES)]
    check = {
        "evaluation_interval": "1s",
        "tests": [
            {
                "interval": "1s",
                "input_series": [{"series": "x", "values": " ".join(map(str, VALUES))}],
                # to four digits, since promtool compares floating-point numbers exactly
                "promql_expr_test": [
                    {
                        "expr": f"round({expression}, 0.0001)",
                        "eval_time": "7s",
                        "exp_samples": [{"labels": "{}", "value": round(ours(points), 4)}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "same.yml").write_text(yaml.safe_dump(check))
    done = promtool("test", "rules", "same.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_python_holds_an_alert_as_long_as_the_rules_say():
    rules = [rule for group in yaml.safe_load(monitoring_files()["alerts.yml"])["groups"] for rule in group["rules"]]
    held = {rule["alert"]: int(rule["for"].removesuffix("m")) for rule in rules if "for" in rule}
    assert {alert: minutes for alert, minutes in held.items() if not alert.startswith("Cuda")} == HELD_MINUTES


SERVICE = """\
# TYPE gpu_memory_used_bytes gauge
gpu_memory_used_bytes {used}
# TYPE gpu_memory_total_bytes gauge
gpu_memory_total_bytes 100
# TYPE engine_up gauge
engine_up {up}
# TYPE engine_restarts_total counter
engine_restarts_total {restarts}
# TYPE inference_requests_total counter
inference_requests_total{{outcome="completed",tenant="a"}} {asked}
inference_requests_total{{outcome="never_fits",tenant="a"}} {refused}
"""


def scraped(story) -> PlainAlerts:
    """The alerts over 15 minutes of a service, scraped every five seconds."""
    scrapes = Scrapes()
    for second in range(0, 900, 5):
        values = {"used": 10, "up": 1, "restarts": 0, "asked": second, "refused": 0} | story(second)
        scrapes.add(float(second), SERVICE.format(**values))
    return PlainAlerts(scrapes)


@pytest.mark.parametrize(
    ("alert", "story"),
    [
        ("GpuMemoryHigh", lambda second: {"used": 90}),
        ("GpuMemoryExhaustionAhead", lambda second: {"used": 10 + 0.05 * second}),
        ("EngineRestarted", lambda second: {"restarts": second // 600}),
        ("EngineDown", lambda second: {"up": int(second < 600)}),
        ("RequestsNeverFit", lambda second: {"refused": second // 20}),
    ],
)
def test_in_plain_python_an_alert_fires_in_its_story_and_no_other_does(alert, story):
    assert scraped(story).alerts(0, 900).keys() == {alert}


def test_in_plain_python_nothing_fires_for_a_service_that_is_well():
    assert scraped(lambda second: {}).alerts(0, 900) == {}


def test_who_reads_while_a_scrape_comes_in_sees_it_whole_or_not_at_all():
    """Read in the middle, the second of two series would end a scrape before the first, and a sum would fall."""
    scrapes, tenants = Scrapes(), [f"tenant{number}" for number in range(20)]
    more = "".join(f'inference_requests_total{{outcome="completed",tenant="{name}"}} 7\n' for name in tenants)
    text = SERVICE.format(used=90, up=1, restarts=0, asked=7, refused=0) + more

    def add() -> None:
        for second in range(150):
            scrapes.add(float(second), text)

    adding, switch_s = threading.Thread(target=add), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        adding.start()
        while adding.is_alive():
            assert {value for _, value in scrapes.points("inference_requests_total")} <= {21 * 7.0}
            assert PlainAlerts(scrapes).alerts(0, 900).keys() <= {"GpuMemoryHigh"}
    finally:
        sys.setswitchinterval(switch_s)
        adding.join()


def test_a_service_that_ends_within_its_answer_is_a_scrape_that_failed():
    """pytest makes an error of a thread that dies of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n# half")

        threading.Thread(target=answer).start()
        host, port = server.getsockname()
        with scraping(f"http://{host}:{port}", 60.0) as scrapes:
            until(lambda: scrapes.failed_s)
