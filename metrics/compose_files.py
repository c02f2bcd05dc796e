"""Writes `metrics/compose/`, Prometheus and Grafana in containers on the exporter's machine: `python -m
rollcage.metrics.compose_files [DIRECTORY]`, by default `metrics/compose`; see docs/observe.md.

Both are on the host's network, for the exporter listens on loopback; so do they.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollcage.metrics.made_files import made_by, write_files
from rollcage.metrics.provisioning import (
    PROMETHEUS_OPTIONS,
    grafana_dashboards,
    grafana_data_sources,
    grafana_settings,
    prometheus_config,
)
from rollcage.metrics.server_process import url_of

PROMETHEUS = "prom/prometheus:v2.53.4"
GRAFANA = "grafana/grafana:11.6.0"
"""Of the release that the dashboards' SDK is made for."""

PROMETHEUS_PORT, GRAFANA_PORT = 9090, 3000

TARGETS = "${ROLLCAGE_TARGETS:-${HOME}/.local/state/rollcage/targets}"
"""The directory of the exporters' files on the host."""

_CONFIG, _RULES, _FOUND = (
    "/etc/prometheus/prometheus.yaml",
    "/etc/prometheus/rules",
    "/etc/prometheus/targets",
)
_PROVISIONING, _DASHBOARDS = "/etc/grafana/provisioning", "/etc/grafana/dashboards"


def compose() -> dict[str, Any]:
    """docker-compose.yaml. Paths of the host are relative to its directory."""
    return {
        "name": "rollcage-observe",
        "services": {
            "prometheus": {
                "image": PROMETHEUS,
                "network_mode": "host",
                "restart": "unless-stopped",
                "command": [
                    f"--config.file={_CONFIG}",
                    "--storage.tsdb.path=/prometheus",
                    f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
                    *PROMETHEUS_OPTIONS,
                ],
                "volumes": [
                    f"./prometheus.yaml:{_CONFIG}:ro",
                    f"../rules:{_RULES}:ro",
                    f"{TARGETS}:{_FOUND}:ro",
                    "prometheus:/prometheus",
                ],
            },
            "grafana": {
                "image": GRAFANA,
                "network_mode": "host",
                "restart": "unless-stopped",
                "depends_on": ["prometheus"],
                "environment": grafana_settings(GRAFANA_PORT, _DASHBOARDS),
                "volumes": [
                    f"./data-sources.yaml:{_PROVISIONING}/datasources/rollcage.yaml:ro",
                    f"./dashboards.yaml:{_PROVISIONING}/dashboards/rollcage.yaml:ro",
                    f"../dashboards:{_DASHBOARDS}:ro",
                    "grafana:/var/lib/grafana",
                ],
            },
        },
        "volumes": {"prometheus": {}, "grafana": {}},
    }


def files() -> Iterator[tuple[str, str]]:
    """Name and text of each file."""
    made = {
        "docker-compose.yaml": compose(),
        "prometheus.yaml": prometheus_config(_FOUND, _RULES),
        "data-sources.yaml": grafana_data_sources(url_of(PROMETHEUS_PORT)),
        "dashboards.yaml": grafana_dashboards(_DASHBOARDS),
    }
    for name, content in made.items():
        yield name, made_by("rollcage.metrics.compose_files", content)


if __name__ == "__main__":
    write_files(files(), "metrics/compose")
