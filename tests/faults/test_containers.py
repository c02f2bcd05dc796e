"""Containers that are killed, removed, frozen, refused, or run out of what they were given."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attempts import Site, given, site, until

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import container as container_module

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

Record = Callable[[str, str], None]

IMAGE = "debian:bookworm-slim"
LIMITED = "memory_mb = 48"
HOARD = "head -c 200m /dev/zero | tail"
SLOW_TEST = "touch /began; sleep 60\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("containers"), IMAGE) as here:
        yield here


async def pid_1(here: Site, container_id: str) -> int:
    """Its number on this machine."""
    found = await here.engine.call("inspect", lambda api: api.inspect_container(container_id))
    return int(found["State"]["Pid"])


def cgroups(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()


def during(
    here: Site,
    disturb: Callable[[AgentContext], Awaitable[None]],
    *,
    before: str = "true",
    timeout: float = 30,
) -> str:
    """An agent whose container is disturbed while it runs a command; then it solves the task."""

    async def run(context: AgentContext) -> None:
        await context.shell.run(before)
        running = asyncio.create_task(context.shell.run("sleep 600", timeout=timeout))
        await asyncio.sleep(0.2)
        await disturb(context)
        await running
        await context.shell.run("echo 42 >/app/answer")

    return here.agent(run)


async def test_a_container_that_somebody_else_ends(here: Site, record: Record) -> None:
    async def kill(context: AgentContext) -> None:
        await here.engine.call("kill", lambda api: api.kill(context.sandbox.id))

    async def kill_pid(context: AgentContext) -> None:
        os.kill(await pid_1(here, context.sandbox.id), signal.SIGKILL)

    async def remove_in_verifier() -> str:
        spec = here.spec(here.task(test=SLOW_TEST))
        name = f"rollcage-{spec.attempt_id}-main"

        def began(api: Any) -> bool:
            return any(change["Path"] == "/began" for change in api.diff(name) or ())

        await here.host.prepare(spec.task)
        verifying = asyncio.Event()
        here.emitted = lambda line: verifying.set() if line == "verifier" else None
        attempt = asyncio.create_task(here.host.run(spec, None))
        await verifying.wait()
        await until(lambda: here.engine.call("look", began))
        await here.engine.call("remove", lambda api: api.remove_container(name, force=True))
        return given(await attempt)

    record("killed", given(await here.attempt(here.task(), during(here, kill))))
    record("killed_pid", given(await here.attempt(here.task(), during(here, kill_pid))))
    record("removed", await remove_in_verifier())
    assert await here.left() == []


async def test_a_container_that_is_frozen(
    here: Site, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own pause is undone by the signal that ends the command; what nobody undoes is a loss."""
    monkeypatch.setattr(container_module, "CLEAR_SEC", 3.0)
    thaw: list[Callable[[], None]] = []

    async def pause(context: AgentContext) -> None:
        await here.engine.call("pause", lambda api: api.pause(context.sandbox.id))

    async def freeze(context: AgentContext) -> None:
        lines = cgroups(await pid_1(here, context.sandbox.id))
        groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        if "freezer" in groups:
            file, on, off = (
                Path(f"/sys/fs/cgroup/freezer{groups['freezer']}/freezer.state"),
                "FROZEN",
                "THAWED",
            )
        else:
            file, on, off = Path(f"/sys/fs/cgroup{groups['']}/cgroup.freeze"), "1", "0"
        file.write_text(on)
        thaw.append(lambda: file.write_text(off) and None)

    paused, frozen = await asyncio.gather(
        here.attempt(here.task(), during(here, pause, timeout=1)),
        here.attempt(here.task(), during(here, freeze, timeout=1)),
    )
    for undo in thaw:
        undo()
    record("paused", given(paused))
    record("freezer", given(frozen))
    assert await here.left() == []


async def test_memory(here: Site, record: Record) -> None:
    """CASES 15. That a command was once killed for memory says nothing of how PID 1 ends later."""

    async def kill(context: AgentContext) -> None:
        assert (await context.sandbox.state()).oom_killed
        await asyncio.sleep(2.5)
        await here.engine.call("kill", lambda api: api.kill(context.sandbox.id))

    async def kill_pid(context: AgentContext) -> None:
        assert (await context.sandbox.state()).oom_killed
        await asyncio.sleep(3)
        os.kill(await pid_1(here, context.sandbox.id), signal.SIGKILL)

    task = here.task(environment=LIMITED)
    fill = here.shell_agent("head -c 100m /dev/zero >/dev/shm/x", HOARD, "while :; do x=x$x$x; done")
    attempts = await asyncio.gather(
        here.attempt(task, here.shell_agent(HOARD)),
        here.attempt(task, fill),
        here.attempt(task, during(here, kill, before=HOARD)),
        here.attempt(task, during(here, kill_pid, before=HOARD)),
    )
    for key, attempt in zip(
        ("oom", "oom_pid_1", "oom_then_killed", "oom_then_killed_pid"), attempts, strict=True
    ):
        record(key, given(attempt))
    assert await here.left() == []


async def test_what_an_engine_refuses(here: Site, record: Record) -> None:
    user = here.task(agent='user = "ghost"')
    record("user", given(await here.attempt(user)))
    record("workdir", given(await here.attempt(here.task(environment='workdir = "/etc/passwd"'))))
    assert await here.left() == []


async def test_a_runtime_that_is_not_there(record: Record, tmp_path: Path) -> None:
    """The host refuses to open; an engine that loses it later says the same."""
    with pytest.raises(SandboxError) as refused:
        async with site(tmp_path, IMAGE, runtime="no-such-runtime"):
            pass
    record("runtime", given(refused.value))


async def test_an_image_that_is_removed_before_the_start(here: Site, record: Record) -> None:
    def remove(line: str) -> None:
        if line.startswith("sandbox of"):
            here.engine.api.remove_image(line.removeprefix("sandbox of "), force=True)

    task = here.task(dockerfile=f"{here.dockerfile}RUN touch /of-this-task\n")
    here.emitted = remove
    try:
        record("image_gone", given(await here.attempt(task)))
    finally:
        here.emitted = lambda _line: None
    assert given(await here.attempt(task)) == "passed", "it is built anew"


async def test_a_deadline_and_a_budget(record: Record, tmp_path: Path) -> None:
    """A deadline is far behind all limits of a task: it is met while the agent's clock stands still."""

    async def wait(context: AgentContext) -> None:
        with context.clock.held():
            await context.shell.run("sleep 600")

    async with site(tmp_path, IMAGE, deadline_sec=2.0) as here:
        task = here.task(agent="timeout_sec = 0.5", verifier="timeout_sec = 0.5")
        write = "for i in 1 2 3 4; do head -c 2m /dev/urandom >/tmp/$i; done; sleep 600"
        budget = here.task(environment="storage_mb = 4")
        ended = await asyncio.gather(
            here.attempt(task, here.agent(wait)), here.attempt(budget, here.shell_agent(write))
        )
        for key, attempt in zip(("deadline", "storage"), ended, strict=True):
            record(key, given(attempt))
        assert await here.left() == []
