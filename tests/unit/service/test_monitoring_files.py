"""``kvlab monitoring`` writes into a folder of its own, over nobody's files, with the addresses it was given."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from prometheus_at_hand import needs_prometheus

from kvlab.service.monitoring import FILES, MonitoringError, monitoring_files, prometheus, write_monitoring
from kvlab.service.monitoring.prometheus import run_prometheus


def kvlab_monitoring(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvlab.cli", "monitoring", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_writes_the_files_and_names_them_in_json(tmp_path):
    done = kvlab_monitoring(tmp_path / "new" / "folder", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "new" / "folder"), "files": list(FILES)}
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == set(FILES)


def test_writing_the_same_again_is_no_harm_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_monitoring(tmp_path)
    write_monitoring(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_with_other_content_is_kept_and_named_in_one_line(tmp_path):
    (tmp_path / "prometheus.yml").write_text("mine")
    done = kvlab_monitoring(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvlab: .* has its own prometheus\.yml: .*--force\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.yml"]
    assert (tmp_path / "prometheus.yml").read_text() == "mine"
    assert kvlab_monitoring(tmp_path, "--force").returncode == 0
    assert (tmp_path / "prometheus.yml").read_text() == monitoring_files()["prometheus.yml"]


@pytest.mark.parametrize("bad", [["FILE"], ["/proc/no"], ["DIR", "--target", "8000"], ["DIR", "--speed-up", "0"]])
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, bad):
    (tmp_path / "file").write_text("")
    places = {"FILE": tmp_path / "file", "DIR": tmp_path / "dir"}
    done = kvlab_monitoring(*[places.get(word, word) for word in bad])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_a_name_in_use_by_what_is_no_file_is_refused_at_once(tmp_path, options):
    os.mkfifo(tmp_path / "alerts.yml")
    done = kvlab_monitoring(tmp_path, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "alerts.yml, which is no file" in done.stderr


@pytest.mark.parametrize("target", ["gpu-7", "gpu-7:٨٠٠٠", "a b:1", "a:1\n"])
def test_a_target_that_prometheus_would_not_take_is_refused(target):
    with pytest.raises(MonitoringError, match="HOST:PORT"):
        monitoring_files(target=target)


@pytest.mark.parametrize("runbook", ["", "a b", 'a"', "a#b", "a\nb", "{{ .x }}", "a\x1b", "a\ud800"])
def test_a_runbook_that_would_break_the_yaml_is_refused(runbook):
    with pytest.raises(MonitoringError, match="one address"):
        monitoring_files(runbook=runbook)


def test_the_addresses_given_are_the_ones_written():
    texts = monitoring_files(target="gpu-7:9100", runbook="https://wiki.example/kv")
    (job,) = yaml.safe_load(texts["prometheus.yml"])["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gpu-7:9100"]}]
    links = [
        rule["annotations"]["runbook_url"]
        for group in yaml.safe_load(texts["alerts.yml"])["groups"]
        for rule in group["rules"]
    ]
    assert all(link.startswith("https://wiki.example/kv#") for link in links)
    assert json.loads(texts["dashboard.json"])["links"][0]["url"].startswith("https://wiki.example/kv#")


DURATION = re.compile(r"\b\d+(?:ms|s|m|h)\b")


def test_sped_up_every_duration_is_shorter_and_every_threshold_the_same():
    as_it_is, faster = monitoring_files(), monitoring_files(speed_up=60)
    assert "[5m]" in as_it_is["recording.yml"]
    assert "[5s]" in faster["recording.yml"]
    assert yaml.safe_load(faster["prometheus.yml"])["global"]["scrape_interval"] == "83ms"
    assert "for: 2s" in faster["alerts.yml"]
    assert "gpu_memory_used_bytes[2s], 30) >" in faster["alerts.yml"]
    for name in FILES:
        assert not set(DURATION.findall(faster[name])) & {"1m", "2m", "3m", "5m"}
        without = [re.sub(r", 1800\)|, 30\)", "", DURATION.sub("", texts[name])) for texts in (as_it_is, faster)]
        assert without[0] == without[1]


def test_the_files_are_in_the_wheel(repository):
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["kvlab.service.monitoring"]
    folder = repository / "src" / "kvlab" / "service" / "monitoring"
    assert {path.name for pattern in patterns for path in folder.glob(pattern)} == set(FILES)


def test_without_prometheus_a_run_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MonitoringError, match="apt-get install prometheus"), run_prometheus(tmp_path, "127.0.0.1:1"):
        pass


@needs_prometheus
def test_a_port_that_somebody_took_meanwhile_is_left_to_them(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], prometheus.free_port()])
        monkeypatch.setattr(prometheus, "free_port", lambda: next(ports))
        with run_prometheus(tmp_path, "127.0.0.1:1") as running:
            assert running.query("vector(7)")[0].points[0][1] == 7


@needs_prometheus
def test_a_prometheus_that_does_not_start_says_why_in_one_line(tmp_path):
    (tmp_path / "data").write_text("in the way of its data")
    with (
        pytest.raises(MonitoringError, match="did not become ready: .+") as caught,
        run_prometheus(tmp_path, "127.0.0.1:1"),
    ):
        pass
    assert "\n" not in str(caught.value)
