"""`rollcage observe`: a real Prometheus beside a demo or a guarded exporter, and a Grafana that writes down how it was
started (there is no package of a real one to be had everywhere)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from certificates import self_signed
from prometheus_client import REGISTRY, Gauge
from real_prometheus import Prometheus, prometheus_with

from rollcage.metrics.dashboards.build import BOARDS
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.provisioning import DASHBOARDS, SCRAPE_SEC, Login, prometheus_config
from rollcage.metrics.serving import serve, serve_process
from rollcage.metrics.targets import targets_json, write_targets

ROOT = Path(__file__).parents[2]
ROLLCAGE = Path(sys.executable).parent / "rollcage"

GRAFANA = f"""#!{sys.executable}
import http.server, json, os, sys
with open(os.environ["GF_PATHS_DATA"] + "-told", "w") as file:
    json.dump({{"argv": sys.argv, **os.environ}}, file)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
address = os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])
http.server.HTTPServer(address, Health).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@contextmanager
def observing(*options: str | Path, **environ: str) -> Iterator[tuple[list[str], Prometheus]]:
    """What it said until it was ready, and its Prometheus. It is ended by Ctrl-C and must leave nothing."""
    ports = [free_port(), free_port()]
    command = [ROLLCAGE, "observe", "--port", str(ports[0]), "--grafana-port", str(ports[1]), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line.rstrip())
            if said[-1] == "Ctrl-C ends it.":
                break
        assert process.poll() is None, said
        yield said, Prometheus(f"http://127.0.0.1:{ports[0]}")
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait()
        process.stdout.close()
    assert status == 0
    assert not any(map(listens, ports))


def refused(*options: str | Path, **environ: str) -> tuple[int, str]:
    """Exit status and standard error of one that cannot begin."""
    done = subprocess.run(
        [ROLLCAGE, "observe", *options], capture_output=True, text=True, env={**os.environ, **environ}
    )
    return done.returncode, done.stderr


def test_a_demo_is_scraped_and_grafana_is_given_all_it_needs(tmp_path: Path) -> None:
    program = executable(tmp_path / "release" / "bin" / "grafana", GRAFANA)
    (tmp_path / "release" / "conf").mkdir()
    (tmp_path / "release" / "conf" / "defaults.ini").touch()
    data = tmp_path / "data"
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    with observing("--demo", "--data", data, PATH=path, GF_PATHS_HOME="") as (said, prometheus):
        assert {one["metric"]["job"] for one in prometheus.wait_for("up == 1")} == {"rollcage"}
        prometheus.wait_for("sum(rollcage_rollouts_total) > 0")
        named = {group["name"] for group in prometheus._get("rules")["groups"]}
        assert named == {"rollcage-recording", "rollcage-alerts"}
        assert f"Prometheus: {prometheus.url} (alerts: {prometheus.url}/alerts)" in said
    told = json.loads((data / "grafana" / "data-told").read_text())
    assert told["argv"][1:] == ["server", "--homepath", str(tmp_path / "release")]
    assert (told["GF_SERVER_HTTP_ADDR"], told["GF_AUTH_BASIC_ENABLED"]) == ("127.0.0.1", "false")
    assert f"Grafana: http://127.0.0.1:{told['GF_SERVER_HTTP_PORT']}/dashboards?tag=rollcage" in said
    provisioning = Path(told["GF_PATHS_PROVISIONING"])
    (source,) = yaml.safe_load((provisioning / "datasources" / "rollcage.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", prometheus.url)
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rollcage.yaml").read_text())["providers"]
    found = {json.loads(file.read_text())["uid"] for file in Path(provider["options"]["path"]).glob("*.json")}
    assert found == {board.uid for board in BOARDS}
    assert Path(told["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()


@pytest.fixture
def engine() -> Iterator[tuple[str, list[str | None]]]:
    """A target that is not ours, and what it was told of who asks."""
    asked: list[str | None] = []

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(b"engine_works 1\n")

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_targets_may_come_later_and_the_exporters_password_goes_to_ray_never(
    tmp_path: Path, engine: tuple[str, list[str | None]], simulated: Exporter
) -> None:
    targets, data = tmp_path / "later", tmp_path / "data"
    (tmp_path / "grafana-less").mkdir()
    (tmp_path / "grafana-less" / "prometheus").symlink_to(str(shutil.which("prometheus")))
    server = serve(simulated, port=0, user="u", password="secret")
    replica = serve(simulated, port=0, user="u", password="secret")
    options = ["--targets", targets, "--data", data, "--user", "u"]
    environ = {"ROLLCAGE_EXPORTER_PASSWORD": "secret", "PATH": str(tmp_path / "grafana-less")}
    try:
        with observing(*options, **environ) as (said, prometheus):
            assert said[0].startswith(f"nothing to scrape in {targets} yet")
            text = "\n".join(said)
            assert "Dashboards, New, Import" in text
            assert f"{DASHBOARDS}/*.json" in text
            exporters = {"rollcage": [f"127.0.0.1:{server.port}"], "ray": [engine[0]]}
            write_targets(targets / "9410.json", exporters)
            write_targets(targets / "9411.json", {"vllm": [f"127.0.0.1:{replica.port}"]})
            assert [
                one["metric"]["job"] for one in prometheus.wait_for('rollcage_host_up{job="rollcage"}')
            ] == ["rollcage"] * 3
            assert [one["metric"]["job"] for one in prometheus.wait_for("engine_works")] == ["ray"]
            prometheus.wait_for('up{job="vllm"} == 1')
            assert {one["metric"]["job"] for one in prometheus.query("up")} == {"rollcage", "ray", "vllm"}
    finally:
        server.close()
        replica.close()
    assert set(engine[1]) == {None}
    assert (data / "exporter-password").stat().st_mode & 0o777 == 0o600


def test_the_colons_of_vllms_names_are_kept_whatever_format_a_scraper_likes_best() -> None:
    made = Gauge("engine:works", "As vLLM calls its own.")
    server = serve_process()
    try:
        asked = Request(
            f"http://127.0.0.1:{server.port}/metrics",
            headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"},
        )
        with urlopen(asked, timeout=60) as answer:
            assert b"\nengine:works 0.0\n" in answer.read()
    finally:
        server.close()
        REGISTRY.unregister(made)


def test_without_prometheus_it_says_how_to_install_it(tmp_path: Path) -> None:
    status, said = refused("--data", tmp_path / "data", PATH=str(tmp_path))
    assert status == 2
    assert "apt-get install prometheus" in said
    assert "https://prometheus.io/download/" in said
    assert not (tmp_path / "data").exists()


def test_a_port_that_is_taken_is_named_with_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused("--data", tmp_path / "data", "--port", str(port))
    assert status == 2
    assert f"Prometheus's port {port} cannot be had (Address already in use); --port names another" in said


def test_a_prometheus_that_ends_by_itself_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "prometheus", "#!/bin/sh\necho 'lock DB directory: taken' >&2\nexit 3\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    status, said = refused("--data", tmp_path / "data", "--port", str(free_port()), PATH=path)
    assert status == 2
    assert "Prometheus ended with status 3" in said
    assert "lock DB directory: taken" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--user", "u"], "--user and --password"),
        (["--certificate", "none.pem"], "none.pem is no file"),
        (["--targets", __file__], f"{__file__} is no directory"),
    ],
)
def test_options_that_do_not_go_together_are_bad_input(options: list[str], said: str, tmp_path: Path) -> None:
    status, error = refused("--data", tmp_path / "data", *options)
    assert status == 1
    assert said in error


def test_promtool_takes_the_configuration_of_a_guarded_exporter(tmp_path: Path) -> None:
    for name in ("password", "ca.pem"):
        (tmp_path / name).touch()
    login = Login("u", str(tmp_path / "password"), str(tmp_path / "ca.pem"))
    rules = Path(__file__).parents[2] / "metrics" / "rules"
    file = tmp_path / "prometheus.yml"
    write_targets(tmp_path / "9410.json", {"rollcage": ["127.0.0.1:9410"]})
    file.write_text(json.dumps(prometheus_config(str(tmp_path), str(rules), login)))
    done = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, ray, vllm = json.loads(file.read_text())["scrape_configs"]
    assert (ours["scheme"], ours["basic_auth"]["username"]) == ("https", "u")
    assert {"scheme", "basic_auth", "tls_config"}.isdisjoint(ray)
    for setting in ("scheme", "basic_auth", "tls_config"):
        assert vllm[setting] == ours[setting]
    assert json.loads(file.read_text())["global"]["scrape_interval"] == f"{SCRAPE_SEC}s"


@pytest.mark.parametrize("by", ["http_sd_configs", "file_sd_configs"])
def test_a_prometheus_of_ones_own_as_the_docs_configure_it_finds_all_three(tmp_path: Path, by: str) -> None:
    page = (ROOT / "docs" / "observe.md").read_text("utf-8")
    [snippet] = re.findall("```yaml\n(rule_files.*?)```", page, re.S)
    [config] = yaml.safe_load(snippet.replace("# or: ", ""))["scrape_configs"]
    targets: dict[str, list[str]] = {}
    served = serve(Exporter(), port=0, targets=lambda: targets_json(targets))
    address = f"127.0.0.1:{served.port}"
    targets |= {kind: [address] for kind in ("rollcage", "ray", "vllm")}
    write_targets(tmp_path / "sd" / "9410.json", targets)
    told = {
        "http_sd_configs": [{**config["http_sd_configs"][0], "url": f"http://{address}/targets"}],
        "file_sd_configs": [{"files": [f"{tmp_path}/sd/*.json"]}],
    }
    assert config["http_sd_configs"][0]["url"] == "http://HEAD:9410/targets"
    assert config["file_sd_configs"][0]["files"][0].endswith("/.local/state/rollcage/targets/*.json")
    try:
        with prometheus_with(
            tmp_path / "p", [{"job_name": "any", "scrape_interval": "1s", by: told[by]}]
        ) as one:
            one.wait_for("count(count by (job) (up == 1)) == 3")
            jobs = {found["metric"]["job"] for found in one.query("up")}
    finally:
        served.close()
    assert jobs == {"rollcage", "ray", "vllm"}


def test_a_prometheus_of_ones_own_asks_a_guarded_exporter_as_the_docs_configure_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "observe.md").read_text("utf-8")
    [snippet] = re.findall("```yaml\n(scrape_configs:\n  - job_name: rollcage  .*?)```", page, re.S)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    self_signed(certificate, key)
    (tmp_path / "password").write_text("secret")
    guard = {"user": "prometheus", "password": "secret", "certificate": certificate, "key": key}
    targets: dict[str, list[str]] = {}
    served = serve(Exporter(), port=0, targets=lambda: targets_json(targets), **guard)
    address = f"127.0.0.1:{served.port}"
    targets |= {"rollcage": [address], "ray": ["127.0.0.1:1"]}
    for there, here in {
        "/etc/prometheus/rollcage-password": str(tmp_path / "password"),
        "/etc/prometheus/rollcage.pem": str(certificate),
        "HEAD:9410": address,
    }.items():
        assert there in snippet
        snippet = snippet.replace(there, here)
    [config] = yaml.safe_load(snippet)["scrape_configs"]
    try:
        with prometheus_with(tmp_path / "p", [config | {"scrape_interval": "1s"}]) as one:
            [found] = one.wait_for("up == 1")
    finally:
        served.close()
    assert found["metric"] == {"__name__": "up", "job": "rollcage", "instance": address}
