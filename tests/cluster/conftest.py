"""Small tasks on disk."""

from __future__ import annotations

import asyncio
import logging
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollcage.cluster.client_policies import client_policies
from rollcage.cluster.config import load_job
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostClient, HostSpec, SandboxHost
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan_tasks import host_spec, make_plan
from rollcage.cluster.progress import JobProgress
from rollcage.rollout.arrow import Location

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; these helpers are this folder's alone

DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
SOLVE = "#!/bin/sh\necho hello >/app/hello\n"
TEST = "#!/bin/sh\nif [ -e /app/hello ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"

WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task that the oracle passes and nop fails, or one with other files; `where` is its directory below
    the test's own."""

    def write(
        where: str,
        *,
        toml: str = "",
        dockerfile: str = DOCKERFILE,
        solve: str = SOLVE,
        test: str = TEST,
    ) -> Path:
        root = tmp_path / where
        files = {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": "Make /app/hello.\n",
            "environment/Dockerfile": dockerfile,
            "solution/solve.sh": solve,
            "tests/test.sh": test,
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return write


class LocalHosts:
    """The one host of a job that is run in the tests' own process."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec

    async def start(self) -> list[HostClient]:
        host = SandboxHost(self._spec)
        await host.open()
        return [host]

    async def replace(self, lost: HostClient) -> HostClient | None:
        return None


def run_here(settings: Mapping[str, Any]) -> Path:
    """Run a job without Ray; `settings` are those of `load_job`, with an `output`, which is returned."""
    config = load_job(None, (), settings)
    plan = make_plan(config)
    tasks = [
        {"task": key.name, "digest": key.digest, "path": str(task.path)} for key, task in plan.tasks.items()
    ]
    job = {"job": plan.job, "config": config.model_dump(mode="json"), "tasks": tasks}
    assert config.output is not None
    ledger = Ledger.create(Location(config.output, journal=config.journal), job)

    async def run() -> None:
        progress = JobProgress(sum(1 for _ in plan.rollouts()), Console(stderr=True))
        with progress:
            spec = host_spec(config, plan, client_policies(config))
            await Driver(plan, ledger, LocalHosts(spec), progress).run()
        await ledger.finish({"job": plan.job})

    asyncio.run(run())
    return Path(config.output)


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URI of a bucket on a server that speaks S3, on this machine; the environment says how it is reached."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("AWS_ACCESS_KEY_ID", "rollcage")
        environ.setenv("AWS_SECRET_ACCESS_KEY", "rollcage")
        environ.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environ.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environ.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/runs", method="PUT")).close()
        yield "s3://runs"
    server.stop()


@pytest.fixture(scope="session", name="run_here")
def _run_here() -> Callable[[Mapping[str, Any]], Path]:
    return run_here
