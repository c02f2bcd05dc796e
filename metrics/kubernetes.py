"""Writes the Prometheus operator's objects and Grafana's dashboards for Kubernetes: `python -m
rollcage.metrics.kubernetes [DIRECTORY]`, by default `k8s/metrics`.

All of it follows from `rules/` and `dashboards/`; see docs/observe.md for how it is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rollcage.metrics.made_files import made_by, write_files
from rollcage.metrics.provisioning import DASHBOARDS, RULE_FILES, RULES, SCRAPE_SEC
from rollcage.metrics.serving import PORT, TARGETS_PATH

Manifest = dict[str, Any]

LABELS = {"app.kubernetes.io/name": "rollcage", "release": "prometheus"}
"""`release` is what the chart kube-prometheus-stack, installed as `prometheus`, selects monitors and rules by."""

RAY_PORT = "metrics"
"""The container port of Ray's own metrics, as KubeRay names it on heads and workers."""

EXPORTER = "rollcage-exporter"

NAMESPACE = "NAMESPACE"
"""What the reader of `vllm.yaml` replaces by that of the Ray cluster."""

MODULE = "rollcage.metrics.kubernetes"


def monitors() -> list[Manifest]:
    """What is scraped: the exporter on the head, whose port no pod has to declare, and every pod of Ray's."""
    head = {"matchLabels": {"ray.io/node-type": "head"}}
    nodes = {"matchExpressions": [{"key": "ray.io/node-type", "operator": "Exists"}]}
    return [
        _monitor("rollcage", "rollcage", head, {"portNumber": PORT}),
        _monitor("rollcage-ray", "ray", nodes, {"port": RAY_PORT}),
    ]


def _monitor(name: str, job: str, selector: Manifest, port: Manifest) -> Manifest:
    endpoint = {
        **port,
        "path": "/metrics",
        "interval": f"{SCRAPE_SEC}s",
        "relabelings": [{"targetLabel": "job", "replacement": job}],
    }
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    return _object("monitoring.coreos.com/v1", "PodMonitor", name, spec=spec)


def vllm() -> list[Manifest]:
    """Replicas of vLLM answer on ports that they find free, which no PodMonitor can name: the exporter is asked where
    they are. Prometheus may be in any namespace, so that its own must be put in place of `NAMESPACE`."""
    service = _object(
        "v1",
        "Service",
        EXPORTER,
        spec={
            "clusterIP": "None",
            "selector": {"ray.io/node-type": "head"},
            "ports": [{"name": EXPORTER, "port": PORT, "targetPort": PORT}],
        },
    )
    asked = {
        "url": f"http://{EXPORTER}.{NAMESPACE}.svc:{PORT}{TARGETS_PATH}",
        "refreshInterval": f"{SCRAPE_SEC}s",
    }
    spec = {
        "httpSDConfigs": [asked],
        "metricsPath": "/metrics",
        "scrapeInterval": f"{SCRAPE_SEC}s",
        "relabelings": [{"sourceLabels": ["job"], "regex": "vllm", "action": "keep"}],
    }
    return [service, _object("monitoring.coreos.com/v1alpha1", "ScrapeConfig", "rollcage-vllm", spec=spec)]


def rules() -> list[Manifest]:
    """The recording and alert rules, as they are in `rules/`."""
    groups = [
        group
        for name in RULE_FILES
        for group in yaml.safe_load((RULES / name).read_text(encoding="utf-8"))["groups"]
    ]
    return [_object("monitoring.coreos.com/v1", "PrometheusRule", "rollcage", spec={"groups": groups})]


def dashboards() -> list[Manifest]:
    """One ConfigMap a dashboard, so that each is far below the 256 KiB that `kubectl apply` can annotate."""
    return [_dashboard(file) for file in sorted(DASHBOARDS.glob("*.json"))]


def _dashboard(file: Path) -> Manifest:
    made = _object("v1", "ConfigMap", file.stem, data={file.name: file.read_text(encoding="utf-8")})
    made["metadata"]["labels"] = {**LABELS, "grafana_dashboard": "1"}
    made["metadata"]["annotations"] = {"grafana_folder": "Rollcage"}
    return made


def _object(version: str, kind: str, name: str, **content: Any) -> Manifest:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": dict(LABELS)},
        **content,
    }


def files() -> Iterator[tuple[str, str]]:
    """Name and text of each file."""
    made = {"monitors.yaml": monitors(), "rules.yaml": rules(), "dashboards.yaml": dashboards()}
    for name, objects in made.items():
        yield name, made_by(MODULE, *objects)
    all_of_it = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(made),
    }
    yield "kustomization.yaml", made_by(MODULE, all_of_it)
    yield "vllm.yaml", made_by(MODULE, *vllm())


if __name__ == "__main__":
    write_files(files(), "k8s/metrics")
