"""k8s/metrics: current, as the Prometheus operator's schemas want it, with the rules and dashboards of everywhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollcage.metrics.dashboards.build import BOARDS, path_of
from rollcage.metrics.kubernetes import files
from rollcage.metrics.serving import PORT

ROOT = Path(__file__).parents[2]
MADE = ROOT / "k8s" / "metrics"
SCHEMAS = ROOT / "tests" / "data" / "k8s"


def objects(kind: str) -> list[dict[str, Any]]:
    found = [one for file in sorted(MADE.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    return [one for one in found if one["kind"] == kind]


def unknown_keys(schema: dict[str, Any], value: Any, where: str = "") -> Iterator[str]:
    """Those that the schema does not know: the API server drops them silently."""
    known = schema.get("properties", {})
    if isinstance(value, dict) and known:
        for key, inner in value.items():
            if key not in known:
                yield f"{where}.{key}"
            else:
                yield from unknown_keys(known[key], inner, f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from unknown_keys(schema.get("items", {}), inner, where)


def check(kind: str, made: dict[str, Any]) -> None:
    # Go takes a flag anywhere in an expression, Python at its beginning.
    [file] = SCHEMAS.glob(f"{kind}_v1*.json")
    schema = json.loads(file.read_text().replace("^(?i)", "(?i)^"))
    jsonschema.validate(made, schema)
    assert list(unknown_keys(schema, made)) == []


def test_the_committed_files_are_current() -> None:
    made = dict(files())
    assert {file.name: file.read_text() for file in MADE.iterdir()} == made
    assert set(yaml.safe_load(made["kustomization.yaml"])["resources"]) == set(made) - {
        "kustomization.yaml",
        "vllm.yaml",
    }


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule", "ScrapeConfig"])
def test_the_operator_takes_every_object(kind: str) -> None:
    found = objects(kind)
    assert found
    for one in found:
        check(kind, one)


def test_a_mistaken_object_would_be_found() -> None:
    monitor = objects("PodMonitor")[0]
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "5s"
    with pytest.raises(AssertionError, match="intervall"):
        check("PodMonitor", monitor)
    del monitor["spec"]["selector"]
    with pytest.raises(jsonschema.ValidationError, match="selector"):
        check("PodMonitor", monitor)


def test_the_exporter_is_asked_on_the_head_alone_and_each_has_its_job() -> None:
    monitors = {one["metadata"]["name"]: one["spec"] for one in objects("PodMonitor")}
    assert monitors["rollcage"]["selector"] == {"matchLabels": {"ray.io/node-type": "head"}}
    assert monitors["rollcage"]["podMetricsEndpoints"][0]["portNumber"] == PORT
    jobs = {"rollcage": "rollcage", "rollcage-ray": "ray"}
    assert set(monitors) == set(jobs)
    for name, spec in monitors.items():
        (endpoint,) = spec["podMetricsEndpoints"]
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": jobs[name]}]


def test_replicas_of_vllm_are_found_through_the_exporter() -> None:
    [service], [scrape] = objects("Service"), objects("ScrapeConfig")
    [port] = service["spec"]["ports"]
    [asked] = scrape["spec"]["httpSDConfigs"]
    assert asked["url"] == f"http://{service['metadata']['name']}.NAMESPACE.svc:{port['port']}/targets"
    assert port["targetPort"] == PORT
    assert scrape["spec"]["relabelings"] == [{"sourceLabels": ["job"], "regex": "vllm", "action": "keep"}]


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (rule,) = objects("PrometheusRule")
    assert [group["name"] for group in rule["spec"]["groups"]] == ["rollcage-recording", "rollcage-alerts"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    done = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafanas_sidecar_finds_every_dashboard() -> None:
    maps = {one["metadata"]["name"]: one for one in objects("ConfigMap")}
    assert set(maps) == {board.uid for board in BOARDS}
    for board in BOARDS:
        assert maps[board.uid]["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = maps[board.uid]["data"].values()
        assert text == path_of(board).read_text()
