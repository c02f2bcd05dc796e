"""What Prometheus scrapes, as its `file_sd_configs` and `http_sd_configs` read it: ours, and beside it Ray's and vLLM's
own.

    scrape_configs:
      - job_name: rollcage
        file_sd_configs: [{files: ["/var/lib/rollcage/targets.json"]}]

Each group has the label `job` of its kind, whatever the scrape configuration is called.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

KINDS = ("rollcage", "ray", "vllm")

ANSWER_SEC = 1.0
"""As long as an exporter may take to be connected to."""


def address_of(host: str, port: int) -> str:
    """As Prometheus and URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def targets_json(targets: Mapping[str, Sequence[str]]) -> str:
    """These addresses as Prometheus reads them, from a file or over HTTP. Raises as `write_targets`."""
    if strange := set(targets) - set(KINDS):
        raise ValueError(f"{', '.join(sorted(strange))}: the kinds of targets are {', '.join(KINDS)}")
    groups = [
        {"targets": sorted(targets[kind]), "labels": {"job": kind}} for kind in KINDS if targets.get(kind)
    ]
    return json.dumps(groups, indent=2) + "\n"


def write_targets(path: Path, targets: Mapping[str, Sequence[str]]) -> bool:
    """Have `path` name these addresses (`host:port`, by kind), and say whether it had to change. It is replaced whole,
    for Prometheus reads it whenever it likes. Raises `OSError`, and `ValueError` for a kind that there is not."""
    text = targets_json(targets)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return True


def exporters(path: Path) -> list[str]:
    """The addresses of a file that `write_targets` wrote; none of any other."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        groups = json.loads(path.read_text(encoding="utf-8"))
        return [
            str(one) for group in groups if group["labels"]["job"] == KINDS[0] for one in group["targets"]
        ]
    return []


def remove_ended(directory: Path) -> list[Path]:
    """Remove the files (`<port>.json`) of exporters that were killed with their clusters, and return their paths:
    nobody listens where they say. One that only starts again writes its file anew. Raises `OSError` where one cannot be
    removed."""
    ended = []
    for path in sorted(directory.glob("*.json")):
        if path.stem.isdigit() and (addresses := exporters(path)):
            answered = [address for address in addresses if not _refused(address)]
            if not answered:
                path.unlink(missing_ok=True)
                ended.append(path)
    return ended


def _refused(address: str) -> bool:
    """Whether that machine says that nobody listens; what does not answer at all may well be there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SEC).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
