"""What Prometheus scrapes, in the file that its `file_sd_configs` reads: ours, and beside it Ray's and vLLM's own.

    scrape_configs:
      - job_name: rollcage
        file_sd_configs: [{files: ["/var/lib/rollcage/targets.json"]}]

Each group has the label `job` of its kind, whatever the scrape configuration is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

KINDS = ("rollcage", "ray", "vllm")


def write_targets(path: Path, targets: Mapping[str, Sequence[str]]) -> bool:
    """Have `path` name these addresses (`host:port`, by kind), and say whether it had to change. It is replaced whole,
    for Prometheus reads it whenever it likes. Raises `OSError`, and `ValueError` for a kind that there is not."""
    if strange := set(targets) - set(KINDS):
        raise ValueError(f"{', '.join(sorted(strange))}: the kinds of targets are {', '.join(KINDS)}")
    groups = [
        {"targets": sorted(targets[kind]), "labels": {"job": kind}} for kind in KINDS if targets.get(kind)
    ]
    text = json.dumps(groups, indent=2) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return True
