"""Certificates for tests."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path


def self_signed(certificate: Path, key: Path) -> None:
    """Write one of loopback's."""
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
            f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {certificate}"
        ),
        check=True,
        capture_output=True,
    )
