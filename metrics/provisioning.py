"""What Prometheus and Grafana are given: their configurations, as the files that they read.

`observe.py` writes them for this machine; the files of `compose/` and of `k8s/metrics/` hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES = Path(__file__).parent / "rules"
RULE_FILES = ("recording.yaml", "alerts.yaml")
"""In `RULES`; the other file there has their tests."""

DASHBOARDS = Path(__file__).parent / "dashboards"
"""Holds each dashboard's JSON."""

SCRAPE_SEC = 5
"""Between two scrapes. Sources send more often, and Grafana takes rates over four of these."""

DATA_SOURCE = "rollcage-prometheus"
"""The data source's uid. Dashboards name none: they have a variable for it."""


@dataclass(frozen=True)
class Login:
    """How the exporter is asked where it is guarded. `certificate`: a PEM file that its own is checked against; with it
    the exporter is asked by TLS. `password`: a file that holds it and nothing else."""

    user: str | None = None
    password: str | None = None
    certificate: str | None = None


def prometheus_config(targets: str, rules: str, login: Login | None = None) -> dict[str, Any]:
    """prometheus.yml. `targets`: the file for `file_sd_configs` (`targets.py`); `rules`: the directory of the rules.

    The exporter has a scrape configuration of its own, because nobody else may be told its password.
    """
    ours: dict[str, Any] = {}
    if login is not None and login.user is not None:
        ours["basic_auth"] = {"username": login.user, "password_file": login.password}
    if login is not None and login.certificate is not None:
        ours |= {"scheme": "https", "tls_config": {"ca_file": login.certificate}}
    found = [{"files": [targets], "refresh_interval": f"{SCRAPE_SEC}s"}]
    return {
        "global": {"scrape_interval": f"{SCRAPE_SEC}s", "evaluation_interval": "15s"},
        "rule_files": [f"{rules}/{name}" for name in RULE_FILES],
        "scrape_configs": [
            {"job_name": "rollcage", "file_sd_configs": found, "relabel_configs": [_job("keep")], **ours},
            {"job_name": "engines", "file_sd_configs": found, "relabel_configs": [_job("drop")]},
        ],
    }


def _job(action: str) -> dict[str, Any]:
    return {"source_labels": ["job"], "regex": "rollcage", "action": action}


def grafana_data_sources(url: str) -> dict[str, Any]:
    """provisioning/datasources/*.yaml, where `url` is Prometheus'."""
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus (Rollcage)",
                "uid": DATA_SOURCE,
                "type": "prometheus",
                "access": "proxy",
                "url": url,
                "isDefault": True,
                "jsonData": {"timeInterval": f"{SCRAPE_SEC}s", "httpMethod": "POST"},
            }
        ],
    }


def grafana_dashboards(directory: str) -> dict[str, Any]:
    """provisioning/dashboards/*.yaml, where `directory` has the dashboards' JSON."""
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "rollcage",
                "folder": "Rollcage",
                "type": "file",
                "disableDeletion": True,
                "allowUiUpdates": False,
                "options": {"path": directory},
            }
        ],
    }
