"""Names under which Ray knows what is ours, and addresses."""

from __future__ import annotations

import ray.util

NAMESPACE = "rollcage"

EXPORTER = "exporter"


def reachable(host: str) -> str:
    """Where another machine reaches this node's server that listens at `host`."""
    return str(ray.util.get_node_ip_address()) if host in ("0.0.0.0", "::", "") else host
