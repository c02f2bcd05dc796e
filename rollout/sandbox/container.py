"""One sandbox, one container. `start_sandbox` makes it; `DockerSandbox` is what agents and verifiers get.

On the normal path the engine is called to create, start, attach, upload and remove, and for nothing else:
commands, the end of processes and the reading of small files go over the stream that is attached to PID 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcage.rollout.outcome import Evidence, SandboxError
from rollcage.rollout.sandbox import changes, files
from rollcage.rollout.sandbox.base import (
    OUTPUT_BYTES,
    TERMINAL_COLUMNS,
    TERMINAL_ROWS,
    Change,
    CommandResult,
    SandboxSpec,
    SandboxState,
    ServiceContainer,
)
from rollcage.rollout.sandbox.death import Notes, death, notes
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.hostconfig import container_config
from rollcage.rollout.sandbox.link import CLEAR, INTERRUPT, REPORT, Link, LinkClosed, supervisor_argv
from rollcage.rollout.sandbox.program import run_program
from rollcage.rollout.sandbox.shell import DockerShell
from rollcage.rollout.sandbox.storage import StorageWatch
from rollcage.rollout.sandbox.terminal import DockerTerminal
from rollcage.rollout.sandbox.traits import engine_traits

ANSWER_SEC = 2.0
"""How long PID 1 is given to answer what was asked through a shell that an agent has had its hands on."""
CLEAR_SEC = 60.0
"""The same for PID 1 itself, after a signal: a loaded host, and the kernel freeing gigabytes."""
END_SEC = 5.0
"""From the end of the attached stream to the engine's knowing that the container has ended."""
END_POLL_SEC = 0.05

_SHARED_MEMORY = """for f in /dev/shm/* /dev/shm/.[!.]* /dev/shm/..?*; do
if [ -e "$f" ] || [ -h "$f" ]; then printf '%s\\n' "$f"; fi; done"""

_ROOT = frozenset({"", "root", "0", "0:0", "root:root"})
_image_users: dict[str, str] = {}
"""By image id, which is a digest: what it stands for never changes."""


async def start_sandbox(engine: Engine, spec: SandboxSpec, *, image_user: str | None = None) -> DockerSandbox:
    """Create, start and attach. Whatever goes wrong, and when cancelled, nothing is left behind.

    `image_user` is the image's USER where the caller knows it. Raises `SandboxError`.
    """
    made: list[str] = []
    link: Link | None = None

    def create(api: Any) -> None:
        made.append(api.create_container_from_config(container_config(spec, traits), spec.name)["Id"])

    traits = await engine_traits(engine)
    try:
        await engine.call("create a container", create)
        # Before the start: whenever this process is killed, PID 1 finds its stream at an end, and ends too.
        link = Link(*await engine.attach(made[0]))
        await engine.call("start a container", lambda api: api.start(made[0]))
        await link.introduce()
    except BaseException as error:
        if link is not None:
            await link.close()
        if made:
            await remove_container(engine, made[0])
        if isinstance(error, LinkClosed):
            raise SandboxError("container_start", "the container ended as it was started") from None
        raise
    return DockerSandbox(engine, made[0], spec, link, image_user)


async def remove_container(engine: Engine, container_id: str) -> None:
    """Kill and remove; a container that is gone, or being removed by another, is as good as removed."""
    try:
        await engine.call(
            "remove a container", lambda api: api.remove_container(container_id, v=True, force=True)
        )
    except SandboxError as error:
        going = error.evidence.status == 409 and "already in progress" in error.message
        if error.evidence.status != 404 and not going:
            raise


class DockerSandbox:
    """Implements `Sandbox`. Also knows, without asking the engine:

    `oom_kills`: how many processes the kernel has killed for the memory limit, as PID 1 last said (at the end
    of every shell, so also at `stop_processes`). `storage_exceeded`: the processes were stopped because the
    sandbox had written more than `spec.storage_mb`.
    """

    def __init__(
        self, engine: Engine, container_id: str, spec: SandboxSpec, link: Link, image_user: str | None = None
    ) -> None:
        self.id = container_id
        self.spec = spec
        self._engine = engine
        self._link = link
        self._image_user = image_user
        self._shells: dict[str, DockerShell] = {}
        self._user_links: dict[str, Link] = {}
        self._terminals: dict[str, DockerTerminal] = {}
        self._quiet = True
        self._removed = False
        self.services: Mapping[str, ServiceContainer] = {}
        self._storage: StorageWatch | None = None
        if spec.storage_mb is not None:
            self._storage = StorageWatch(engine, container_id, spec.storage_mb << 20, self.clear)

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel has killed for the memory limit, as far as is known."""
        return self._link.oom_kills

    @property
    def storage_exceeded(self) -> bool:
        """True once the sandbox was stopped for writing more than its budget."""
        return self._storage is not None and self._storage.exceeded

    async def shell(self, user: str | int | None = None, env: Mapping[str, str] | None = None) -> DockerShell:
        """See `Sandbox.shell`. Of a shell that is there, `env` is exported into it. Root's is on PID 1's own
        stream; another user's is one exec of the engine."""
        who = str(user) if user is not None else await self._default_user()
        who = "" if who in _ROOT else who
        self._quiet = False
        shell = self._shells.get(who)
        if shell is None:
            shell = DockerShell(self, lambda: self._connect(who), env)
        else:
            shell.export(env or {})
        await shell.start()
        self._shells[who] = shell
        return shell

    async def terminal(
        self,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
        columns: int = TERMINAL_COLUMNS,
        rows: int = TERMINAL_ROWS,
    ) -> DockerTerminal:
        """See `Sandbox.terminal`: one exec of the engine."""
        who = str(user) if user is not None else await self._default_user()
        who = "0" if who in _ROOT else who
        self._quiet = False
        if who not in self._terminals:
            self._terminals[who] = DockerTerminal(self, self._engine, self.id, who, env, columns, rows)
        terminal = self._terminals[who]
        await terminal.resize(columns, rows)
        return terminal

    async def exec(
        self,
        argv: Sequence[str],
        *,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        """See `Sandbox.exec`."""
        who = str(user) if user is not None else await self._default_user()
        self._quiet = False
        settings: dict[str, Any] = {"user": who or "0", "environment": dict(env or {}), "workdir": workdir}
        result = await run_program(self._engine, self.id, argv, settings, timeout, output_bytes)
        if result.exit_code is None and not result.timed_out and (loss := await self.loss()):
            raise loss
        return result

    async def stop_processes(self) -> None:
        """See `Sandbox.stop_processes`: a few milliseconds, over the stream where its shell is idle. PID 1 looks until
        nobody else is there before it says so; where its word may be another's, the engine is asked."""
        link = self._link
        clears = link.clears
        if link.exposed:
            await self._clear_surely()
        elif link.lock.locked() or link.command is not None or link.closed:
            await self.clear()
        else:
            async with link.lock:
                try:
                    async with asyncio.timeout(ANSWER_SEC):
                        await link.put(f"command kill -{CLEAR} 1")
                        await link.until(lambda: link.clears > clears)
                except TimeoutError:
                    await self.clear()
                except LinkClosed:
                    raise await self._lost() from None
                link.command = None
        await self._forget_shells()
        self._close_case()
        self._quiet = True

    def _close_case(self) -> None:
        if self._storage is not None:
            self._storage.close_case()

    async def count_oom_kills(self) -> None:
        """See `Sandbox.count_oom_kills`: over the stream where its shell is idle, else by a signal of the engine."""
        link = self._link
        reports = link.reports
        if not link.lock.locked() and link.command is None and not link.closed:
            async with link.lock:
                try:
                    async with asyncio.timeout(ANSWER_SEC):
                        await link.ask(f"command kill -{REPORT} 1")
                        await link.until(lambda: link.reports > reports)
                        return
                except TimeoutError:
                    pass
                except LinkClosed:
                    raise await self._lost() from None
        await self._report()

    async def end_shells(self) -> None:
        """See `Sandbox.end_shells`."""
        for terminal in list(self._terminals.values()):
            await terminal.close()
        for shell in self._shells.values():
            result = await shell.run("command exit 0", timeout=ANSWER_SEC)
            if not result.shell_replaced:
                await self.clear()
        await self._forget_shells()
        self._close_case()

    async def upload(
        self, source: Path, target: str, *, mode: int | None = None, exclude: Sequence[str] = ()
    ) -> None:
        """See `Sandbox.upload`."""
        await files.upload(self._engine, self.id, source, target, mode=mode, exclude=exclude)

    async def write(self, files_: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """See `Sandbox.write`."""
        await files.write(self._engine, self.id, files_, mode=mode)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `Sandbox.read`. Right after `stop_processes`, a small text file is read by a fork of PID 1 with
        builtins (under a millisecond, and out of an agent's reach); everything else comes by the engine."""
        link = self._link
        if self._quiet and link.plain and link.has_bash and not link.closed and not link.lock.locked():
            async with link.lock:
                try:
                    answer = await files.read_plain(link, path, max_bytes)
                except LinkClosed:
                    raise await self._lost() from None
            if not isinstance(answer, files.TryArchive):
                return answer
        return await files.read(self._engine, self.id, path, max_bytes)

    async def download(self, path: str, target: Path, *, max_bytes: int) -> bool:
        """See `Sandbox.download`. Raises `ValueError` for a tree past `max_bytes` or with a refused entry."""
        return await files.download(self._engine, self.id, path, target, max_bytes)

    async def changes(self) -> list[Change]:
        """See `Sandbox.changes`."""
        found = await changes.changes(self._engine, self.id)
        origin = self.spec.origin
        return found if origin is None else changes.since(origin.changes, found)

    async def restore(self, paths: Sequence[str]) -> None:
        """See `Sandbox.restore`."""
        image = self.spec.image if self.spec.origin is None else self.spec.origin.image
        await changes.restore(self._engine, self.id, image, paths)

    async def shared_memory(self) -> list[str]:
        """What lies in /dev/shm right after `stop_processes`. A fork of PID 1 says so with builtins, out of an agent's
        reach. Raises `SandboxError`."""
        async with self._link.lock:
            try:
                async with asyncio.timeout(CLEAR_SEC):
                    command = await self._link.ask(_SHARED_MEMORY)
            except TimeoutError:
                raise SandboxError(
                    "container_lost", f"PID 1 did not answer within {CLEAR_SEC:.0f} s"
                ) from None
            except LinkClosed:
                raise await self._lost() from None
        found = command.stdout.bytes() if command.stdout is not None else b""
        return found.decode("utf-8", "replace").splitlines()

    async def state(self) -> SandboxState:
        """See `Sandbox.state`. `oom_killed` is also true where the kernel has killed a process of a sandbox
        that lives on, which the engine says of no running container."""
        found = await self._inspect()
        if found is None:
            return SandboxState(running=False, exit_code=None, oom_killed=self.oom_kills > 0, error="gone")
        if found["Running"] and not found["Paused"]:
            await self._report()
        return SandboxState(
            running=found["Running"],
            exit_code=None if found["Running"] else found["ExitCode"],
            oom_killed=bool(found["OOMKilled"]) or self.oom_kills > 0,
            error=found.get("Error") or "",
            storage_exceeded=self.storage_exceeded,
        )

    def service(self, name: str) -> ServiceContainer:
        """See `Sandbox.service`."""
        return self.services[name]

    async def is_alive(self) -> bool:
        """Whether it runs and its stream is there: a few milliseconds, and nothing inside is disturbed."""
        found = await self._inspect()
        return found is not None and found["Running"] and not found["Paused"] and not self._link.closed

    async def remove(self) -> None:
        """See `Sandbox.remove`."""
        if self._removed:
            return
        if self._storage is not None:
            await self._storage.stop()
        for terminal in list(self._terminals.values()):
            await terminal.forget()
        await remove_container(self._engine, self.id)
        self._removed = True
        for link in (self._link, *self._user_links.values()):
            await link.close()

    async def interrupt(self, link: Link) -> None:
        """Have a link's supervisor stop its command: PID 1 by a signal of the engine, another user's by one
        from root's shell. Where that is busy nothing is done, and the caller goes on to `clear`."""
        root = self._link
        if link is root:
            await self._signal(INTERRUPT)
        elif not root.lock.locked() and root.command is None:
            async with root.lock:
                try:
                    async with asyncio.timeout(ANSWER_SEC):
                        await root.ask(f"command kill -{INTERRUPT} {link.pid}")
                except TimeoutError:
                    return
                except LinkClosed:
                    raise await self._lost() from None

    async def clear(self) -> None:
        """Have PID 1 kill every other process, by a signal of the engine, and wait until they are gone.
        Raises `SandboxError` (`container_lost`) where PID 1 does not answer."""
        clears = self._link.clears
        started = time.monotonic()
        while time.monotonic() - started < CLEAR_SEC:
            # Again, because bash can overlook a signal that comes as it begins to wait.
            await self._signal(CLEAR)
            try:
                async with asyncio.timeout(ANSWER_SEC):
                    await self._link.until(lambda: self._link.clears > clears)
                    return
            except TimeoutError:
                continue
            except LinkClosed:
                raise await self._lost() from None
        raise SandboxError("container_lost", f"PID 1 did not answer within {CLEAR_SEC:.0f} s")

    async def _clear_surely(self) -> None:
        """`clear`, and the engine's own word that what was there before is gone."""
        before = await self._processes()
        started = time.monotonic()
        while time.monotonic() - started < CLEAR_SEC:
            await self.clear()
            if len(before & await self._processes()) <= 1:
                return
        raise SandboxError("container_lost", f"processes are still there after {CLEAR_SEC:.0f} s of killing")

    async def _processes(self) -> set[str]:
        """The ids, outside, of PID 1 and all others, as the engine says."""
        try:
            found = await self._engine.call("list processes", lambda api: api.top(self.id, "-o pid"))
        except SandboxError as error:
            raise await self.loss() or error from None
        column = found["Titles"].index("PID")
        return {process[column] for process in found["Processes"]}

    async def loss(self) -> SandboxError | None:
        """What has become of the container; None where it runs and its stream is there."""
        started = time.monotonic()
        while True:
            found = await self._inspect()
            if found is None or not found["Running"]:
                noted = Notes() if found is None else await notes(self._engine, self.id, found)
                return death(found, noted, ready=self._link.ready, memory_mb=self.spec.memory_mb)
            if not self._link.closed:
                return None
            if time.monotonic() - started > END_SEC:
                evidence = Evidence("the attached stream ended under a running container", said_by="engine")
                return SandboxError("container_lost", evidence.message, evidence)
            # The engine closes the stream shortly before it knows of the end.
            await asyncio.sleep(END_POLL_SEC)

    async def _forget_shells(self) -> None:
        user_links = [self._user_links.pop(who) for who in list(self._user_links)]
        for user_link in user_links:
            self._link.oom_kills = max(self._link.oom_kills, user_link.oom_kills)
            await user_link.close()
        self._shells.clear()
        terminals = [self._terminals.pop(who) for who in list(self._terminals)]
        for terminal in terminals:
            await terminal.forget()

    async def _lost(self) -> SandboxError:
        return await self.loss() or SandboxError("container_lost", "the attached stream has ended")

    async def _connect(self, who: str) -> Link:
        if not who:
            if self._link.closed:
                raise await self._lost()
            return self._link
        link = self._user_links.get(who)
        if link is None or link.closed:
            link = self._user_links[who] = await self._open_user_link(who)
        return link

    async def _open_user_link(self, who: str) -> Link:
        found = await self._engine.call(
            "create an exec",
            lambda api: api.exec_create(self.id, supervisor_argv(None), stdin=True, user=who),
        )
        link = Link(*await self._engine.exec_stream(found["Id"]))
        try:
            await link.introduce()
            await link.until(lambda: link.ready)
        except LinkClosed:
            said = link.unread()[-500:].decode("utf-8", "replace").strip()
            await link.close()
            loss = await self.loss()
            raise loss or SandboxError("container_config", f"no shell for user {who!r}: {said}") from None
        except BaseException:
            await link.close()
            raise
        return link

    async def _default_user(self) -> str:
        image = self.spec.image
        if self._image_user is None and image in _image_users:
            self._image_user = _image_users[image]
        if self._image_user is None:
            found = await self._engine.call("inspect an image", lambda api: api.inspect_image(image))
            self._image_user = str(found["Config"].get("User") or "")
            _image_users[found["Id"]] = self._image_user
        return self._image_user

    async def _report(self) -> None:
        """Have PID 1 say how many processes were killed for memory."""
        reports = self._link.reports
        try:
            async with asyncio.timeout(ANSWER_SEC):
                await self._signal(REPORT)
                await self._link.until(lambda: self._link.reports > reports)
        except (TimeoutError, LinkClosed):
            return

    async def _signal(self, number: int) -> None:
        try:
            await self._engine.call("signal a container", lambda api: api.kill(self.id, number))
        except SandboxError as error:
            if error.evidence.status in (404, 409):
                raise await self.loss() or error from None
            raise

    async def _inspect(self) -> dict[str, Any] | None:
        try:
            found = await self._engine.call("inspect a container", lambda api: api.inspect_container(self.id))
        except SandboxError as error:
            if error.evidence.status == 404:
                return None
            raise
        state: dict[str, Any] = found["State"]
        return state
