"""The task of the benchmarks: write 42 to a file, and a verifier that looks. What it costs is the harness."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

IMAGE = "debian:bookworm-slim"
TEST = """#!/bin/sh
reward=0
[ "$(cat /app/answer.txt)" = 42 ] && reward=1
echo $reward > /logs/verifier/reward.txt
"""
FILES = {
    "task.toml": '[agent]\ntimeout_sec = 60.0\n\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write 42 to /app/answer.txt.\n",
    "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/sh\necho 42 > /app/answer.txt\n",
    "tests/test.sh": TEST,
}


def write_task(
    root: Path, *, network_mode: str = "no-network", files: Mapping[str, str] | None = None
) -> Path:
    """Write the task to `root`, with `files` in place of its own, and return `root`."""
    for name, text in {**FILES, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"no-network"', f'"{network_mode}"') if name == "task.toml" else text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return root
