"""Networks that sandboxes lease. None is ever made for a rollout.

An engine has address pools for some thirty networks and a bridge has ports for 1,023 containers, so sandboxes
with internet share few bridges of our own: made once per host, in a range that nobody else uses, traffic between
containers off, at most `leases_per_bridge` on each. Another bridge is made when all are full.

Small networks come from the same range: a task of several containers has one to itself, and sandboxes with the
same allowlist share one. Given back, they are kept and used again, a few of them idle.

What cannot be had is waited for, first come, first served: a full range, or an engine without pools, never fails a
rollout that others will make room for. Two hosts on one engine keep apart: names are their own, and a subnet that
the other took first is passed over.

    bridges.py     one network on the engine
    firewall.py    the rules that keep sandboxes from everything but the internet
    seclusion.py   one sandbox's port on a shared bridge, kept from all others
    egress.py      allowlists
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network

from rollcage.rollout.outcome import SandboxError, TaskError
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.bridges import (
    Bridge,
    can_shut,
    is_occupied,
    make_bridge,
    remove_bridge,
    shut,
    used_subnets,
)
from rollcage.rollout.sandbox.egress import Egress, parse_allowed
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.firewall import ALLOWLIST, INTERNAL, PRIVATE, SHARED
from rollcage.rollout.sandbox.hostconfig import NO_RESOLVER
from rollcage.rollout.sandbox.reaper import remove_networks
from rollcage.rollout.sandbox.seclusion import seclude
from rollcage.rollout.sandbox.subnets import SMALL_PLACES, Ranges
from rollcage.rollout.sandbox.threads import in_thread

LEASES_PER_BRIDGE = 900

MOST_LEASES = 1000
"""On a bridge, with those of sandboxes that belong to another one: see `lease`."""

SMALL_NETWORKS = 256
"""Small networks of one host at most: each is a bridge and some rules of the engine's own, which every packet of
its machine passes."""

IDLE_NETWORKS = 16
"""Small networks that are kept though nobody holds them."""

RETRY_SEC = 5.0
"""How often a full engine is asked again while no lease comes back: other tenants give theirs back unseen."""

KEEP_SEC = 5.0
"""How old the last look at the rules may be when a lease is given: other programs flush them."""

INSECURE_ALLOWLIST = (
    "an allowlist cannot be kept with sandbox.network.insecure_network: true, which sets no rules; set it to false, "
    'or run tasks with network_mode = "public" or "no-network"'
)


@dataclass(frozen=True)
class NetworkLease:
    """A place on a network, or a whole private one. `name` is the engine's name for it, or `none`. `dns`: the
    resolvers that a container there must be made with; none: the engine's own choice."""

    name: str
    dns: tuple[str, ...] = ()


NONE = NetworkLease("none")


@dataclass(frozen=True)
class Capacity:
    """What a host's networks hold and could hold. `leases` are places on bridges that many sandboxes share,
    `private` networks those of one task, `allowlists` those of one allowlist; `idle` ones are kept for use."""

    bridges: int
    bridges_possible: int
    leases: int
    leases_possible: int
    private: int
    allowlists: int
    idle: int
    small_possible: int
    waiting: int


class _Queue:
    """Who waits for networks of one sort. `turn` is fair; `released` is set when there may be room again."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.released = asyncio.Event()
        self.waiting = 0

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            async with self.turn:
                yield
        finally:
            self.waiting -= 1

    async def until(self, found: Callable[[], Bridge | None], make: Callable[[], Awaitable[bool]]) -> Bridge:
        """What `found` gives; `make` is asked to make it possible, and room is waited for where it cannot."""
        while (bridge := found()) is None:
            self.released.clear()
            if not await make():
                try:
                    async with asyncio.timeout(RETRY_SEC):
                        await self.released.wait()
                except TimeoutError:
                    continue
        return bridge


class Networks:
    """The networks of one host on one engine.

    `cidr`: a range for our bridges, of which each takes a /22 (a smaller range makes one bridge of half its size).
    `insecure`: no rules are set, and sandboxes with internet reach whatever this machine reaches.
    `allow_private`: private ranges (CIDRs) that sandboxes with internet may reach all the same.
    """

    def __init__(
        self,
        engine: Engine,
        host_id: str,
        *,
        cidr: str | None = None,
        leases_per_bridge: int = LEASES_PER_BRIDGE,
        insecure: bool = False,
        allow_private: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.host_id = host_id
        self.ranges = Ranges(cidr)
        bridges, small = list(self.ranges.free_for_bridge(())), list(self.ranges.free_for_small(()))
        self._bridges_possible = len(bridges)
        self._leases_possible = sum(min(leases_per_bridge, subnet.num_addresses - 3) for subnet in bridges)
        self._small_possible = min(len(small), SMALL_NETWORKS)
        self.leases_per_bridge = leases_per_bridge
        self.insecure = insecure
        self.allow_private = tuple(allow_private)
        self._bridges: list[Bridge] = []
        self._small: list[Bridge] = []
        self._egress: dict[Bridge, Egress] = {}
        self._sharing, self._owning = _Queue(), _Queue()
        self._looked = -KEEP_SEC

    @property
    def leases(self) -> int:
        """Leases that are held on shared bridges."""
        return sum(bridge.leases for bridge in self._bridges)

    @property
    def places(self) -> int:
        """Leases that the shared bridges made so far can hold."""
        return sum(bridge.places for bridge in self._bridges)

    async def check(self, modes: Collection[str]) -> None:
        """Find out whether sandboxes with these network modes can be kept from this machine, before any is asked
        for. Raises `SandboxError` (`network_setup`), with the remedy, where they cannot."""
        if self.insecure and "allowlist" in modes:
            raise SandboxError("network_setup", INSECURE_ALLOWLIST)
        if self.insecure or not {"public", "allowlist"} & set(modes):
            return
        if why := await in_thread(firewall.problem):
            raise firewall.refusal(why)
        if "public" in modes:
            async with self._sharing.line():
                await self._make_shared()
        if "allowlist" in modes:
            async with self._owning.line():
                await self._make_allowlist(())

    async def lease(
        self, mode: str, allowed_hosts: Sequence[str] = (), *, holding: bool = False
    ) -> NetworkLease:
        """A place on a network for `public` and `allowlist`, none for `none` and `no-network`; waits where all
        places are taken. `holding`: for who holds a sandbox and needs another; a shared bridge takes it past
        `leases_per_bridge`, up to `MOST_LEASES`.

        Raises `TaskError` (`unsupported`) for another mode and for an allowlist that cannot be kept, and
        `SandboxError` where the engine fails for another reason than that it has no room, or rules cannot be set.
        """
        if mode in ("none", "no-network"):
            return NONE
        if mode == "public" and holding and (bridge := self._shared_beyond()) is not None:
            bridge.leases += 1
            lease = NetworkLease(bridge.name)
            try:
                await self._keep_rules()
            except BaseException:
                self.release(lease)
                raise
            return lease
        if mode == "public":
            async with self._sharing.line():
                bridge = await self._sharing.until(self._shared_with_room, self._make_shared)
                await self._keep_rules()
                bridge.leases += 1
                return NetworkLease(bridge.name)
        if mode != "allowlist":
            raise TaskError("unsupported", f"the network mode {mode!r} is not supported")
        allowed = tuple(sorted(set(allowed_hosts)))
        parse_allowed(allowed, self.allow_private)
        async with self._owning.line():
            bridge = await self._owning.until(
                lambda: self._of_allowlist(allowed), lambda: self._make_allowlist(allowed)
            )
            await self._keep_rules()
            bridge.leases += 1
            return NetworkLease(bridge.name, dns=(bridge.gateway,))

    async def lease_private(self, internet: bool = False) -> NetworkLease:
        """A network for one task's containers, `SMALL_PLACES` at most: they reach each other, by the names that the
        engine's DNS has for them, and nobody else but, with `internet`, the internet. Waits where none can be had.
        Raises `SandboxError` as `lease` does."""
        kind = PRIVATE if internet else INTERNAL
        async with self._owning.line():
            while True:
                bridge = await self._owning.until(lambda: self._idle(kind), lambda: self._make_small(kind))
                if not await is_occupied(self.engine, bridge):
                    break
                self._small.remove(bridge)  # to be left to the reaper, with what could not be removed from it
            if internet:
                await self._keep_rules()
            bridge.leases += 1
            return NetworkLease(bridge.name, dns=() if internet else NO_RESOLVER)

    async def seclude(self, lease: NetworkLease, container_id: str) -> None:
        """Keep a container that has just started from the others on its bridge, and them from it. To be awaited
        before anything runs in it. Raises `SandboxError`."""
        bridge = next((one for one in (*self._bridges, *self._small) if one.name == lease.name), None)
        if bridge is not None and bridge.kind in (SHARED, ALLOWLIST) and not self.insecure:
            await seclude(self.engine, bridge.interface, container_id)

    def release(self, lease: NetworkLease) -> None:
        """Give a lease back, once."""
        for queue, bridges in ((self._sharing, self._bridges), (self._owning, self._small)):
            for bridge in bridges:
                if bridge.name == lease.name:
                    bridge.leases -= 1
                    queue.released.set()

    async def stop(self) -> None:
        """Lease no more, and answer no more queries for allowlists; the networks stay."""
        self._bridges.clear()
        self._small.clear()
        for bridge in list(self._egress):
            await self._egress.pop(bridge).close()

    async def close(self) -> None:
        """Remove this host's networks, and rules that nothing needs any more. A network to which a container is
        still attached is left to the reaper. Raises `SandboxError`."""
        await self.stop()
        await remove_networks(self.engine, self.host_id, now=time.time())

    def capacity(self) -> Capacity:
        """What is held now and what is possible in all, were the host alone."""
        kinds = [bridge.kind for bridge in self._small if bridge.leases]
        return Capacity(
            bridges=len(self._bridges),
            bridges_possible=self._bridges_possible,
            leases=self.leases,
            leases_possible=self._leases_possible,
            private=sum(kind in (PRIVATE, INTERNAL) for kind in kinds),
            allowlists=kinds.count(ALLOWLIST),
            idle=len(self._small) - len(kinds),
            small_possible=self._small_possible,
            waiting=self._sharing.waiting + self._owning.waiting,
        )

    # Shared bridges

    def _shared_with_room(self) -> Bridge | None:
        return next((bridge for bridge in self._bridges if bridge.leases < bridge.places), None)

    def _shared_beyond(self) -> Bridge | None:
        return next((one for one in self._bridges if one.leases < min(MOST_LEASES, one.addresses)), None)

    async def _make_shared(self) -> bool:
        free = self.ranges.free_for_bridge(await used_subnets(self.engine))
        bridge = await self._make(SHARED, free, self.leases_per_bridge)
        return await self._ready(bridge, self._bridges, lambda made: shut(made, self.allow_private))

    # Small networks

    def _idle(self, kind: str) -> Bridge | None:
        return next((one for one in self._small if one.kind == kind and not one.leases), None)

    def _of_allowlist(self, allowed: tuple[str, ...]) -> Bridge | None:
        same = (one for one in self._small if one.kind == ALLOWLIST and one.allowed == allowed)
        return next((one for one in same if one.leases < one.places), None)

    async def _make_small(self, kind: str) -> bool:
        async def prepare(bridge: Bridge) -> None:
            # One without internet is nowhere near this machine, rules or not.
            if kind == PRIVATE or await can_shut(bridge):
                await shut(bridge, self.allow_private if kind == PRIVATE else ())

        return await self._ready(await self._small_bridge(kind), self._small, prepare)

    async def _make_allowlist(self, allowed: tuple[str, ...]) -> bool:
        async def prepare(bridge: Bridge) -> None:
            bridge.allowed = allowed
            await shut(bridge, ())
            self._egress[bridge] = await Egress.open(bridge, self.allow_private)

        if self.insecure:
            raise SandboxError("network_setup", INSECURE_ALLOWLIST)
        return await self._ready(await self._small_bridge(ALLOWLIST), self._small, prepare)

    async def _small_bridge(self, kind: str) -> Bridge | None:
        """A new small network; idle ones make room for it where there are many, or no subnet is left."""
        while True:
            idle = next((bridge for bridge in self._small if not bridge.leases), None)
            count = sum(not bridge.leases for bridge in self._small)
            if count <= IDLE_NETWORKS and len(self._small) < SMALL_NETWORKS:
                free = self.ranges.free_for_small(await used_subnets(self.engine))
                made = await self._make(kind, free, SMALL_PLACES)
                if made is not None:
                    return made
            if idle is None:
                return None
            await self._drop(idle)

    async def _make(self, kind: str, free: Iterable[IPv4Network], places: int) -> Bridge | None:
        prefix = firewall.OPEN if self.insecure else firewall.INTERFACE
        return await make_bridge(self.engine, self.host_id, kind, free, places, prefix=prefix)

    async def _ready(
        self, bridge: Bridge | None, among: list[Bridge], prepare: Callable[[Bridge], Awaitable[None]]
    ) -> bool:
        """Count a network once it has its rules; one that cannot have them is removed."""
        if bridge is None:
            return False
        try:
            if not self.insecure:
                await prepare(bridge)
        except BaseException:
            await self._drop(bridge)
            raise
        among.append(bridge)
        return True

    async def _drop(self, bridge: Bridge) -> None:
        """Remove a network that nobody holds."""
        if bridge in self._small:
            self._small.remove(bridge)
        egress = self._egress.pop(bridge, None)
        if egress is not None:
            await egress.close()
        await remove_bridge(self.engine, bridge)

    async def _keep_rules(self) -> None:
        if not self.insecure and time.monotonic() - self._looked > KEEP_SEC:
            await in_thread(firewall.ensure)
            self._looked = time.monotonic()
