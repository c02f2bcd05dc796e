"""One sandbox's port on a shared bridge, kept from all others: layer 2, where rules of iptables do not look.

A sandbox may have raw sockets (NET_RAW, for ping), and with them it can say at the level of Ethernet that it is
somebody else. So, once its container has started and before anything runs in it:

- its port is isolated: no frame passes between two isolated ports, only to and from this machine;
- its link address stays behind its port, and its IP address with its link address, whatever anybody claims;
- no other address is ever learned behind its port, and nothing that is meant for nobody known is sent there.

What is left to it is to send packets with another's IP address into the internet, and never to see an answer.
"""

from __future__ import annotations

import asyncio
import socket
import threading

from rollcage.rollout.outcome import Evidence, SandboxError
from rollcage.rollout.sandbox import netlink
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.firewall import INTERFACES

SETTINGS = {"isolated": "1", "learning": "0", "unicast_flood": "0", "multicast_flood": "0"}
"""Of a port; https://docs.kernel.org/networking/bridge.html says what each means."""


async def seclude(engine: Engine, interface: str, container_id: str) -> None:
    """Seclude the container's port on the bridge `interface`. Raises `SandboxError`: `network_setup` where the
    kernel refuses, `container_lost` where the container has ended."""
    found = await engine.call("inspect a container", lambda api: api.inspect_container(container_id))
    networks = found["NetworkSettings"]["Networks"].values()
    addresses = [network["IPAddress"] for network in networks if network.get("IPAddress")]
    pid = found["State"]["Pid"]
    if not pid:
        raise SandboxError("container_lost", "the container ended before its network was ready")
    try:
        await _in_own_thread(interface, pid, addresses)
    except OSError as error:
        said = f"a sandbox could not be kept from others on the bridge {interface}: {error}"
        raise SandboxError("network_setup", said, Evidence(said, "rollcage")) from error


async def _in_own_thread(interface: str, pid: int, addresses: list[str]) -> None:
    """In a thread of its own, which goes into the container's network namespace for a moment."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: OSError | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        error = None
        try:
            _seclude(interface, pid, addresses)
        except OSError as caught:
            error = caught
        loop.call_soon_threadsafe(end, error)

    threading.Thread(target=work, name="seclude", daemon=True).start()
    await done


def _seclude(interface: str, pid: int, addresses: list[str]) -> None:
    ports = {path.name for path in (INTERFACES / interface / "brif").iterdir()}
    for link in netlink.links_of(pid):
        port = _port(link.peer, ports)
        if port is None:
            continue
        for setting, value in SETTINGS.items():
            (INTERFACES / interface / "brif" / port / setting).write_text(value)
        netlink.pin_port(port, link.address)
        for address in addresses:
            netlink.pin_neighbour(interface, address, link.address)
        return
    raise OSError("none of its ports is the container's")


def _port(index: int | None, ports: set[str]) -> str | None:
    if index is None:
        return None
    try:
        name = socket.if_indextoname(index)
    except OSError:
        return None  # the other end of another pair, in another namespace
    return name if name in ports else None
