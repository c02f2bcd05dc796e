"""A registry that is not there, or does not give. No attempt is spent, and the engine's own word decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attempts import Site, given, site
from fault_table import REGISTRY
from private_dockerd import IMAGE, PrivateEngine
from registry import ERRORS, Registry

from rollcage.cluster.host import Prepared

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

Record = Callable[[str, str], None]

OUTSIDE = "10.251.0.1"
"""An address that is not loopback's, of the engine's own network namespace."""


@pytest.fixture
def registry(engine: PrivateEngine) -> Iterator[Registry]:
    registry = Registry(engine.listen())
    yield registry
    registry.close()


async def test_registries(engine: PrivateEngine, registry: Registry, record: Record, tmp_path: Path) -> None:
    """CASES 10. All at once, for the slowest takes as long as the engine's patience."""
    with engine.listen() as nobody, engine.listen() as mute:
        closed, dropped = (f"127.0.0.1:{one.getsockname()[1]}" for one in (nobody, mute))
        nobody.close()
        port = dropped.rpartition(":")[2]
        rule = ["-i", "lo", "-p", "tcp", "--dport", port, "-j", "DROP"]
        engine.run("iptables", "-w", "-I", "INPUT", *rule)
        no_tls = Registry(engine.listen("10.252.0.1"))
        places = {
            "refused": f"{closed}/a:1",
            "dropped": f"{dropped}/a:1",
            "no_tls": f"{no_tls.name}/a:1",
            "no_name": "registry.invalid/a:1",
            **{fault: f"{registry.name}/{fault}/a:1" for fault in (*ERRORS, "closed", "cut")},
        }
        try:
            async with site(tmp_path, IMAGE, docker_host=engine.url) as here:
                here.pool.images._pulls._waits_sec = ()
                lines = f"FROM {IMAGE}\nADD http://127.0.0.1:1/x /x\n"
                added = asyncio.create_task(here.prepared(here.task(dockerfile=lines)))
                made = await asyncio.gather(*(_pulled(here, place) for place in places.values()))
                ended = dict(zip(places, made, strict=True))
                ended["add"] = await added
                asked = len(registry.asked)
                again = await _pulled(here, places["limited"])
        finally:
            no_tls.close()
            engine.run("iptables", "-w", "-D", "INPUT", *rule)
    for fault, prepared in ended.items():
        record(fault, given(prepared))
    assert {fault for fault, prepared in ended.items() if prepared.retry_after_sec} == {"limited"}
    assert (again.retry_after_sec or 0) > 60
    assert len(registry.asked) == asked, "one that asked us to wait is not asked again"
    assert set(ended) == set(REGISTRY)
    assert engine.left() == []


async def _pulled(here: Site, reference: str) -> Prepared:
    return await here.prepared(here.task(dockerfile=f"FROM {reference}\n"))
