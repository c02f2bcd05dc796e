"""The file that tells Prometheus what to scrape."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollcage.metrics.targets import write_targets


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
