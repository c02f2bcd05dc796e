"""Networks that sandboxes lease. None is ever made for a rollout.

An engine has address pools for some thirty networks and a bridge has ports for 1,023 containers, so sandboxes
with internet share few bridges of our own: made once per host, in a range that nobody else uses, traffic between
containers off, at most `leases_per_bridge` on each. Another bridge is made when all are full. What cannot be had
is waited for: a full range, or an engine without pools, never fails a rollout that others will make room for.

Two hosts on one engine keep apart: names carry the host, and a subnet that the other took first is passed over.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docker.types import IPAMConfig, IPAMPool

from rollcage.rollout.outcome import SandboxError, TaskError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.reaper import DEADLINE_LABEL, HOST_LABEL, remove_networks

DEFAULT_RANGES = ("10.199.0.0/16", "10.211.0.0/16", "172.16.0.0/16")
"""Searched in order for free subnets where the operator names no range. Docker's own pools lie elsewhere."""

BRIDGE_PREFIX = 22
"""A /22 has addresses for the 1,023 ports of one bridge."""

LEASES_PER_BRIDGE = 900

NETWORK_LIFE_SEC = 7 * 24 * 3600.0
"""A bridge outlives any host's run; past this it is left over and the reaper may take it, if it is unused."""


RETRY_SEC = 5.0
"""How often a full engine is asked again while no lease comes back: other tenants give theirs back unseen."""

ROUTES = Path("/proc/net/route")


@dataclass(frozen=True)
class NetworkLease:
    """A place on a network. `name` is the engine's name for it, or `none`."""

    name: str


@dataclass
class _Bridge:
    name: str
    places: int
    leases: int = 0


class Networks:
    """The networks of one host on one engine. `cidr`: a range for our bridges, of which each takes a /22
    (a smaller range makes one bridge of its size)."""

    def __init__(
        self,
        engine: Engine,
        host_id: str,
        *,
        cidr: str | None = None,
        leases_per_bridge: int = LEASES_PER_BRIDGE,
    ) -> None:
        self.engine = engine
        self.host_id = host_id
        self.ranges = [ipaddress.IPv4Network(text) for text in ((cidr,) if cidr else DEFAULT_RANGES)]
        self.leases_per_bridge = leases_per_bridge
        self._bridges: list[_Bridge] = []
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def leases(self) -> int:
        """Leases that are held on bridges."""
        return sum(bridge.leases for bridge in self._bridges)

    @property
    def places(self) -> int:
        """Leases that the bridges made so far can hold."""
        return sum(bridge.places for bridge in self._bridges)

    async def lease(self, mode: str) -> NetworkLease:
        """A place on a network for `public`, none for `none` and `no-network`; waits, first come first served,
        where all places are taken.

        Raises `TaskError` (`unsupported`) for any other mode, and `SandboxError` where the engine fails for
        another reason than that it has no room.
        """
        if mode in ("none", "no-network"):
            return NetworkLease("none")
        if mode != "public":
            raise TaskError("unsupported", f"the network mode {mode!r} is not supported yet")
        async with self._turn:
            while (bridge := self._with_room()) is None:
                self._released.clear()
                if not await self._make_bridge():
                    await self._room_may_have_come()
            bridge.leases += 1
            return NetworkLease(bridge.name)

    def release(self, lease: NetworkLease) -> None:
        """Give a lease back, once."""
        for bridge in self._bridges:
            if bridge.name == lease.name:
                bridge.leases -= 1
                self._released.set()

    async def close(self) -> None:
        """Remove this host's networks. One to which a container is still attached is left to the reaper."""
        self._bridges.clear()
        await remove_networks(self.engine, self.host_id, now=time.time())

    def _with_room(self) -> _Bridge | None:
        return next((bridge for bridge in self._bridges if bridge.leases < bridge.places), None)

    async def _room_may_have_come(self) -> None:
        try:
            async with asyncio.timeout(RETRY_SEC):
                await self._released.wait()
        except TimeoutError:
            return

    async def _make_bridge(self) -> bool:
        """Whether another bridge could be made: not where ranges or the engine's pools are used up."""
        networks = await self.engine.call("list networks", lambda api: api.networks())
        names = {network["Name"] for network in networks}
        used = [*subnets(networks), *routes()]
        for subnet in self._free(used):
            name = self._name(names)
            try:
                await self.engine.call("create a network", partial(self._create, name=name, subnet=subnet))
            except SandboxError as error:
                if _is_taken(error):
                    continue  # by another host, since we looked
                if error.error_class == "network_pool":
                    return False
                raise
            places = min(self.leases_per_bridge, subnet.num_addresses - 3)
            self._bridges.append(_Bridge(name, places))
            return True
        return False

    def _free(self, used: Iterable[ipaddress.IPv4Network]) -> Iterator[ipaddress.IPv4Network]:
        taken = list(used)
        for network in self.ranges:
            for subnet in network.subnets(new_prefix=max(BRIDGE_PREFIX, network.prefixlen)):
                if not any(subnet.overlaps(other) for other in taken):
                    yield subnet

    def _name(self, names: set[str]) -> str:
        stem = "rollcage-" + re.sub(r"[^a-zA-Z0-9_.-]", "-", self.host_id)
        number = next(number for number in range(len(names) + 1) if f"{stem}-{number}" not in names)
        return f"{stem}-{number}"

    def _create(self, api: Any, *, name: str, subnet: ipaddress.IPv4Network) -> None:
        api.create_network(
            name,
            driver="bridge",
            check_duplicate=True,
            ipam=IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))]),
            options={"com.docker.network.bridge.enable_icc": "false"},
            labels={HOST_LABEL: self.host_id, DEADLINE_LABEL: str(int(time.time() + NETWORK_LIFE_SEC))},
        )


def _is_taken(error: SandboxError) -> bool:
    """Whether the engine says that this very subnet is another network's."""
    said = error.message.lower()
    return error.error_class == "network_setup" and ("overlap" in said or "conflicts with" in said)


def subnets(networks: Iterable[dict[str, Any]]) -> Iterator[ipaddress.IPv4Network]:
    """The IPv4 subnets of networks as the engine lists them."""
    for network in networks:
        for config in (network.get("IPAM") or {}).get("Config") or []:
            if (text := config.get("Subnet", "")) and ":" not in text:
                yield ipaddress.IPv4Network(text, strict=False)


def routes() -> Iterator[ipaddress.IPv4Network]:
    """Where this machine's own routes lead, but for the default one; none where there is no Linux to ask.
    Addresses are little-endian hexadecimal: https://docs.kernel.org/filesystems/proc.html"""
    if not ROUTES.exists():
        return
    for line in ROUTES.read_text().splitlines()[1:]:
        target, mask = (int.from_bytes(bytes.fromhex(line.split()[at]), "little") for at in (1, 7))
        if mask:
            yield ipaddress.IPv4Network((target, bin(mask).count("1")), strict=False)
