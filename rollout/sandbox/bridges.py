"""One network of ours on an engine: a bridge with a name of our own, made with its rules or not at all.

    engine: network with a bridge of our name -> that bridge is seen here -> IPv6 off on it -> rules

Where the bridge is not seen, the engine's network namespace is not this process's, and rules set here would keep
nobody from anything.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docker.types import IPAMConfig, IPAMPool

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.firewall import INTERNAL, PRIVATE
from rollcage.rollout.sandbox.reaper import DEADLINE_LABEL, HOST_LABEL
from rollcage.rollout.sandbox.subnets import routes, subnets
from rollcage.rollout.sandbox.threads import in_thread

NETWORK_LIFE_SEC = 7 * 24 * 3600.0
"""A bridge outlives any host's run; past this it is left over and the reaper may take it, if it is unused."""

IPV6_OFF = "/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"


@dataclass(eq=False)
class Bridge:
    """A network that is there. `name` is the engine's for it, `interface` the bridge's on the engine's machine,
    `places` how many containers it may hold. `allowed`: the allowlist that it is for."""

    kind: str
    name: str
    interface: str
    subnet: ipaddress.IPv4Network
    places: int
    leases: int = 0
    allowed: tuple[str, ...] = ()

    @property
    def addresses(self) -> int:
        """How many containers it has addresses for."""
        return self.subnet.num_addresses - 3

    @property
    def gateway(self) -> str:
        """This machine's own address on it."""
        return str(self.subnet.network_address + 1)


async def used_subnets(engine: Engine) -> list[ipaddress.IPv4Network]:
    """What is taken on the engine, and by this machine's routes."""
    networks = await engine.call("list networks", lambda api: api.networks())
    return [*subnets(networks), *routes()]


async def make_bridge(
    engine: Engine,
    host_id: str,
    kind: str,
    candidates: Iterable[ipaddress.IPv4Network],
    places: int,
    *,
    prefix: str = firewall.INTERFACE,
) -> Bridge | None:
    """A network of this kind in the first candidate that the engine takes; None where it takes none, or has no
    room for another network. Cancelled, nothing is left behind. Raises `SandboxError`."""
    for subnet in candidates:
        interface = f"{prefix}{kind}{secrets.token_hex(5)}"
        name = f"rollcage-{re.sub(r'[^a-zA-Z0-9_.-]', '-', host_id)}-{interface}"
        bridge = Bridge(kind, name, interface, subnet, places)
        bridge.places = min(places, bridge.addresses)
        made: list[str] = []
        try:
            request = partial(_create, bridge=bridge, host_id=host_id, made=made)
            await engine.call("create a network", request)
            return bridge
        except SandboxError as error:
            if _is_taken(error):
                continue  # by another host, since we looked
            if error.error_class == "network_pool":
                return None
            raise
        except BaseException:
            if made:
                await remove_bridge(engine, bridge)
            raise
    return None


async def is_occupied(engine: Engine, bridge: Bridge) -> bool:
    """Whether a container is on the network, or the network is gone. Raises `SandboxError`."""
    try:
        found = await engine.call("inspect a network", lambda api: api.inspect_network(bridge.name))
    except SandboxError as error:
        if error.evidence.status == 404:
            return True
        raise
    return bool(found.get("Containers"))


async def remove_bridge(engine: Engine, bridge: Bridge) -> None:
    """Remove the network; one that is gone is as good as removed, and one with a container on it is left to the
    reaper. Raises `SandboxError`."""
    try:
        await engine.call("remove a network", lambda api: api.remove_network(bridge.name))
    except SandboxError as error:
        if error.evidence.status not in (403, 404):
            raise


async def can_shut(bridge: Bridge) -> bool:
    """Whether `shut` could set rules for this bridge."""
    return (firewall.INTERFACES / bridge.interface).exists() and await in_thread(firewall.problem) is None


async def shut(bridge: Bridge, allow_private: Sequence[str]) -> None:
    """Have the rules for this bridge: those for all, and its own where `allow_private` (CIDRs) opens something.
    Raises `SandboxError` (`network_setup`) where they cannot be had."""
    await in_thread(_shut, bridge, tuple(allow_private))


def _shut(bridge: Bridge, allow_private: tuple[str, ...]) -> None:
    if why := firewall.problem():
        raise firewall.refusal(why)
    if not (firewall.INTERFACES / bridge.interface).exists():
        raise firewall.refusal(
            f"the bridge {bridge.interface}, which the engine has made, is not here, so that the engine is on another "
            "machine or in another network namespace"
        )
    off = Path(IPV6_OFF.format(interface=bridge.interface))
    try:
        if off.exists():  # it is not where the kernel has no IPv6
            off.write_text("1")
    except OSError as error:
        raise firewall.refusal(
            f"IPv6 cannot be turned off on the bridge {bridge.interface}: {error}"
        ) from error
    firewall.ensure()
    if allow_private:
        firewall.set_network(bridge.interface, open_private(allow_private))


def open_private(allow_private: Iterable[str]) -> list[str]:
    """Rules for ranges that the operator opens, though they are private."""
    return [f"-d {cidr} -j ACCEPT" for cidr in allow_private]


def _create(api: Any, *, bridge: Bridge, host_id: str, made: list[str]) -> None:
    internal = bridge.kind == INTERNAL
    within = bridge.kind in (INTERNAL, PRIVATE)
    options = {
        "com.docker.network.bridge.name": bridge.interface,
        "com.docker.network.bridge.enable_icc": "true" if within else "false",
    }
    if internal:
        # The bridge has no address: this machine is nowhere on such a network, whoever may set rules.
        options["com.docker.network.bridge.inhibit_ipv4"] = "true"
    pool = IPAMPool(subnet=str(bridge.subnet), gateway=bridge.gateway)
    answer = api.create_network(
        bridge.name,
        driver="bridge",
        check_duplicate=True,
        internal=internal,
        ipam=IPAMConfig(pool_configs=[pool]),
        options=options,
        labels={HOST_LABEL: host_id, DEADLINE_LABEL: str(int(time.time() + NETWORK_LIFE_SEC))},
    )
    made.append(answer["Id"])


def _is_taken(error: SandboxError) -> bool:
    """Whether the engine says that this very subnet is another network's."""
    said = error.message.lower()
    return error.error_class == "network_setup" and ("overlap" in said or "conflicts with" in said)
