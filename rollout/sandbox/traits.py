"""What an engine is and has, asked once: what a container can be made with depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rollcage.rollout.outcome import Evidence, SandboxError
from rollcage.rollout.sandbox.engine import Engine


@dataclass(frozen=True)
class EngineTraits:
    """`cpus` None: not known. `seccomp`: it can filter system calls. `runtimes` are those that it lists."""

    podman: bool = False
    seccomp: bool = True
    cpus: int | None = None
    runtimes: tuple[str, ...] = ()


_known: WeakKeyDictionary[Engine, EngineTraits] = WeakKeyDictionary()


async def engine_traits(engine: Engine) -> EngineTraits:
    """The engine's traits. Raises `SandboxError`."""
    if engine not in _known:
        version = await engine.call("ask the engine's version", lambda api: api.version())
        info = await engine.call("ask the engine about itself", lambda api: api.info())
        _known[engine] = traits_of(version, info)
    return _known[engine]


def traits_of(version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineTraits:
    """The traits in the answers to the engine's /version and /info."""
    parts = [str(part.get("Name")) for part in version.get("Components") or []]
    options = [str(option) for option in info.get("SecurityOptions") or []]
    return EngineTraits(
        podman="Podman Engine" in parts,
        seccomp=any(option.startswith("name=seccomp") for option in options),
        cpus=int(info.get("NCPU") or 0) or None,
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
    )


def check_runtime(traits: EngineTraits, runtime: str | None) -> None:
    """Raise `SandboxError` (`container_start`) where the engine has no runtime of this name. Engines from 23 on also
    take the name of a containerd shim, which they do not list."""
    if runtime is None or not traits.runtimes or runtime in traits.runtimes:
        return
    if runtime.startswith(("io.containerd.", "/")):
        return
    said = (
        f'the engine has no runtime {runtime!r} (it has {", ".join(traits.runtimes)}): add it to "runtimes" in its'
        " daemon.json, or set sandbox.runtime to one that is there"
    )
    raise SandboxError("container_start", said, Evidence(said))
