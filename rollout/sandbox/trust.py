"""What builds and sandboxes trust beside their image: a CA bundle of the host's, and the way out, its proxies.

The bundle stands at `BUNDLE` in both, and variables lead programs there: it takes the place of the image's own set of
authorities, so it should be a whole one (the host's own /etc/ssl/certs/ca-certificates.crt, with a company's CA in it).
The image's own set is not changed.

- A build has the bundle as a file of its first layer, and the variables as build arguments, which no image keeps.
- A sandbox has the same files bound into it, read-only, so that an agent cannot change them; and the variables in its
  environment, where neither the image nor the task sets them. The files come from a folder of ours that is named by
  their digest: a bundle that changes under a job does not change the job.

curl, OpenSSL, Python's ssl and requests, pip, Node, git, Cargo and the AWS tools look at these variables. apt looks at
a file that `APT_CONFIG` names. Java does not look at any.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.context import InlineFile
from rollcage.rollout.sandbox.words import array, quoted

FOLDER = "/etc/rollcage"
BUNDLE = f"{FOLDER}/ca-bundle.pem"
APT_CONFIG = f"{FOLDER}/apt.conf"

TRUST_DIR = "trust"
"""Where the files stand in a build's tar."""

VARIABLES = {
    **dict.fromkeys(
        (
            "SSL_CERT_FILE",
            "CURL_CA_BUNDLE",
            "REQUESTS_CA_BUNDLE",
            "PIP_CERT",
            "NODE_EXTRA_CA_CERTS",
            "GIT_SSL_CAINFO",
            "CARGO_HTTP_CAINFO",
            "AWS_CA_BUNDLE",
        ),
        BUNDLE,
    ),
    "APT_CONFIG": APT_CONFIG,
}

LOCAL = ("localhost", "127.0.0.1", "::1")
"""What runs beside a command is never reached by a proxy."""


@dataclass(frozen=True)
class Trust:
    """A CA bundle, read once, so that the file may change under a job without changing it."""

    path: Path
    bundle: bytes = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Trust:
        """Raises `OSError`, and `ValueError` where the file holds no certificate."""
        found = Path(path).resolve()
        bundle = found.read_bytes()
        if (
            b"-----BEGIN CERTIFICATE-----" not in bundle
            and b"-----BEGIN TRUSTED CERTIFICATE-----" not in bundle
        ):
            raise ValueError(f"{path} holds no certificate in PEM")
        return cls(found, bundle)

    @property
    def bind(self) -> str:
        """As the engine takes it: what `keep` wrote, at `FOLDER`, read-only."""
        return f"{_cache() / self.digest}:{FOLDER}:ro"

    def keep(self) -> None:
        """Write the files that sandboxes get, where they are not there yet. Raises `OSError`."""
        folder = _cache() / self.digest
        if folder.is_dir():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        made.chmod(0o755)
        for file in self.files:
            if file.body is not None:
                (made / file.path.rpartition("/")[2]).write_bytes(file.body)
                (made / file.path.rpartition("/")[2]).chmod(0o644)
        try:
            made.rename(folder)
        except OSError as error:
            shutil.rmtree(made)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
                raise

    @property
    def digest(self) -> str:
        """Part of the digest of every image that is built with it."""
        return hashlib.sha256(self.bundle).hexdigest()

    @property
    def files(self) -> tuple[InlineFile, ...]:
        """What a build's tar must hold."""
        return (
            InlineFile(TRUST_DIR, 0o755),
            InlineFile(f"{TRUST_DIR}/ca-bundle.pem", 0o644, body=self.bundle),
            InlineFile(f"{TRUST_DIR}/apt.conf", 0o644, body=f'Acquire::https::CaInfo "{BUNDLE}";\n'.encode()),
        )

    def instructions(self, escape: str, *, with_files: bool) -> list[str]:
        """What stands at the head of a stage that has RUN steps."""
        copy = [f"COPY {array([TRUST_DIR, FOLDER + '/'], escape)}"] if with_files else []
        return [*copy, *(f"ARG {name}={quoted(value, escape)}" for name, value in VARIABLES.items())]


def load_trust(path: str | None, *, local: bool) -> Trust | None:
    """The bundle at `path` on this machine, ready for sandboxes. `local`: their engine is on this machine too.
    Raises `SandboxError`."""
    if path is None:
        return None
    try:
        if not local:
            raise ValueError("it is bound into sandboxes, and the engine is on another machine")
        trust = Trust.read(path)
        trust.keep()
    except (OSError, ValueError) as error:
        raise SandboxError("container_start", f"sandbox.ca_bundle cannot be used: {error}") from error
    return trust


def _cache() -> Path:
    cache = os.environ.get("ROLLCAGE_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "rollcage").absolute() / "trust"


@dataclass(frozen=True)
class Proxies:
    """The way to the internet, as URLs; `no` are names and networks that are reached without."""

    http: str | None = None
    https: str | None = None
    no: Sequence[str] = ()

    def variables(self) -> dict[str, str]:
        """The variables that programs look at, in both spellings. A build takes them as arguments that it knows by
        itself: they are neither kept in the image nor part of what it is built from."""
        if self.http is None and self.https is None:
            return {}
        values = {"HTTP_PROXY": self.http, "HTTPS_PROXY": self.https}
        set_ = {name: value for name, value in values.items() if value is not None}
        set_["NO_PROXY"] = ",".join(dict.fromkeys((*self.no, *LOCAL)))
        return {**set_, **{name.lower(): value for name, value in set_.items()}}


def sandbox_env(
    trust: Trust | None, proxies: Proxies | None, image_env: Mapping[str, str], *, internet: bool
) -> dict[str, str]:
    """What a sandbox's environment has beside the task's own; nothing that its image sets."""
    wanted = dict(VARIABLES) if trust is not None else {}
    if proxies is not None and internet:
        wanted |= proxies.variables()
    return {name: value for name, value in wanted.items() if name not in image_env}
