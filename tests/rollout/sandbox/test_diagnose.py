"""`rollcage doctor` says of an engine what is well, and what to do about the rest."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from rollcage.rollout.sandbox.diagnose import ENGINE_POOLS, diagnose, networks_left
from rollcage.rollout.sandbox.engine import Engine


def nets(*texts: str) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in texts]


@pytest.mark.parametrize(
    ("pools", "used", "left"),
    [
        (ENGINE_POOLS, nets(), 31),
        (ENGINE_POOLS, nets("172.17.0.0/16"), 30),
        (ENGINE_POOLS, nets("172.17.0.0/16", "172.18.0.0/16", "192.168.16.0/20"), 28),
        (ENGINE_POOLS, nets("192.168.1.0/24", "192.168.2.0/24"), 30),
        (ENGINE_POOLS, nets("172.16.0.0/12"), 16),
        (ENGINE_POOLS, nets("10.0.0.0/8"), 31),
        ([("10.7.0.0/23", 24)], nets("10.7.0.0/24", "10.7.1.0/24"), 0),
        ([("10.0.0.0/8", 24)], nets("10.0.0.0/24"), 65535),
    ],
)
def test_networks_left_are_those_that_overlap_nothing(
    pools: list[tuple[str, int]], used: list[ipaddress.IPv4Network], left: int
) -> None:
    assert networks_left(pools, used) == left


@pytest.mark.docker
async def test_a_well_engine_is_well_and_nothing_stays_behind() -> None:
    engine = Engine(timeout_sec=60)
    before = {found["Id"] for found in engine.api.networks()}
    checks = {check.name: check for check in await diagnose(engine)}
    assert list(checks)[:3] == ["engine", "storage", "limits"]
    assert {"networks", "builder", "base image", "container"} <= set(checks)
    for name in ("engine", "storage", "networks", "base image", "container"):
        assert checks[name].ok, checks[name]
        assert not checks[name].remedy
    assert "networks left" in checks["networks"].said
    doctors = [c for c in engine.api.containers(all=True, filters={"label": "rollcage.host"})
               if c["Labels"]["rollcage.host"].startswith("doctor-")]  # fmt: skip
    assert doctors == []
    assert before >= {found["Id"] for found in engine.api.networks() if found["Name"].startswith("doctor")}
    engine.close()


async def test_without_an_engine_the_remedy_is_all_there_is(tmp_path: Path) -> None:
    (check,) = await diagnose(f"unix://{tmp_path}/none.sock")
    assert (check.name, check.ok) == ("engine", False)
    assert "start it" in check.remedy
