"""The reaper takes what is ours and due, and never what is somebody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import docker
import pytest
import requests
from docker.errors import APIError

from rollcage.rollout.sandbox import reaper
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.reaper import (
    BUILD_LABEL,
    DEADLINE_LABEL,
    HOST_LABEL,
    JOB_LABEL,
    Reaped,
    dead_hosts,
    host_name,
    hosts_of,
    reap,
    reap_dead,
    remove_dangling_images,
    stuck_networks,
)

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"


class Yard:
    """Makes containers and networks under one prefix, and knows which are left."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.api: Any = engine.api
        self.host = f"test-{uuid.uuid4().hex[:8]}"
        self.other = f"{self.host}-other"
        self.mark = {"test-reaper": self.host}

    def container(self, running: bool = False, network: str = "none", **labels: str) -> str:
        config = self.api.create_host_config(network_mode=network, pids_limit=16, init=True)
        made = self.api.create_container(
            IMAGE, ["sleep", "300"], host_config=config, labels={**self.mark, **rollcage(labels)}
        )
        if running:
            self.api.start(made["Id"])
        return str(made["Id"])

    def network(self, **labels: str) -> str:
        name = f"{self.host}-{uuid.uuid4().hex[:6]}"
        octets = uuid.uuid4().int % 250, uuid.uuid4().int % 250
        pool = docker.types.IPAMPool(subnet=f"10.{100 + octets[0] % 80}.{octets[1]}.0/28")
        ipam = docker.types.IPAMConfig(pool_configs=[pool])
        made = self.api.create_network(name, ipam=ipam, labels={**self.mark, **rollcage(labels)})
        return str(made["Id"])

    def left(self) -> set[str]:
        filters = {"label": f"test-reaper={self.host}"}
        containers = self.api.containers(all=True, filters=filters)
        return {found["Id"] for found in [*containers, *self.api.networks(filters=filters)]}


def rollcage(labels: dict[str, str]) -> dict[str, str]:
    return {f"rollcage.{name}": value for name, value in labels.items()}


@pytest.fixture
async def yard(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Yard]:
    """On a machine of its own name: whatever host is opened beside it must not find its dead."""
    machine = f"test-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(socket, "gethostname", lambda: machine)
    engine = Engine(timeout_sec=60)
    yard = Yard(engine)
    yield yard
    filters = {"label": f"test-reaper={yard.host}"}
    for container in engine.api.containers(all=True, filters=filters):
        engine.api.remove_container(container["Id"], force=True)
    for network in engine.api.networks(filters=filters):
        engine.api.remove_network(network["Id"])
    engine.close()


def unix(seconds: float) -> str:
    return str(int(time.time() + seconds))


async def test_a_hosts_objects_go_and_all_others_stay(yard: Yard) -> None:
    ours = [
        yard.container(host=yard.host, job="a", deadline=unix(3600)),
        yard.container(running=True, host=yard.host, job="b", deadline=unix(3600)),
        yard.network(host=yard.host),
    ]
    foreign = {
        yard.container(running=True),
        yard.network(),
        yard.container(host=yard.other, job="a", deadline=unix(3600)),
        yard.network(host=yard.other),
    }
    assert await reap(yard.engine, host=yard.host, job=None, now=0) == Reaped(2, 1, 0)
    assert yard.left() == foreign
    assert not set(ours) & yard.left()
    assert await reap(yard.engine, host=yard.host, job=None, now=0) == Reaped()


async def test_only_the_jobs_containers_go(yard: Yard) -> None:
    due = yard.container(host=yard.host, job=f"{yard.host}-a")
    kept = yard.container(host=yard.host, job=f"{yard.host}-b")
    elsewhere = yard.container(host=yard.other, job=f"{yard.host}-a")
    await reap(yard.engine, host=yard.host, job=f"{yard.host}-a", now=time.time())
    assert yard.left() == {kept, elsewhere}
    assert due not in yard.left()
    await reap(yard.engine, host=None, job=f"{yard.host}-a", now=time.time())
    assert yard.left() == {kept}


async def test_what_is_past_its_deadline_goes_whoever_made_it(yard: Yard) -> None:
    yard.container(running=True, host=yard.other, job="a", deadline=unix(-60))
    yard.network(host=yard.other, deadline=unix(-60))
    kept = {
        yard.container(host=yard.other, job="a", deadline=unix(3600)),
        yard.container(host=yard.other, job="a"),
        yard.container(host=yard.other, job="a", deadline=unix(-5)),
        yard.container(host=yard.other, job="a", deadline="never"),
        yard.network(host=yard.other, deadline=unix(3600)),
        yard.container(deadline=unix(-60)),
    }
    await reap(yard.engine, host=None, job=None, now=time.time())
    assert yard.left() == kept


async def test_a_dead_host_is_found_by_whatever_it_has_left_and_all_of_it_goes(yard: Yard) -> None:
    """A build's step, an unnamed image or a volume alone are enough."""
    machine, _, started, _ = host_name().rsplit("-", 3)
    gone = [f"{machine}-{pid_of_an_ended_process()}-{started}-{number:04x}" for number in range(3)]
    step = yard.api.create_container(
        IMAGE, ["true"], labels={**yard.mark, BUILD_LABEL: gone[0]}, host_config=yard.api.create_host_config()
    )["Id"]
    plain = yard.container()
    unnamed = yard.api.commit(plain, changes=[f"LABEL {BUILD_LABEL}={gone[1]}", f"LABEL salt={yard.host}"])[
        "Id"
    ]
    volume = yard.api.create_volume(labels={HOST_LABEL: gone[2]})["Name"]
    assert set(gone) <= await dead_hosts(yard.engine)
    found = await reap_dead(yard.engine, now=time.time(), settle_sec=0.0)
    assert (found.containers >= 1, found.images >= 1, found.volumes >= 1) == (True, True, True)
    assert not set(gone) & await dead_hosts(yard.engine)
    assert step not in yard.left()
    assert plain in yard.left()
    assert unnamed not in {image["Id"] for image in yard.api.images(all=True)}
    assert volume not in {one["Name"] for one in yard.api.volumes()["Volumes"] or []}


async def test_a_network_in_use_is_left_for_later(yard: Yard) -> None:
    network = yard.network(host=yard.host)
    guest = yard.container(running=True, network=network)
    assert await reap(yard.engine, host=yard.host, job=None, now=0) == Reaped()
    assert yard.left() == {network, guest}
    yard.api.remove_container(guest, force=True)
    assert await reap(yard.engine, host=yard.host, job=None, now=0) == Reaped(networks=1)


def test_a_host_outside_is_not_dead_to_one_in_a_namespace_of_its_own() -> None:
    """With the machine's name and another /proc, as in `docker run --network host`."""
    code = (
        "import sys; from rollcage.rollout.sandbox import reaper\n"
        "print(reaper._is_dead(sys.argv[1]), reaper._is_dead(reaper.host_name()), reaper.host_name())"
    )
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespace of processes can be made here")
    inside = [*apart, sys.executable, "-c", code, host_name()]
    out = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.split()
    assert out[:2] == ["False", "False"]
    assert not reaper._is_dead(out[2])


async def test_a_network_whose_endpoints_the_engine_miscounts_is_told_of_and_looked_at_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own answer, seen after 1,000 containers were removed from one bridge: nothing is attached, and yet
    it has active endpoints."""
    dead = f"{reaper._machine()}-999999999-1-abcd"
    network = yard.network(host=dead)
    remove = yard.api.remove_network

    def refuse(network_id: str) -> None:
        if network_id == network:
            answer = requests.Response()
            answer.status_code = 403
            raise APIError("has active endpoints", response=answer, explanation="has active endpoints")
        remove(network_id)

    monkeypatch.setattr(yard.api, "remove_network", refuse)
    before = stuck_networks()
    assert dead in await dead_hosts(yard.engine)
    await reap(yard.engine, host=dead, job=None, now=0)
    assert stuck_networks() == before + 1
    assert dead not in await dead_hosts(yard.engine)
    monkeypatch.undo()
    yard.api.remove_network(network)


async def test_unfinished_images_go_and_named_ones_stay(yard: Yard) -> None:
    def unnamed(host: str | None) -> str:
        container = yard.container()
        labels = [] if host is None else [f"LABEL {BUILD_LABEL}={host}"]
        changes = [*labels, f"LABEL salt={uuid.uuid4().hex}"]
        image = yard.api.commit(container, changes=changes)["Id"]
        yard.api.remove_container(container, force=True)
        return str(image)

    mine, theirs, foreign, named = unnamed(yard.host), unnamed(yard.other), unnamed(None), unnamed(yard.host)
    yard.api.tag(named, "rollcage-test/reaper", yard.host)
    try:
        assert await remove_dangling_images(yard.engine, yard.host) == 1
        left = {image["Id"] for image in yard.api.images(all=True)}
        assert mine not in left
        assert {theirs, foreign, named} <= left
        await reap(yard.engine, host=None, job=None, now=time.time())
        assert theirs in {image["Id"] for image in yard.api.images(all=True)}
    finally:
        for image in (theirs, foreign, named):
            yard.api.remove_image(image, force=True)


def test_the_labels_are_those_of_the_design() -> None:
    assert (HOST_LABEL, JOB_LABEL, DEADLINE_LABEL) == ("rollcage.host", "rollcage.job", "rollcage.deadline")


def pid_of_an_ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


async def test_a_host_whose_process_is_gone_is_known_as_dead_and_no_other(yard: Yard) -> None:
    alive = host_name()
    machine, _, started, _ = alive.rsplit("-", 3)
    ended = pid_of_an_ended_process()
    gone = f"{machine}-{ended}-{started}-abcd"
    another_process_has_its_number = f"{machine}-{os.getpid()}-1-abcd"
    elsewhere = f"another-machine-{ended}-{started}-abcd"
    for host in (alive, gone, another_process_has_its_number, elsewhere, yard.host):
        yard.container(host=host, job=yard.host)
    yard.network(host=gone)
    dead = await dead_hosts(yard.engine)
    assert {gone, another_process_has_its_number} <= dead
    assert not {alive, elsewhere, yard.host} & dead
    assert await hosts_of(yard.engine, yard.host) == {
        alive, gone, another_process_has_its_number, elsewhere, yard.host,
    }  # fmt: skip
    assert await reap(yard.engine, host=gone, job=None, now=0.0) == Reaped(containers=1, networks=1)
