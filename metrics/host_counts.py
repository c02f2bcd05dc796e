"""What a host counts: its sandboxes, the images and networks that it makes for them, and what the dead left there.

It listens to the host's pool, and is told the rest. Gauges are brought up to date before a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollcage.metrics.counts import Counts, Snapshot
from rollcage.metrics.definitions import LABELS, Sender
from rollcage.rollout.outcome import BY_NAME, Domain

BRIDGE_PORTS = 1023
"""Of a Linux bridge: BR_MAX_PORTS less one, in net/bridge/br_private.h."""


class HostCounts:
    """One host's counts; `host` is its name."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._counts = Counts(Sender.HOST, {"host": [host]})
        self._counts.set("host_up", 1, host)
        self._counts.set("disk_free_bytes", math.nan, host)

    # Events

    def acquired(self, seconds: float, *, warm: bool) -> None:
        """See `rollout/sandbox/pool.py`, `Listener`."""
        self._counts.observe("sandbox_acquire_seconds", seconds, "warm" if warm else "cold")

    def removed(self, seconds: float) -> None:
        """Likewise."""
        self._counts.observe("sandbox_remove_seconds", seconds)

    def image(self, seconds: float, *, built: bool) -> None:
        """An image was asked for and is there; `built` within `seconds`, else it was there or fetched."""
        self._counts.add("image_builds", "built" if built else "cached")
        if built:
            self._counts.observe("image_build_seconds", seconds)

    def image_failed(self, error_class: str) -> None:
        """An image was asked for and cannot be had."""
        row = BY_NAME.get(error_class)
        task = row is not None and row.domain is Domain.TASK
        self._counts.add("image_builds", "task_fault" if task else "infra_fault")

    def reaped(self, resources: Mapping[str, int]) -> None:
        """Resources of the dead were removed, by kind."""
        for kind in LABELS["resource"]:
            self._counts.add("resources_reaped", kind, amount=resources.get(kind, 0))

    # Gauges

    def leaked(self, resources: Mapping[str, int]) -> None:
        """Resources of the dead that are still there, by kind."""
        for kind in LABELS["resource"]:
            self._counts.set("resources_leaked", resources.get(kind, 0), kind, self._host)

    def sandboxes(self, *, warm: int, in_use: int, removing: int) -> None:
        """How many there are."""
        for state, number in (("warm", warm), ("in_use", in_use), ("removing", removing)):
            self._counts.set("sandboxes", number, state, self._host)

    def networks(
        self, leases: Mapping[str, int], capacity: Mapping[str, int], *, bridges: int, ports_in_use: int
    ) -> None:
        """Leases that are held and can be held, by kind; `bridges` that many share, and their ports in use."""
        for kind in LABELS["network_kind"]:
            self._counts.set("network_leases", leases[kind], kind, self._host)
            self._counts.set("network_capacity", capacity[kind], kind, self._host)
        self._counts.set("bridge_ports", bridges * BRIDGE_PORTS, self._host)
        self._counts.set("bridge_ports_in_use", ports_in_use, self._host)

    def disk(self, free_bytes: int | None) -> None:
        """Bytes free where the engine keeps its data; None where that cannot be seen, and the gauge is NaN."""
        self._counts.set("disk_free_bytes", math.nan if free_bytes is None else free_bytes, self._host)

    def snapshot(self) -> Snapshot:
        """All of it."""
        return self._counts.snapshot()
