"""The flags of RUN: which change nothing, which BuildKit alone can do, and which nobody here can.

Mounts are read as BuildKit reads them (https://docs.docker.com/reference/dockerfile/#run---mount): comma-separated
options, each after quotes and variables. A bind mount of the context is moved to where the context stands in our tar.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from rollcage.rollout.sandbox.context import FILES_DIR, Context
from rollcage.rollout.sandbox.dockerfile import DockerfileError, Instruction, place
from rollcage.rollout.sandbox.stages import Plan, expanded, mount_options

Api = tuple[int, int]
"""The version of the Engine's API, (1, 41) for instance, where that engine offers BuildKit. It says which Dockerfile
frontend is built in: https://docs.docker.com/reference/api/engine/version-history/."""

MOUNTS_API = (1, 40)
COPY_CHMOD_API = (1, 41)
NETWORK_API = (1, 42)
REMOTES_API = (1, 44)
ENGINES = {MOUNTS_API: "19.03", COPY_CHMOD_API: "20.10", NETWORK_API: "23.0", REMOTES_API: "25.0"}
"""Engines from which the built-in frontend has `RUN --mount`, `COPY --chmod` (Dockerfile 1.2), `RUN --network`
(1.4), and ADD of repositories and of checksums (1.6)."""

TYPES = ("bind", "cache", "tmpfs", "secret", "ssh")
VALUED = frozenset({"type", "from", "source", "target", "size", "id", "sharing", "mode", "uid", "gid", "env"})
BARE = frozenset({"readonly", "readwrite", "required"})


class RunFlags:
    """Lowers the flags of one Dockerfile's RUNs. `buildkit` None: the engine offers none."""

    def __init__(self, plan: Plan, context: Context, buildkit: Api | None) -> None:
        self.plan = plan
        self.context = context
        self.buildkit = buildkit

    def lower(self, at: Instruction, stage: int, env: Mapping[str, str]) -> list[str]:
        """The flags that stay; where any does, the instruction needs BuildKit. Raises `DockerfileError`."""
        kept = (self._flag(at, flag, stage, env) for flag in at.flags)
        return [flag for flag in kept if flag is not None]

    def _flag(self, at: Instruction, flag: str, stage: int, env: Mapping[str, str]) -> str | None:
        name, _, value = flag.removeprefix("--").partition("=")
        if name == "mount":
            return self._mount(at, value, stage, env)
        if (name, value) in (("network", "default"), ("security", "sandbox")):
            return None
        if name == "network" and value == "none":
            if self.buildkit is None or self.buildkit < NETWORK_API:
                raise self._unsupported(
                    at,
                    f"RUN {flag} needs BuildKit of Engine 23.0 or later",
                    "take the flag out",
                    "--network",
                )
            return flag
        if name in ("network", "security", "device"):
            raise self._unsupported(
                at, f"RUN {flag} is more than a build is given", "take the flag out", f"--{name}"
            )
        raise self.plan.dockerfile.error(at, f"RUN has no flag {flag}", "take it out", token=f"--{name}")

    def _mount(self, at: Instruction, value: str, stage: int, env: Mapping[str, str]) -> str | None:
        dockerfile = self.plan.dockerfile
        options: dict[str, str] = {}
        for key, text in mount_options(value).items():
            if key not in VALUED | BARE or (text is None and key not in BARE):
                said = f"{key} has no value" if key in VALUED else f"a mount has no option {key!r}"
                raise dockerfile.error(at, said, "see the reference for RUN --mount", token=key)
            options[key] = "" if text is None else expanded(dockerfile, at, text, env)
        kind = options.get("type", "bind").lower()
        if kind not in TYPES:
            raise dockerfile.error(
                at, f"there is no mount of type {kind}", "it is one of " + ", ".join(TYPES), token=kind
            )
        if kind in ("secret", "ssh"):
            remedy = "a build has no secrets and no keys: use a build argument or fetch the files beforehand"
            raise self._unsupported(at, f"RUN --mount=type={kind} has no source here", remedy, "--mount")
        if self.buildkit is None or self.buildkit < MOUNTS_API:
            if kind == "cache" and "from" not in options:
                return None  # what it holds is lost with the build in any case
            remedy = "COPY the files before this step" if kind == "bind" else "take the mount out"
            said = f"RUN --mount={value} needs BuildKit, which this engine does not offer"
            raise self._unsupported(at, said, remedy, "--mount")
        if "from" in options:
            source = self.plan.stage_of(options["from"], stage, at)
            if source is not None and options["from"].isdecimal():
                options["from"] = str(self.plan.needed.index(source))
        elif kind == "bind":
            options["source"] = self._in_context(at, options.get("source", ""))
        texts = [f"{key}={text}" if text else key for key, text in options.items()]
        if odd := next((text for text in texts if re.search(r"[\s\"'\\`,]", text)), None):
            raise self._unsupported(
                at, f"a mount with {odd!r}", "use paths without spaces, quotes and commas", "--mount"
            )
        return "--mount=" + ",".join(texts)

    def _in_context(self, at: Instruction, source: str) -> str:
        path = posixpath.normpath("/" + source).lstrip("/")
        if not self.context.find(re.sub(r"([*?\[\\])", r"\\\1", path)):
            line, column = place(at, source)
            raise DockerfileError(
                "image_build",
                self.plan.dockerfile.file,
                line,
                column,
                f"the mount's source {source} is not in the build context",
                "add the file, or correct the path",
            )
        return posixpath.join(FILES_DIR, path).rstrip("/")

    def _unsupported(self, at: Instruction, problem: str, remedy: str, token: str) -> DockerfileError:
        return self.plan.dockerfile.unsupported(at, problem, remedy, token)
