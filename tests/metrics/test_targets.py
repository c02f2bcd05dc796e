"""The file that tells Prometheus what to scrape."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from rollcage.metrics.targets import address_of, remove_ended, write_targets


def test_prometheus_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sd" / "targets.json"
    assert write_targets(
        path, {"rollcage": ["127.0.0.1:9410"], "ray": ["10.0.0.2:1", "10.0.0.1:1"], "vllm": []}
    )
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs: [{job_name: rollcage, file_sd_configs: [{files: [sd/targets.json]}]}]"
    )
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"vllm"' not in path.read_text()


def test_a_file_that_says_so_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    assert write_targets(path, {"ray": ["b:1", "a:1"]})
    assert not write_targets(path, {"ray": ["a:1", "b:1"]})
    assert write_targets(path, {"ray": ["a:1"]})


def test_a_kind_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="grafana: the kinds of targets are rollcage, ray, vllm"):
        write_targets(tmp_path / "targets.json", {"grafana": ["a:1"]})


def test_files_of_exporters_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as ending,
    ):
        port, ended = listening.getsockname()[1], ending.getsockname()[1]
        ending.close()
        write_targets(tmp_path / f"{port}.json", {"rollcage": [f"127.0.0.1:{port}"], "ray": ["127.0.0.1:1"]})
        write_targets(tmp_path / f"{ended}.json", {"rollcage": [f"127.0.0.1:{ended}"]})
        write_targets(tmp_path / "mine.json", {"rollcage": [f"127.0.0.1:{ended}"]})
        write_targets(tmp_path / "1.json", {"ray": ["127.0.0.1:1"]})
        (tmp_path / "2.json").write_text('{"no": "targets"}')
        assert remove_ended(tmp_path) == [tmp_path / f"{ended}.json"]
        assert len(list(tmp_path.iterdir())) == 4
        assert remove_ended(tmp_path / "none") == []


def test_an_address_of_ip_version_6_is_in_brackets() -> None:
    assert (address_of("::1", 9410), address_of("127.0.0.1", 1)) == ("[::1]:9410", "127.0.0.1:1")
