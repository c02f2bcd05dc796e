"""Weights that are replaced while a policy is served, and where its replicas are placed: fake engines, real actors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fake_engine import DIE_ONCE, GATE
from local_ray import local_ray
from serving import serving, until

from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.replica_placement import placement_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_gpus=4):
        yield


async def test_half_of_the_replicas_serve_while_the_others_take_new_weights(tmp_path: Path) -> None:
    async with serving(tmp_path, version=3) as p:
        turns = [asyncio.ensure_future(p.turn(f"s{i}", GATE)) for i in range(2)]
        await until(lambda: len(p.noted("turns")) == 2)
        updating = asyncio.ensure_future(p.served.update("/weights/4", 4))
        await until(lambda: p.served.status()[0]["state"] == "updating")
        await p.served._sync()
        waits = asyncio.ensure_future(p.turn("s0"))  # behind the update of its replica
        assert (await p.turn("new")).version == 3
        assert p.noted("updates") == []
        (tmp_path / "gate").touch()
        assert {(turn.version, turn.version_end) for turn in await asyncio.gather(*turns)} == {(3, 3)}
        assert await updating == {1: "reload", 2: "reload"}
        made = await waits
        assert made.version == 4
        assert made.queue_seconds > 0.0
        assert [line.split()[2] for line in p.noted("updates")] == ["0", "0"], "no turn was on the engine"
        assert p.served.version == 4
        assert [replica["version"] for replica in p.served.status()] == [4, 4]

        assert await p.served.update("/weights/other", 4) == {1: "same", 2: "same"}
        with pytest.raises(ValueError, match="already"):
            await p.served.update("/weights/3", 3)
        with pytest.raises(ValueError, match="holds no weights"):
            await p.served.update("/weights/nothing", 5)
        assert p.served.version == 4
        assert {(await p.turn(f"n{i}")).version for i in range(4)} == {4}

        # What starts later starts with what is current, also in a process that is new.
        await p.turn("s0", DIE_ONCE)
        os.kill(await p.who_is(2), signal.SIGKILL)
        await until(lambda: sorted(replica["restarts"] for replica in p.served.status()) >= [1, 1])
        await p.until_ready()
        assert {(await p.turn(f"m{i}")).version for i in range(4)} == {4}
        await p.served.scale(3)
        assert [replica["version"] for replica in p.served.status()] == [4, 4, 4]


async def test_turns_in_flight_go_on_with_the_new_weights_where_they_are_to(tmp_path: Path) -> None:
    async with serving(tmp_path, on_update="continue") as p:
        turns = [asyncio.ensure_future(p.turn(f"s{i}", GATE)) for i in range(2)]
        await until(lambda: len(p.noted("turns")) == 2)
        assert await p.served.update("/weights/1", 1) == {1: "reload", 2: "reload"}
        (tmp_path / "gate").touch()
        assert {(turn.version, turn.version_end) for turn in await asyncio.gather(*turns)} == {(0, 1)}


async def test_an_engine_that_an_update_breaks_starts_again_with_the_new_weights(tmp_path: Path) -> None:
    async with serving(tmp_path) as p:
        assert await p.served.update("/weights/breaks", 1) == {1: "restart", 2: "restart"}
        assert {(await p.turn(f"s{i}")).version for i in range(4)} == {1}
        results = await p.served.update("/weights/unloadable", 2)
        assert all("no engine starts with /weights/unloadable" in result for result in results.values())
        await until(lambda: [replica["state"] for replica in p.served.status()] == ["down", "down"])


# Placement


def config(**settings: Any) -> VllmPolicyConfig:
    return VllmPolicyConfig(kind="vllm", model="m", **settings)


async def test_an_engine_that_restarts_for_new_weights_is_not_lost(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1) as p:
        assert await p.served.update("/weights/restarts", 4) == {1: "restart"}
        assert (await p.turn("s")).version == 4
        assert len(p.noted("starts")) == 1, "by itself, in the same life"
        assert p.served.status()[0]["restarts"] == 0


def test_a_replica_asks_for_a_bundle_for_each_of_its_workers() -> None:
    nothing = placement_of(config())
    assert (nothing.bundles, nothing.engine_args) == ([], {})
    one = placement_of(config(num_cpus=2.0, num_gpus=0.5))
    assert one.bundles == [{"CPU": 2.0, "GPU": 0.5}]
    assert one.actor == {"num_cpus": 2.0, "num_gpus": 0.5}
    many = placement_of(config(num_cpus=1.0, num_gpus=1.0, tensor_parallel_size=2, pipeline_parallel_size=2))
    assert many.bundles == [{"CPU": 1.0, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    assert many.actor == {"num_cpus": 1.0, "num_gpus": 0.0}, "the GPUs are its workers'"
    assert many.engine_args == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "ray",
    }
    assert many.environment == {"VLLM_RAY_PER_WORKER_GPUS": "1"}
    on_cpu = placement_of(config(num_cpus=2.0, tensor_parallel_size=2))
    assert on_cpu.bundles == [{"CPU": 2.0}]
    assert on_cpu.engine_args["distributed_executor_backend"] == "mp"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="set tensor_parallel_size to the number of GPUs"):
        placement_of(config(num_gpus=4.0))
    with pytest.raises(InputError, match=r"policies\.p: engine_args\.tensor_parallel_size is 4"):
        ServedPolicy("p", config(engine_args={"tensor_parallel_size": 4}), "m")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 5, "num_gpus": 1.0}, r"5 replica\(s\) ask for 5 GPU \(1 each\), .* has 4 on 1 node"),
        ({"replicas": 2, "num_gpus": 1.0, "tensor_parallel_size": 4}, "ask for 8 GPU"),
        ({"num_cpus": 3.0}, "ask for 3 CPU"),
        (
            {"num_gpus": 1.0, "tensor_parallel_size": 2, "placement": "STRICT_SPREAD"},
            "asks for 2 nodes, and the Ray cluster has 1",
        ),
    ],
)
async def test_more_than_the_cluster_has_is_told_at_once(settings: dict[str, Any], said: str) -> None:
    served = ServedPolicy("p", config(**settings), "m")
    with pytest.raises(CouldNotRun, match=f"policy p: .*{said}"):
        await served.start()


async def until_free(gpus: float) -> None:
    await until(lambda: ray.available_resources().get("GPU", 0.0) == gpus)


async def test_replicas_hold_their_gpus_and_give_them_back_also_when_one_does_not_start(
    tmp_path: Path,
) -> None:
    await until_free(4.0)
    async with serving(tmp_path, num_gpus=1.0, tensor_parallel_size=2) as p:
        assert ray.available_resources().get("GPU", 0.0) == 0.0
        os.kill(await p.who_is(1), signal.SIGKILL)
        await until(lambda: p.served.status()[0]["restarts"] == 1)
        await p.until_ready()
        await p.served.scale(1)
        await until_free(2.0)
    await until_free(4.0)
    with pytest.raises(InputError, match=r"policies\.p: .* has no chat template; `engine_args"):
        async with serving(tmp_path, replicas=1, num_gpus=1.0, engine_args={"chat_template": None}):
            pass
    (tmp_path / "refuse").write_text("no memory left")
    with pytest.raises(CouldNotRun, match=r"policy p: replica [12] of 2: policy_unavailable: no memory left"):
        async with serving(tmp_path, num_gpus=0.5):
            pass
    (tmp_path / "surprise").touch()
    with pytest.raises(CouldNotRun, match="replica failed: KeyError"):
        async with serving(tmp_path, replicas=1):
            pass
    await until_free(4.0)
