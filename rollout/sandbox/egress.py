"""An allowlist, kept: a network of its own for all sandboxes that have this list, and a resolver on its gateway.

The bridge's chain of rules opens the list's addresses and refuses the rest, so that it does not matter what a
sandbox says of its own address. Names are answered by a resolver of ours, which is the only one that sandboxes on
this network reach: of a name that is allowed it opens the addresses before it answers with them. Everything else
has no name. When this process is gone nothing is answered, and nothing is opened.

An address that two names share (as on a CDN) is open for both. Private ranges are never opened for a task, whatever
its list or a name's owner says, but for those that the operator allows.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from rollcage.rollout.allowlist import Allowlist, read_allowlist
from rollcage.rollout.outcome import Evidence, SandboxError, TaskError
from rollcage.rollout.sandbox import dns, firewall
from rollcage.rollout.sandbox.bridges import Bridge
from rollcage.rollout.sandbox.firewall import REFUSED
from rollcage.rollout.sandbox.threads import in_thread

PORT = 53

FRESH_SEC = 30
"""How long an answer is good: given with it, and kept so long here."""

MOST_ADDRESSES = 1024
"""Opened for one network: its rules are looked through for every new connection."""

MOST_NAMES = 4096
"""Answers kept for one network."""

MOST_AT_ONCE = 64
"""Lookups under way for one network, and TCP connections to its resolver. What comes on top gets no answer."""

TCP_SEC = 10.0

_REFUSED = [ipaddress.IPv4Network(text) for text in REFUSED]
_lookups = ThreadPoolExecutor(16, thread_name_prefix="lookup")


def parse_allowed(entries: Iterable[str], allow_private: Sequence[str] = ()) -> Allowlist:
    """The list; raises `TaskError` (`unsupported`) that names the entry which cannot be kept."""
    try:
        allowlist = read_allowlist(entries)
    except ValueError as error:
        raise TaskError(
            "unsupported", f"allowed_hosts: {error}", Evidence(str(error), "task files")
        ) from error
    opened = [ipaddress.IPv4Network(text) for text in allow_private]
    for network in allowlist.networks:
        private = any(network.subnet_of(refused) for refused in _REFUSED)
        if private and not any(network.subnet_of(one) for one in opened):
            said = (
                f"allowed_hosts: {network} is not on the internet; sandbox.network.allow_private must name it"
            )
            raise TaskError("unsupported", said, Evidence(said, "task files"))
    return allowlist


def not_internet(entries: Iterable[str]) -> dict[str, list[str]]:
    """The IP entries that overlap what is not the internet, with these ranges. Raises `ValueError` for no entry."""
    overlaps = {
        str(network): [str(refused) for refused in _REFUSED if network.overlaps(refused)]
        for network in read_allowlist(entries).networks
    }
    return {network: ranges for network, ranges in overlaps.items() if ranges}


class Egress:
    """What one network's sandboxes may reach. Made by `open`."""

    def __init__(self, bridge: Bridge, allow_private: Sequence[str]) -> None:
        self.bridge = bridge
        self.allowlist = parse_allowed(bridge.allowed, allow_private)
        self._private = [ipaddress.IPv4Network(text) for text in allow_private]
        self._opened: set[str] = set()
        self._opening = asyncio.Lock()
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._at_once = self._connections = 0
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    @classmethod
    async def open(cls, bridge: Bridge, allow_private: Sequence[str]) -> Egress:
        """Set the network's rules and start its resolver. Raises `SandboxError` (`network_setup`)."""
        egress = cls(bridge, allow_private)
        await in_thread(firewall.set_network, bridge.interface, egress._rules())
        loop = asyncio.get_running_loop()
        try:
            egress._udp, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(egress), local_addr=(bridge.gateway, PORT)
            )
            egress._tcp = await asyncio.start_server(egress._connected, bridge.gateway, PORT)
        except OSError as error:
            await egress.close()
            said = (
                f"the resolver for allowlists could not listen at {bridge.gateway}:{PORT}: {error}; where a DNS server "
                "of this machine holds port 53 of every address, have it listen at its own addresses only"
            )
            raise SandboxError("network_setup", said) from error
        except BaseException:
            await egress.close()
            raise
        return egress

    async def close(self) -> None:
        """Answer no more. The rules stay until the network is gone."""
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()

    async def answer(self, packet: bytes) -> bytes | None:
        """What is answered to a query; None where there is no answer at all."""
        query = dns.read_query(packet)
        if query is None or self._at_once >= MOST_AT_ONCE:
            return None
        if not self.allowlist.allows(query.name):
            return dns.answer(query, dns.NAME_ERROR)
        if query.kind != dns.A:
            return dns.answer(query, dns.NO_ERROR)
        self._at_once += 1
        try:
            addresses = await self._addresses(query.name.lower())
        except socket.gaierror as error:
            gone = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
            return dns.answer(query, dns.NAME_ERROR if gone else dns.SERVER_FAILURE)
        except (SandboxError, UnicodeError):
            return dns.answer(query, dns.SERVER_FAILURE)
        finally:
            self._at_once -= 1
        return dns.answer(query, dns.NO_ERROR, addresses, FRESH_SEC)

    async def _addresses(self, name: str) -> list[str]:
        """A name's addresses, opened. Raises `socket.gaierror` and `SandboxError`."""
        known = self._known.get(name)
        if known is not None and time.monotonic() - known[0] < FRESH_SEC:
            return known[1]
        loop = asyncio.get_running_loop()
        # The dot at its end: no search domain of this machine is tried.
        found = await loop.run_in_executor(_lookups, socket.getaddrinfo, f"{name}.", None, socket.AF_INET)
        addresses = sorted({str(entry[4][0]) for entry in found if self._may_open(str(entry[4][0]))})
        async with self._opening:
            new = [address for address in addresses if address not in self._opened]
            if len(self._opened) + len(new) > MOST_ADDRESSES:
                raise SandboxError(
                    "network_setup", f"names of one allowlist have over {MOST_ADDRESSES} addresses"
                )
            if new:
                rules = [
                    f"-d {address} -j {self._verdict(ipaddress.IPv4Network(address))}" for address in new
                ]
                await in_thread(firewall.open_in_network, self.bridge.interface, rules)
                self._opened.update(new)
        if len(self._known) >= MOST_NAMES:
            self._known.clear()
        self._known[name] = (time.monotonic(), addresses)
        return addresses

    def _rules(self) -> list[str]:
        opened = []
        for network in self.allowlist.networks:
            opened += [_narrower(network, private) for private in self._private if network.overlaps(private)]
        rules = [f"-d {network} -j ACCEPT" for network in opened]
        rules += [f"-d {network} -j RETURN" for network in self.allowlist.networks]
        return [*rules, f"-j {firewall.REFUSE}"]

    def _may_open(self, address: str) -> bool:
        network = ipaddress.IPv4Network(address)
        if self._verdict(network) == "ACCEPT":
            return True
        return not any(network.subnet_of(refused) for refused in _REFUSED)

    def _verdict(self, network: ipaddress.IPv4Network) -> str:
        """ACCEPT passes by the rules for all networks, which refuse private ranges."""
        return "ACCEPT" if any(network.subnet_of(private) for private in self._private) else "RETURN"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One query over TCP; its length stands before it, in two bytes."""
        if self._connections >= MOST_AT_ONCE:
            writer.close()
            return
        self._connections += 1
        try:
            async with asyncio.timeout(TCP_SEC):
                length = int.from_bytes(await reader.readexactly(2), "big")
                said = await self.answer(await reader.readexactly(length))
                if said is not None:
                    writer.write(len(said).to_bytes(2, "big") + said)
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # who asks so gets no answer
        finally:
            self._connections -= 1
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    """Queries over UDP."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self._work: set[asyncio.Task[None]] = set()
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(self._work) >= MOST_AT_ONCE:
            return
        task = asyncio.get_running_loop().create_task(self._reply(data, addr))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _reply(self, data: bytes, address: tuple[str, int]) -> None:
        said = await self._egress.answer(data)
        if said is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(said, address)


def _narrower(one: ipaddress.IPv4Network, other: ipaddress.IPv4Network) -> ipaddress.IPv4Network:
    """Of two networks that overlap, the one that lies in the other."""
    return one if one.prefixlen >= other.prefixlen else other
