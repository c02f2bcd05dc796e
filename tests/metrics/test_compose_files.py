"""metrics/compose: current, and each file in it finds the others where the containers have them.

The images are not pulled: no test can count on a registry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcage.metrics.compose_files import GRAFANA_PORT, PROMETHEUS_PORT, TARGETS, compose, files
from rollcage.metrics.dashboards.build import BOARDS
from rollcage.metrics.provisioning import DATA_SOURCE
from rollcage.metrics.targets import write_targets

MADE = Path(__file__).parents[2] / "metrics" / "compose"
SERVICES: dict[str, Any] = yaml.safe_load((MADE / "docker-compose.yaml").read_text())["services"]


def mounts(service: str) -> dict[str, Path | str]:
    """What each path of the container is: a path here, or the name of a volume."""
    found: dict[str, Path | str] = {}
    for volume in SERVICES[service]["volumes"]:
        source, target = volume.removesuffix(":ro").rsplit(":", 1)
        found[target] = MADE / source if source.startswith(".") else source
    return found


def inside(service: str, path: str) -> Path:
    """The file or directory here that `path` of the container is."""
    for target, source in mounts(service).items():
        if isinstance(source, Path) and Path(path).is_relative_to(target):
            return source / Path(path).relative_to(target)
    raise AssertionError(f"{path} of {service} is nothing of ours")


def test_the_committed_files_are_current() -> None:
    assert {file.name: file.read_text() for file in MADE.iterdir()} == dict(files())


def test_every_mount_is_there_and_read_only_or_a_declared_volume() -> None:
    for service, made in SERVICES.items():
        for source in mounts(service).values():
            if isinstance(source, Path):
                assert source.exists(), source
            else:
                assert source == TARGETS or source in compose()["volumes"]
        assert sum(volume.endswith(":ro") for volume in made["volumes"]) == len(made["volumes"]) - 1
        assert made["image"].split(":")[1][0] in "v0123456789"


def test_both_listen_on_the_hosts_loopback_alone() -> None:
    prometheus, grafana = SERVICES["prometheus"], SERVICES["grafana"]
    assert prometheus["network_mode"] == grafana["network_mode"] == "host"
    assert f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}" in prometheus["command"]
    told = grafana["environment"]
    assert (told["GF_SERVER_HTTP_ADDR"], told["GF_SERVER_HTTP_PORT"]) == ("127.0.0.1", str(GRAFANA_PORT))
    assert all(isinstance(value, str) for value in told.values())


def test_promtool_takes_prometheus_configuration_as_it_is_mounted(tmp_path: Path) -> None:
    (told,) = (one for one in SERVICES["prometheus"]["command"] if one.startswith("--config.file="))
    config = yaml.safe_load(inside("prometheus", told.partition("=")[2]).read_text())
    config["rule_files"] = [str(inside("prometheus", rules).resolve()) for rules in config["rule_files"]]
    for one in config["scrape_configs"]:
        for found in one["file_sd_configs"]:
            (pattern,) = found["files"]
            assert mounts("prometheus")[str(Path(pattern).parent)] == TARGETS
            found["files"] = [str(tmp_path / "*.json")]
    write_targets(tmp_path / "9410.json", {"rollcage": ["127.0.0.1:9410"]})
    (tmp_path / "prometheus.yaml").write_text(json.dumps(config))
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2


def test_grafana_finds_prometheus_and_every_dashboard() -> None:
    provisioning = "/etc/grafana/provisioning"
    data = yaml.safe_load(inside("grafana", f"{provisioning}/datasources/rollcage.yaml").read_text())
    (source,) = data["datasources"]
    assert (source["uid"], source["url"]) == (DATA_SOURCE, f"http://127.0.0.1:{PROMETHEUS_PORT}")
    made = yaml.safe_load(inside("grafana", f"{provisioning}/dashboards/rollcage.yaml").read_text())
    (provider,) = made["providers"]
    there = inside("grafana", provider["options"]["path"])
    assert {json.loads(file.read_text())["uid"] for file in there.glob("*.json")} == {
        board.uid for board in BOARDS
    }
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert inside("grafana", home).is_file()


def test_a_path_that_is_not_mounted_would_be_found() -> None:
    with pytest.raises(AssertionError, match="nothing of ours"):
        inside("grafana", "/etc/grafana/other")
