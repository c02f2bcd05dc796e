"""The job's side of `control.py`: the folder, and the answers to what is asked in it.

Whatever lies in the folder is answered, and never hurts the job: a request that cannot be read is refused, and what
goes wrong with one is its own answer. Updates follow each other (`ServedPolicy.update`); status is told at any time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from rollcage.cluster.config_settings import Settings
from rollcage.cluster.control import ALIVE, ANSWER, FOLDER, POLL_SEC, REQUEST, write_json

MOST_BYTES = 16 << 20
"""Of a request: a path and a number, or the weights of a hundred thousand tasks."""

PROGRESS_SEC = 0.5
"""Between two accounts of an update that is under way."""


class Updated(Protocol):
    """What is needed of a policy here; `ServedPolicy` is one."""

    @property
    def version(self) -> int: ...
    @property
    def path(self) -> str | None: ...

    async def update(self, path: str, version: int) -> dict[int, str]: ...

    def status(self) -> list[dict[str, Any]]: ...


class UpdateRequest(Settings):
    """See `update_policy`."""

    do: Literal["update"]
    policy: str | None = None
    path: str
    version: int = Field(ge=0)


class Steered(Protocol):
    """What is needed of a driver here."""

    async def set_weights(self, weights: Mapping[str, float]) -> int: ...

    def finish(self) -> None: ...


class WeightsRequest(Settings):
    """See `control.set_weights`."""

    do: Literal["weights"]
    weights: dict[str, Any]


class StopRequest(Settings):
    """See `control.stop_job`."""

    do: Literal["stop"]


class StatusRequest(Settings):
    """See `policy_status`."""

    do: Literal["status"]
    policy: str | None = None


Request = UpdateRequest | StatusRequest | WeightsRequest | StopRequest

_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="do")])


STARTING = "the policies of this job are starting"


class _Starting:
    """In the place of a policy that is not there yet: an update waits for it."""

    path = None

    def __init__(self, version: int) -> None:
        self.version = version

    async def update(self, path: str, version: int) -> dict[int, str]:
        raise Refused(STARTING)

    def status(self) -> list[dict[str, Any]]:
        return []


class Refused(Exception):
    """The request cannot be carried out; nothing has changed."""


@contextmanager
def control_folder(run: Path, say: Callable[[str], None]) -> Iterator[Path | None]:
    """The folder of a job that begins, gone when the block ends. What a killed job left in its place is removed. None
    where it cannot be made, which `say` is told: the job goes on without."""
    folder = run / FOLDER
    try:
        lock = _make(folder)
    except OSError as error:
        say(f"weights cannot be replaced in this job: {folder} cannot be made: {error}")
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@asynccontextmanager
async def job_control(
    run: Path, say: Callable[[str], None], starting: Mapping[str, int] = MappingProxyType({})
) -> AsyncIterator[JobControl]:
    """Inside the block, requests to the job that writes `run` are answered. `say` is told of updates, a line each.
    `starting`: names of the policies that are going to be served, with the versions of their weights."""
    with control_folder(run, say) as folder:
        control = JobControl(folder, say, starting)
        watching = asyncio.create_task(control.watch())
        try:
            yield control
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            if not watching.cancelled() and (error := watching.exception()) is not None:
                say(f"requests in {folder} were no longer answered: {error!r}")


class JobControl:
    """Answers what is asked in `folder`. Until there are policies to be served an update waits, and these are said to
    be `starting`, with no replica."""

    def __init__(self, folder: Path | None, say: Callable[[str], None], starting: Mapping[str, int]) -> None:
        self._folder = folder
        self._say = say
        self._policies: Mapping[str, Updated] = {name: _Starting(starting[name]) for name in starting}
        self._driver: Steered | None = None
        self._not_yet = STARTING
        self._done: set[str] = set()
        """Requests that could not be removed, and are not to be answered twice."""
        self._begun: set[Path] = set()
        """Answers that are `working`: whoever waits no longer has removed his."""
        self._work: set[asyncio.Task[dict[str, Any]]] = set()

    @asynccontextmanager
    async def serving(self, policies: Mapping[str, Updated]) -> AsyncIterator[None]:
        """Inside the block these policies are served. Updates that are under way at its end are given up."""
        self._policies, self._not_yet = policies, ""
        try:
            yield
        finally:
            self._not_yet = "the job is about to end"
            for task in self._work:
                task.cancel()
            if self._work:
                await asyncio.wait(self._work)

    def steers(self, driver: Steered) -> None:
        """From now on requests about what the job draws, and its end, go to this driver."""
        self._driver = driver

    async def watch(self) -> None:
        """Answer requests for ever."""
        folder = self._folder
        while folder is not None:
            try:
                names = await asyncio.to_thread(_requests, folder)
            except OSError as error:
                self._say(f"{folder} cannot be read, and requests are not answered: {error}")
                return
            for name in names:
                if name not in self._done:
                    self._take(folder / name)
            await asyncio.sleep(POLL_SEC)

    def _take(self, path: Path) -> None:
        answered = path.with_name(path.name.removesuffix(REQUEST) + ANSWER)
        try:
            request = _read(path)
        except FileNotFoundError:
            return
        except (Refused, OSError) as error:
            self._removed(path)
            self._answer(answered, {"state": "refused", "error": f"{path}: {error}"})
            return
        if self._not_yet and not isinstance(request, StatusRequest):
            return
        if not self._removed(path):
            return  # whoever asked has taken it back
        task = asyncio.create_task(self._carried_out(answered, request))
        self._work.add(task)
        task.add_done_callback(lambda done: self._ended(answered, done))

    def _removed(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError:  # a directory, say
            self._done.add(path.name)
        return True

    async def _carried_out(self, answered: Path, request: Request) -> dict[str, Any]:
        try:
            if self._not_yet and not (self._not_yet == STARTING and isinstance(request, StatusRequest)):
                raise Refused(self._not_yet)
            if isinstance(request, StatusRequest):
                named = self._policies if request.policy is None else dict([self._named(request.policy)])
                return {"state": "done", "policies": {name: _status(one) for name, one in named.items()}}
            if isinstance(request, WeightsRequest | StopRequest):
                return await self._steer(request)
            return await self._update(answered, request)
        except (Refused, ValueError) as error:
            return {"state": "refused", "error": str(error)}

    async def _steer(self, request: WeightsRequest | StopRequest) -> dict[str, Any]:
        if self._driver is None:
            raise Refused("this job is not steered")
        if isinstance(request, WeightsRequest):
            return {"state": "done", "draw": await self._driver.set_weights(request.weights)}
        self._say("asked to stop: no more groups are begun; those under way end")
        self._driver.finish()
        return {"state": "done"}

    async def _update(self, answered: Path, request: UpdateRequest) -> dict[str, Any]:
        name, policy = self._named(request.policy)
        path, version = Path(request.path), request.version
        if not path.is_absolute():
            raise Refused(f"the path of the weights must be absolute, not {path}")
        if not await asyncio.to_thread(path.is_dir):
            raise Refused(f"{path}: there is no such directory of weights")
        began = time.monotonic()
        updating = asyncio.ensure_future(policy.update(str(path), version))
        try:
            while not updating.done():
                self._answer(answered, {"state": "working", "replicas": policy.status()})
                await asyncio.wait({updating}, timeout=PROGRESS_SEC)
        finally:
            updating.cancel()
            await asyncio.wait({updating})
        results, seconds = updating.result(), time.monotonic() - began
        if policy.path not in (None, str(path)) and set(results.values()) == {"same"}:
            raise Refused(
                f"version {version} of policy {name} is what was at {policy.path}: other weights need a higher version"
            )
        said = ", ".join(f"replica {number} {how}" for number, how in results.items())
        self._say(f"policy {name}: version {version} from {path} ({seconds:.1f} s): {said}")
        return {
            "state": "done",
            "policy": name,
            "version": version,
            "path": str(path),
            "replicas": results,
            "seconds": seconds,
        }

    def _named(self, name: str | None) -> tuple[str, Updated]:
        served = ", ".join(self._policies)
        if not self._policies:
            raise Refused(
                "this job serves no policy with vLLM: there are no weights here that could be replaced"
            )
        if name is None and len(self._policies) > 1:
            raise Refused(f"this job serves several policies, say which: {served}")
        name = next(iter(self._policies)) if name is None else name
        if name not in self._policies:
            raise Refused(f"this job serves no policy {name!r}, but {served}")
        return name, self._policies[name]

    def _ended(self, answered: Path, task: asyncio.Task[dict[str, Any]]) -> None:
        self._work.discard(task)
        if task.cancelled():
            self._answer(answered, {"state": "failed", "error": "the job ended before it was done"})
        elif (error := task.exception()) is not None:  # what has no name yet must not be silent
            self._say(f"a request in {self._folder} failed: {error!r}")
            self._answer(answered, {"state": "failed", "error": repr(error)})
        else:
            self._answer(answered, task.result())

    def _answer(self, answered: Path, answer: dict[str, Any]) -> None:
        if answered in self._begun and not answered.exists():
            return
        if answer["state"] == "working":
            self._begun.add(answered)
        else:
            self._begun.discard(answered)
        try:
            write_json(answered, answer)
        except OSError as error:
            self._say(f"a request in {self._folder} could not be answered: {error}")


def _make(folder: Path) -> int:
    """Make the folder, with its lock held before anybody can see it."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    hidden = folder / f"{ALIVE}.tmp"
    lock = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
        os.replace(hidden, folder / ALIVE)
    except OSError:
        os.close(lock)
        raise
    return lock


def _requests(folder: Path) -> list[str]:
    """Names of the requests, the oldest first."""
    return sorted(name for name in os.listdir(folder) if name.endswith(REQUEST))


def _read(path: Path) -> Request:
    """Raises `Refused` for what is no request, or not of this user (or root), and `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Refused("this is no file")
        if about.st_uid not in (0, os.geteuid()):
            raise Refused("this is another user's file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Refused(f"this is more than {MOST_BYTES} bytes")
    try:
        return _REQUEST.validate_json(data)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
        raise Refused("this is no request: " + "; ".join(problems)) from error


def _status(policy: Updated) -> dict[str, Any]:
    return {"version": policy.version, "path": policy.path, "replicas": policy.status()}
