"""What a job wants of its sandboxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollcage.rollout.sandbox.trust import Proxies


@dataclass(frozen=True)
class SandboxSettings:
    """What a job wants of its sandboxes.

    `cpus`, `memory_mb` (MiB) and `storage_mb` (MiB) stand in where a task sets none; None means no limit.
    `deadline_sec`: a sandbox ends by itself so long after its start. `environ` resolves `${VAR}` in tasks.
    `memory_reserve_mb`: what a sandbox counts for in admission, None: its limit. `admit_memory_mb` and
    `admit_cpus`: what may be admitted at once, None: by the engine's machine. `warm`: how many sandboxes are
    started ahead. `image_disk_gb` (GiB): what our images may take of the engine's disk (`image_gc.py`). `ca_bundle`
    and `proxies`: see `trust.py`. `keep_states`: whose states are saved (`none`, `failed` or `all`), and
    `states_disk_gb` (GiB): see `states.py`.
    """

    docker_host: str | None = None
    build_slots: int = 2
    pids: int = 1024
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    deadline_sec: float = 6 * 3600.0
    runtime: str | None = None
    network_cidr: str | None = None
    leases_per_bridge: int = 900
    insecure_network: bool = False
    allow_private: tuple[str, ...] = ()
    network_modes: frozenset[str] = frozenset()
    environ: Mapping[str, str] = field(default_factory=dict)
    memory_reserve_mb: int | None = None
    admit_memory_mb: int | None = None
    admit_cpus: float | None = None
    least_disk_mb: int = 1024
    warm: int = 0
    image_disk_gb: float | None = None
    ca_bundle: str | None = None
    proxies: Proxies = field(default_factory=Proxies)
    keep_states: str = "none"
    states_disk_gb: float | None = None
