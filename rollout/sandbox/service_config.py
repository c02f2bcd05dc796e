"""What the container of a task's other service is made with: a sandbox's limits and hardening, its own program.

Nothing of it outlives the rollout: no port of the host, no path of the host, volumes of the rollout's own. Its
output is kept by the engine, the last of it, because a service that dies says why there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollcage.rollout.compose import MAIN, Service
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.hostconfig import container_config
from rollcage.rollout.sandbox.traits import EngineTraits

LOG_CONFIG = {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "2"}}
"""Two files, because one alone is emptied as it gets full."""

LOG_LINES = 60


def service_spec(
    service: Service, main: SandboxSpec, network: str, volumes: Mapping[str, str], *, alone: bool
) -> SandboxSpec:
    """A service's spec, limits aside. `main` is the agent's; `volumes` are the engine's names for those of the
    file. One that is `alone` shares its network with strangers, and has no name there."""
    shared = [mount for mount in service.mounts if mount.volume is not None]
    own = [m.target for m in service.mounts if (m.volume, m.source, m.content) == (None, None, None)]
    joins = network not in ("none", "host") and not network.startswith("container:")
    spec = replace(
        main,
        network=network,
        dns=main.dns if joins else (),
        aliases=tuple(dict.fromkeys((service.name, *service.aliases))) if joins and not alone else (),
        binds=tuple(
            f"{volumes[mount.volume or '']}:{mount.target}{':ro' if mount.read_only else ''}"
            for mount in shared
        ),
        volumes=tuple(own),
        tmpfs=service.tmpfs,
        extra_hosts=service.extra_hosts if joins or network == "none" else (),
        hostname=_hostname(service) if not network.startswith("container:") else None,
        shm_mb=service.shm_mb,
        pids=min(service.pids or main.pids, main.pids),
    )
    if service.name == MAIN:
        return replace(spec, env={**service.env, **main.env})
    return replace(spec, name=f"{main.name}-{service.name}", env=service.env, workdir=service.workdir)


def service_config(service: Service, spec: SandboxSpec, traits: EngineTraits) -> dict[str, Any]:
    """The body of the container-create request for a service that is not `main`."""
    config = container_config(spec, traits)
    for key in ("Entrypoint", "Cmd", "User", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr"):
        del config[key]
    if service.entrypoint is not None:
        config["Entrypoint"] = _words(service.entrypoint)
    if service.command is not None:
        config["Cmd"] = list(service.command)
    if service.user is not None:
        config["User"] = service.user
    if service.stop_signal is not None:
        config["StopSignal"] = service.stop_signal
    config["OpenStdin"], config["Tty"] = service.stdin_open, service.tty
    host = config["HostConfig"]
    name, _, count = service.restart.partition(":")
    host.update(
        Init=service.init,
        LogConfig=LOG_CONFIG,
        CapAdd=list(service.capabilities),
        ReadonlyRootfs=service.read_only,
        RestartPolicy={"Name": name, "MaximumRetryCount": int(count or 0)},
    )
    if service.sysctls:
        host["Sysctls"] = service.sysctls
    host["Ulimits"] += [
        {"Name": limit, "Soft": soft, "Hard": hard}
        for limit, (soft, hard) in service.ulimits.items()
        if limit != "core"
    ]
    return config


def _hostname(service: Service) -> str | None:
    """The agent's own is a constant, as in `SandboxSpec`: no name by which it would find another service."""
    return service.hostname or (MAIN if service.name == MAIN else None)


def _words(entrypoint: Sequence[str]) -> list[str]:
    """An empty entrypoint takes the image's away; for the engine, an empty list leaves it."""
    return list(entrypoint) or [""]
