"""The exporter's actor: killed under load, told by sources, and what Prometheus is to scrape."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from rollcage.cluster.actors import connected
from rollcage.cluster.exporter import ExporterActor, ExporterConfig, start_exporter
from rollcage.cluster.telling import telling
from rollcage.metrics.counts import Counts, Snapshot
from rollcage.metrics.definitions import Sender

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

KILLS = 3
"""Each takes Ray some seconds."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterConfig]:
    directory = tmp_path_factory.mktemp("exporter")
    with connected(num_cpus=1):
        yield ExporterConfig(directory / "state", directory / "targets")


def targets(config: ExporterConfig) -> dict[str, list[str]]:
    """What the file says now, by kind."""
    assert config.targets is not None
    files = list(config.targets.glob("*.json"))
    groups = json.loads(files[0].read_text()) if files else []
    return {group["labels"]["job"]: group["targets"] for group in groups}


def scraped(exporter: Any, name: str) -> float:
    address = ray.get(exporter.place.remote()).address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def test_an_exporter_that_is_killed_again_and_again_loses_and_doubles_nothing(
    config: ExporterConfig,
) -> None:
    exporter = start_exporter(config)
    address = ray.get(exporter.place.remote()).address
    counts = [Counts(Sender.HOST, {"host": [f"host-{number}"]}) for number in range(4)]
    for _ in range(KILLS):
        calls = []
        for number, one in enumerate(counts):
            for _ in range(5):
                one.add("image_builds", "built")
                one.observe("image_build_seconds", 1)
                calls.append(exporter.accept.remote(f"host-{number}", one.snapshot(), "1"))
        ray.kill(exporter, no_restart=False)
        await asyncio.gather(*calls)
    assert scraped(exporter, "rollcage_image_builds_total") == KILLS * 4 * 5
    assert scraped(exporter, "rollcage_image_build_seconds_count") == KILLS * 4 * 5
    assert ray.get(exporter.place.remote()).address == address  # where Prometheus was told to look


async def test_a_source_that_ends_has_told_all_that_it_counted_and_has_no_gauges(
    config: ExporterConfig,
) -> None:
    exporter, counts = start_exporter(config), Counts(Sender.JOB, {"agent": ["a"], "job_id": ["j"]})

    async def snapshot() -> Snapshot:
        return counts.snapshot()

    async with telling(exporter, "j", snapshot):
        counts.add("commands", "a", amount=7)
        counts.set("job_rollouts", 3, "j")
    assert scraped(exporter, "rollcage_commands_total") == 7
    assert scraped(exporter, "rollcage_job_rollouts") == 0


async def test_agents_past_the_most_of_a_clusters_life_are_counted_together_and_said(
    config: ExporterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, counts = start_exporter(config), Counts(Sender.JOB, {"agent": [f"b{n}" for n in range(16)]})
    before = scraped(exporter, "rollcage_groups_zero_variance_total")
    for number in range(16):
        counts.add("groups_zero_variance", f"b{number}")

    async def snapshot() -> Snapshot:
        return counts.snapshot()

    async with telling(exporter, "many", snapshot):
        pass
    assert "more than 16 values of the label 'agent'" in caplog.text
    assert "b15 is counted as 'other'" in caplog.text or "... is counted as 'other'" in caplog.text
    assert scraped(exporter, "rollcage_groups_zero_variance_total") == before + 16


def test_prometheus_finds_the_exporter_and_ray_in_one_file(config: ExporterConfig) -> None:
    exporter = start_exporter(config)
    address = ray.get(exporter.place.remote()).address
    ray.get(exporter.set_vllm.remote("j", ("127.0.0.1:8000",)))
    found: dict[str, list[str]] = {}
    until = time.monotonic() + 60
    while found.get("vllm") is None or found["rollcage"] != [address]:
        assert time.monotonic() < until, found
        found = targets(config)
    assert found["vllm"] == ["127.0.0.1:8000"]
    ray.kill(exporter, no_restart=False)
    while ray.get(exporter.place.remote()).failure or targets(config).get("vllm"):
        assert time.monotonic() < until
        time.sleep(0.1)
    while not (found := targets(config)).get("vllm"):  # a job says it each time
        ray.get(exporter.set_vllm.remote("j", ("127.0.0.1:8000",)))
        assert time.monotonic() < until
        time.sleep(0.1)
    assert len(found["ray"]) == 1
    with urllib.request.urlopen(f"http://{address}/targets", timeout=60) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert {group["labels"]["job"]: group["targets"] for group in json.load(answer)} == found
    ray.get(exporter.close.remote())
    assert targets(config) == {}


def told(actor: Any, counts: Counts) -> str:
    """Why it did not take a snapshot."""
    return str(ray.get(actor.accept.remote("j", counts.snapshot(), "1")))


def test_an_exporter_whose_port_is_taken_says_so_and_begins_once_it_is_free(
    config: ExporterConfig, tmp_path: Path
) -> None:
    counts = Counts(Sender.JOB, {"agent": ["a"], "job_id": ["j"]})
    counts.add("commands", "a", amount=3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        actor = ray.remote(ExporterActor).remote(ExporterConfig(tmp_path, port=taken.getsockname()[1]))
        place = ray.get(actor.place.remote())
        assert place.address == ""
        assert "Address already in use" in place.failure
        assert told(actor, counts) == place.failure
    until = time.monotonic() + 60
    while told(actor, counts):
        assert time.monotonic() < until
        time.sleep(0.5)
    assert scraped(actor, "rollcage_commands_total") == 3
    ray.kill(actor)


def test_an_exporter_that_could_not_begin_takes_the_settings_of_the_next_job_and_that_job_is_told_what_it_has_not(
    config: ExporterConfig, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        actor = ray.remote(ExporterActor).remote(ExporterConfig(tmp_path, port=taken.getsockname()[1]))
        assert ray.get(actor.place.remote()).failure
        second = ExporterConfig(tmp_path, port=0, user="u", password="p")
        place = ray.get(actor.place.remote(second))
    assert (place.failure, place.others) == ("", ())
    third = ExporterConfig(tmp_path / "other", port=0, user="somebody else")
    assert ray.get(actor.place.remote(third)).others == ("state", "user")
    assert ray.get(actor.place.remote(ExporterConfig())).others == ()
    ray.kill(actor)


def test_a_port_that_cannot_be_written_down_and_one_that_was_written_badly_stop_nothing(
    config: ExporterConfig, tmp_path: Path
) -> None:
    (tmp_path / "port").write_text("")
    (tmp_path / "port.new").mkdir()
    counts = Counts(Sender.JOB, {"agent": ["a"], "job_id": ["j"]})
    counts.add("commands", "a", amount=3)
    actor = ray.remote(ExporterActor).remote(ExporterConfig(tmp_path))
    assert told(actor, counts) == ""
    assert scraped(actor, "rollcage_commands_total") == 3
    ray.kill(actor)


def test_two_exporters_do_not_share_what_they_have_kept(config: ExporterConfig, tmp_path: Path) -> None:
    first, second = (ray.remote(ExporterActor).remote(ExporterConfig(tmp_path / "one")) for _ in range(2))
    failures = sorted(ray.get(actor.place.remote()).failure for actor in (first, second))
    assert failures[0] == ""
    assert "is another exporter's state: name another directory" in failures[1]
    [refused] = [actor for actor in (first, second) if ray.get(actor.place.remote()).failure]
    assert ray.get(refused.place.remote(ExporterConfig(tmp_path / "two", port=0))).failure == ""
    for actor in (first, second):
        ray.kill(actor)


def test_targets_that_cannot_be_written_are_told(config: ExporterConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    actor = ray.remote(ExporterActor).remote(ExporterConfig(tmp_path / "state", tmp_path / "file" / "sd"))
    place = ray.get(actor.place.remote())
    assert place.failure == place.targets == ""
    assert str(tmp_path / "file") in place.no_targets
    ray.kill(actor)
