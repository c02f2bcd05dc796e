"""Sandboxes lease places on few bridges; what is full is waited for, and hosts keep out of each other's way."""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollcage.rollout.outcome import TaskError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import Networks
from rollcage.rollout.sandbox.reaper import HOST_LABEL

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"
RANGE = "10.233.0.0/16"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(timeout_sec=60)
    yield engine
    engine.close()


@pytest.fixture
async def host(engine: Engine) -> AsyncIterator[str]:
    host = f"test-{uuid.uuid4().hex[:8]}"
    yield host
    for container in engine.api.containers(all=True, filters={"label": f"{HOST_LABEL}={host}"}):
        engine.api.remove_container(container["Id"], force=True)
    for network in of(engine, host):
        engine.api.remove_network(network["Id"])


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


async def test_containers_on_a_bridge_cannot_reach_each_other(engine: Engine, host: str) -> None:
    networks = Networks(engine, host, cidr=RANGE)
    name = (await networks.lease("public")).name
    api = engine.api
    config = api.create_host_config(network_mode=name, pids_limit=32, init=True)
    labels = {HOST_LABEL: host}
    listen = (
        "perl -MIO::Socket::INET -e '$s=IO::Socket::INET->new(LocalPort=>7,Listen=>5); $s->accept while 1'"
    )
    server = api.create_container(IMAGE, ["sh", "-c", listen], host_config=config, labels=labels)["Id"]
    api.start(server)
    address = api.inspect_container(server)["NetworkSettings"]["Networks"][name]["IPAddress"]
    dial = (
        "sleep 1; perl -MIO::Socket::INET -e "
        "'exit(IO::Socket::INET->new(PeerAddr=>shift,PeerPort=>7,Timeout=>2)?0:9)' "
    )
    client = api.create_container(IMAGE, ["sh", "-c", dial + address], host_config=config, labels=labels)[
        "Id"
    ]
    api.start(client)
    assert api.wait(client, timeout=30)["StatusCode"] == 9
    itself = api.exec_create(server, ["sh", "-c", dial + "127.0.0.1"])["Id"]
    api.exec_start(itself)
    assert api.exec_inspect(itself)["ExitCode"] == 0


async def test_a_mode_that_nobody_knows_is_unsupported(engine: Engine, host: str) -> None:
    with pytest.raises(TaskError) as caught:
        await Networks(engine, host).lease("allowlist")
    assert caught.value.error_class == "unsupported"
