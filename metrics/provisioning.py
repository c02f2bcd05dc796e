"""What Prometheus and Grafana are given: their configurations, as the files that they read.

`observe.py` writes them for this machine; the files of `metrics/compose/` and of `k8s/metrics/` hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcage.metrics.targets import KINDS

RULES = Path(__file__).parent / "rules"
RULE_FILES = ("recording.yaml", "alerts.yaml")
"""In `RULES`; the other file there has their tests."""

DASHBOARDS = Path(__file__).parent / "dashboards"
"""Holds each dashboard's JSON."""

SCRAPE_SEC = 5
"""Between two scrapes. Sources send more often, and Grafana takes rates over four of these."""

PROMETHEUS_OPTIONS = ("--enable-feature=exemplar-storage",)
"""Without it Prometheus drops exemplars, which a job with `metrics.exemplars` has."""

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
    """prometheus.yml. `targets`: the directory of the files for `file_sd_configs` (`targets.py`); `rules`: that of the
    rules.

    Each kind of target has a scrape configuration of its own: the exporter and replicas of vLLM ask for the password
    and speak TLS, and Ray may be told no password.
    """
    asked: dict[str, Any] = {}
    if login is not None and login.user is not None:
        asked["basic_auth"] = {"username": login.user, "password_file": login.password}
    if login is not None and login.certificate is not None:
        asked |= {"scheme": "https", "tls_config": {"ca_file": login.certificate}}
    how = {"rollcage": asked, "ray": {}, "vllm": asked}
    found = [{"files": [f"{targets}/*.json"], "refresh_interval": f"{SCRAPE_SEC}s"}]
    return {
        "global": {"scrape_interval": f"{SCRAPE_SEC}s", "evaluation_interval": "15s"},
        "rule_files": [f"{rules}/{name}" for name in RULE_FILES],
        "scrape_configs": [
            {
                "job_name": kind,
                "file_sd_configs": found,
                "relabel_configs": [{"source_labels": ["job"], "regex": kind, "action": "keep"}],
                **how[kind],
            }
            for kind in KINDS
        ],
    }


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


def grafana_settings(port: int, dashboards: str) -> dict[str, str]:
    """Variables of Grafana's environment. Whoever reaches `port` of loopback may look; nobody can log in with the
    password that Grafana comes with. `dashboards`: the directory of their JSON."""
    return {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{dashboards}/rollcage-overview.json",
    }
