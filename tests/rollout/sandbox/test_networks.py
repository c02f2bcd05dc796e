"""Sandboxes lease places on few bridges; what is full is waited for, and hosts keep out of each other's way."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollcage.rollout.outcome import TaskError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import Networks
from rollcage.rollout.sandbox.reaper import HOST_LABEL, reap

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"
RANGE = "10.233.0.0/16"


@pytest.fixture
async def host(engine: Engine) -> AsyncIterator[str]:
    host = f"test-{uuid.uuid4().hex[:8]}"
    yield host
    for container in engine.api.containers(all=True, filters={"label": f"{HOST_LABEL}={host}"}):
        engine.api.remove_container(container["Id"], force=True)
    await Networks(engine, host).close()


def of(engine: Engine, host: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.api.networks(filters={"label": f"{HOST_LABEL}={host}"})
    return found


def subnet(network: dict[str, Any]) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(network["IPAM"]["Config"][0]["Subnet"])


async def test_no_network_is_made_for_a_sandbox_without_internet(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    assert (await networks.lease("none")).name == "none"
    assert (await networks.lease("no-network")).name == "none"
    assert of(engine, host) == []


async def test_many_sandboxes_share_one_bridge_without_traffic_between_them(
    engine: Engine, host: str
) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    leases = await asyncio.gather(*(networks.lease("public") for _ in range(64)))
    (network,) = of(engine, host)
    assert {lease.name for lease in leases} == {network["Name"]}
    assert network["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    assert subnet(network).prefixlen == 22
    assert subnet(network).subnet_of(ipaddress.IPv4Network(RANGE))
    assert (networks.leases, networks.places) == (64, 900)
    await networks.close()
    assert of(engine, host) == []


async def test_a_full_bridge_gets_a_neighbour(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE, leases_per_bridge=2)
    leases = [await networks.lease("public") for _ in range(5)]
    assert [lease.name for lease in leases].count(leases[0].name) == 2
    made = of(engine, host)
    assert len(made) == 3
    assert not any(subnet(a).overlaps(subnet(b)) for a in made for b in made if a is not b)
    networks.release(leases[2])
    assert (await networks.lease("public")).name == leases[2].name


async def test_a_full_range_is_waited_for_and_served_in_order(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr="10.233.252.0/22", leases_per_bridge=2)
    held = [await networks.lease("public") for _ in range(2)]
    served = []

    async def wait(who: int) -> None:
        await networks.lease("public")
        served.append(who)

    waiting = [asyncio.create_task(wait(who)) for who in range(2)]
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert not done
    networks.release(held[0])
    await asyncio.wait_for(waiting[0], 10)
    assert served == [0]
    networks.release(held[1])
    await asyncio.wait_for(waiting[1], 10)
    assert networks.leases == 2


async def test_one_who_stops_waiting_takes_nothing(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr="10.233.248.0/22", leases_per_bridge=1)
    held = await networks.lease("public")
    first, second = (asyncio.create_task(networks.lease("public")) for _ in range(2))
    await asyncio.wait([first], timeout=0.5)
    first.cancel()
    networks.release(held)
    assert (await asyncio.wait_for(second, 10)).name == held.name
    assert networks.leases == 1


async def test_who_holds_a_place_gets_another_past_those_who_wait(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr="10.233.248.0/22", leases_per_bridge=1)
    held = await networks.lease("public")
    waiting = asyncio.create_task(networks.lease("public"))
    await asyncio.wait([waiting], timeout=0.5)
    second = await asyncio.wait_for(networks.lease("public", holding=True), 10)
    assert (second.name, networks.leases) == (held.name, 2)
    networks.release(second)
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done()
    networks.release(held)
    assert (await asyncio.wait_for(waiting, 10)).name == held.name


async def test_two_hosts_on_one_engine_keep_apart(engine: Engine, host: str) -> None:
    others = [Networks(engine, f"{host}-{n}", cidr="10.233.128.0/20", leases_per_bridge=1) for n in range(3)]
    leases = await asyncio.gather(*(networks.lease("public") for networks in others))
    assert len({lease.name for lease in leases}) == 3
    await others[0].close()
    assert of(engine, f"{host}-0") == []
    assert len(of(engine, f"{host}-1")) == 1
    await asyncio.gather(others[1].close(), others[2].close())


async def test_the_default_range_touches_no_route_of_the_machine(engine: Engine, host: str) -> None:
    networks = Networks(engine, host)
    await networks.lease("public")
    (network,) = of(engine, host)
    for other in engine.api.networks():
        for config in other["IPAM"]["Config"] or []:
            if other["Id"] != network["Id"]:
                assert not subnet(network).overlaps(ipaddress.IPv4Network(config["Subnet"]))


async def test_a_mode_that_nobody_knows_is_unsupported(engine: Engine, host: str) -> None:
    with pytest.raises(TaskError) as caught:
        await Networks(engine, host).lease("bridge")
    assert caught.value.error_class == "unsupported"


async def test_a_thousand_leases_are_nine_hundred_on_one_bridge_and_the_rest_on_another(
    engine: Engine, host: str
) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    leases = await asyncio.gather(*(networks.lease("public") for _ in range(1000)))
    count = Counter(lease.name for lease in leases)
    assert sorted(count.values()) == [100, 900]
    capacity = networks.capacity()
    assert (capacity.bridges, capacity.leases, capacity.waiting) == (2, 1000, 0)
    assert (capacity.bridges_possible, capacity.leases_possible) == (48, 48 * 900)
    await networks.close()
    assert of(engine, host) == []


# Private networks


async def start(engine: Engine, host: str, network: str, alias: str | None = None) -> str:
    """A container on a network that sleeps, and answers at port 7."""
    api = engine.api
    listen = '$s=IO::Socket::INET->new(LocalPort=>7,Listen=>5); while($c=$s->accept){print $c "hello\\n"; close $c}'
    endpoint = api.create_endpoint_config(aliases=[alias] if alias else None)
    container = api.create_container(
        IMAGE,
        ["perl", "-MIO::Socket::INET", "-e", listen],
        host_config=api.create_host_config(network_mode=network, pids_limit=32, init=True),
        networking_config=api.create_networking_config({network: endpoint}),
        labels={HOST_LABEL: host},
    )["Id"]
    api.start(container)
    return str(container)


def hears(engine: Engine, container: str, target: str, port: int = 7, *, within: int = 10) -> str:
    """What a container hears at a name or address: `there` where somebody takes the connection, then what is said."""
    look = f"exec 3<>/dev/tcp/{target}/{port} && echo there && head -n 1 <&3"
    made = engine.api.exec_create(container, ["timeout", str(within), "bash", "-c", look], stderr=False)["Id"]
    return str(engine.api.exec_start(made).decode())


def address(engine: Engine, container: str) -> str:
    found = engine.api.inspect_container(container)["NetworkSettings"]["Networks"]
    return str(next(iter(found.values()))["IPAddress"])


@pytest.mark.parametrize("internet", [False, True])
async def test_containers_of_one_task_reach_each_other_by_name_and_nobody_else(
    engine: Engine, host: str, outside: Any, internet: bool
) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    mine, theirs = [await networks.lease_private(internet) for _ in range(2)]
    assert mine.name != theirs.name
    one, two = [await start(engine, host, mine.name, alias) for alias in ("one", "two")]
    foreign = await start(engine, host, theirs.name, "foreign")
    public = await start(engine, host, (await networks.lease("public")).name)

    def look() -> None:
        assert hears(engine, one, "two") == "there\nhello\n"
        assert hears(engine, two, "one") == "there\nhello\n"
        assert hears(engine, one, "foreign", within=1) == ""
        for other in (foreign, public):
            assert hears(engine, one, address(engine, other), within=1) == ""
            assert hears(engine, other, address(engine, one), within=1) == ""
        gateway = subnet(of_name(engine, host, mine.name)).network_address + 1
        with socket.create_server(("0.0.0.0", 0)) as server:
            for machine in (str(gateway), "172.17.0.1"):
                assert hears(engine, one, machine, server.getsockname()[1], within=1) == ""
        assert hears(engine, one, outside.address, 80, within=1).startswith("there") == internet

    await asyncio.to_thread(look)


def of_name(engine: Engine, host: str, name: str) -> dict[str, Any]:
    return next(network for network in of(engine, host) if network["Name"] == name)


async def test_a_private_network_is_used_again(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    first, second = [await networks.lease_private() for _ in range(2)]
    networks.release(first)
    assert networks.capacity().idle == 1
    assert await networks.lease_private() == first
    networks.release(second)
    open_ = await networks.lease_private(internet=True)
    assert open_ != second
    assert (networks.capacity().private, networks.capacity().idle) == (2, 1)
    assert len(of(engine, host)) == 3


async def test_a_private_network_on_which_a_container_was_left_is_nobodys(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    first = await networks.lease_private()
    left = await start(engine, host, first.name)
    networks.release(first)
    assert await networks.lease_private() != first
    engine.api.remove_container(left, force=True)
    await networks.close()
    assert of(engine, host) == []


async def test_a_range_without_private_networks_is_waited_for_in_order(engine: Engine, host: str) -> None:
    # A /26: half of it is two /28.
    networks = Networks(engine, host, cidr="10.233.240.0/26")
    assert networks.capacity().small_possible == 2
    held = [await networks.lease_private() for _ in range(2)]
    waiting = [
        asyncio.create_task(networks.lease_private()),
        asyncio.create_task(networks.lease_private(internet=True)),
        asyncio.create_task(networks.lease("allowlist", ["198.51.100.1"])),
    ]
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert not done
    assert networks.capacity().waiting == 3
    public = await asyncio.wait_for(networks.lease("public"), 20)
    networks.release(held[0])
    first = await asyncio.wait_for(waiting[0], 20)
    assert first == held[0]
    networks.release(held[1])
    second = await asyncio.wait_for(waiting[1], 20)  # in the place of the idle one, which is of another kind
    networks.release(first)
    third = await asyncio.wait_for(waiting[2], 20)
    assert len({public.name, second.name, third.name}) == 3
    assert len(of(engine, host)) == 3


async def test_one_who_is_cancelled_while_a_network_is_made_leaves_none(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    for number in range(8):
        making = [
            asyncio.create_task(networks.lease("public")),
            asyncio.create_task(networks.lease_private(internet=True)),
            asyncio.create_task(networks.lease("allowlist", ["198.51.100.1"])),
        ]
        await asyncio.sleep(0.04 * number)
        for one in making:
            one.cancel()
        await asyncio.wait(making)
        for one in making:
            if not one.cancelled():
                networks.release(one.result())
        assert networks.leases == 0
        capacity = networks.capacity()
        assert len(of(engine, host)) == capacity.bridges + capacity.idle
    await networks.close()
    assert of(engine, host) == []


KILLED = """
import asyncio, os, signal, sys
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import Networks

async def main():
    networks = Networks(Engine(), sys.argv[1], cidr="10.233.0.0/16")
    await networks.lease("public")
    await networks.lease("allowlist", ["198.51.100.1"])
    if sys.argv[2] == "before":
        firewall.ensure = lambda: os.kill(os.getpid(), signal.SIGKILL)
    await networks.lease_private(internet=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_what_a_killed_host_leaves_is_removed_with_its_rules(
    engine: Engine, host: str, moment: str
) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, host, moment)
    assert await process.wait() == -signal.SIGKILL
    left = of(engine, host)
    assert len(left) == 3
    interfaces = [network["Options"]["com.docker.network.bridge.name"] for network in left]
    assert any(f"ROLLCAGE-{name}" in rules() for name in interfaces)
    assert (await reap(engine, host=host, job=None, now=0)).networks == 3
    assert of(engine, host) == []
    assert not any(name in rules() for name in interfaces)


def rules() -> str:
    return subprocess.run(["iptables", "-w", "-S"], check=True, capture_output=True, text=True).stdout
