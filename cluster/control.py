"""Talking to a job that runs: new weights for its policies, how their replicas are, what a stream draws, and its end.

    from rollcage.cluster.control import policy_status, update_policy

    update_policy("runs/mine", "checkpoints/step-40", 40)

The run directory of a job that runs holds `control/`, which only the job's user can open:

    alive               locked by the job for as long as its process lives
    ID.request.json     what is asked for (`control_requests.py`); the job removes it as it takes it
    ID.answer.json      how far that is, replaced until its `state` is no longer `working`

Files are written as `.tmp` and renamed. Who asks removes the answer; the job removes the folder when it ends. Job and
asker are on one machine: a job that was killed is told from one that lives by the lock, which the kernel takes back.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.rollout.arrow import Location, RunError

T = TypeVar("T")

FOLDER, ALIVE = "control", "alive"
REQUEST, ANSWER = ".request.json", ".answer.json"

POLL_SEC = 0.1
"""Between looks for an answer, and for a request: both sides are on one machine's disk."""

UPDATE_SEC = 3600.0
"""How long to wait for an update: turns in flight may have to end, and a large model to load from a network disk."""

STATUS_SEC = 60.0

STEER_SEC = 600.0
"""How long to wait until a job takes weights or its end: its policies may still be starting."""

Replicas = Sequence[dict[str, Any]]
"""Each replica's `replica` (its number), `state`, `version`, `kv_use`, `running`, `waiting`, `sessions`, `restarts` and
`said`."""


@dataclass(frozen=True)
class PolicyUpdate:
    """What came of an update. `replicas` says how each took the weights: `reload`, `lora`, `restart` (`restart: why`
    where the engine says why); `same` where it had this version; `later` or `lost` where it starts with them; `failed:
    ...` where it is tried again."""

    policy: str
    version: int
    path: str
    replicas: dict[int, str]
    seconds: float

    @property
    def failed(self) -> bool:
        """Some replica has not got the weights."""
        return any(how.startswith("failed") for how in self.replicas.values())


@dataclass(frozen=True)
class PolicyStatus:
    """A policy as the job sees it. `version` and `path` are of the weights that are current; `path` is None for those
    that the job began with. There are no `replicas` while it starts."""

    policy: str
    version: int
    path: str | None
    replicas: Replicas

    @property
    def starting(self) -> bool:
        """It does not answer yet."""
        return not self.replicas


def update_policy(
    run: str | Path,
    path: str | Path,
    version: int,
    *,
    policy: str | None = None,
    timeout_sec: float = UPDATE_SEC,
    on_progress: Callable[[Replicas], None] | None = None,
) -> PolicyUpdate:
    """Have the policy of the job that writes `run` answer with the weights at `path`, a model's directory or a LoRA
    adapter's, as `version`. Returns when its replicas have taken them; the version that is current again changes
    nothing. `policy` may be left out where the job serves one. `on_progress` is told how the replicas are meanwhile.

    Raises `InputError` where no job runs there, and for what the job refuses: a version that is older, a path that
    cannot be loaded; it then goes on with the weights that it has. Raises `CouldNotRun` where it has not answered
    within `timeout_sec`, or ends before.
    """
    return _blocking(_updating(run, path, version, policy, timeout_sec, on_progress))


async def update_policy_async(
    run: str | Path,
    path: str | Path,
    version: int,
    *,
    policy: str | None = None,
    timeout_sec: float = UPDATE_SEC,
    on_progress: Callable[[Replicas], None] | None = None,
) -> PolicyUpdate:
    """`update_policy`. Cancelled, it takes back a request that the job has not begun with."""
    return await _awaited(_updating(run, path, version, policy, timeout_sec, on_progress))


def policy_status(
    run: str | Path, *, policy: str | None = None, timeout_sec: float = STATUS_SEC
) -> dict[str, PolicyStatus]:
    """The policies, by name, that the job which writes `run` serves; or one. Raises as `update_policy`."""
    return _blocking(_telling(run, policy, timeout_sec))


async def policy_status_async(
    run: str | Path, *, policy: str | None = None, timeout_sec: float = STATUS_SEC
) -> dict[str, PolicyStatus]:
    """`policy_status`."""
    return await _awaited(_telling(run, policy, timeout_sec))


def set_weights(run: str | Path, weights: Mapping[str, float], *, timeout_sec: float = STEER_SEC) -> int:
    """Have the stream that writes `run` draw these tasks so often, relative to each other and to the rest; 0: not at
    all. Tasks that are not named keep their weights (1 at first). Returns from which draw on, counted over all tasks.

    Raises `InputError` where no job runs there, or it is no stream, and for unknown tasks, what is no weight, and where
    nothing would be left to draw; `CouldNotRun` as `update_policy`. A trainer without Ray has
    `rollcage.rollout.curriculum.set_weights`.
    """
    draw: int = _blocking(_asking(run, {"do": "weights", "weights": dict(weights)}, timeout_sec, None))[
        "draw"
    ]
    return draw


def stop_job(run: str | Path, *, timeout_sec: float = STEER_SEC) -> None:
    """Have the job that writes `run` begin no more groups. Those that are under way end, and then the job does. Raises
    as `update_policy`."""
    _blocking(_asking(run, {"do": "stop"}, timeout_sec, None))


def running_jobs(parent: str | Path) -> list[Path]:
    """The run directories below `parent` whose jobs run on this machine."""
    return sorted(
        path.parents[1] for path in Path(parent).glob(f"*/{FOLDER}/{ALIVE}") if is_alive(path.parent)
    )


def only_running_job(parent: str | Path) -> Path:
    """The run directory of the one job that runs below `parent`. Raises `InputError` where there is none or several."""
    found = running_jobs(parent)
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(f"no job runs below {parent}/: name the run directory with --run")
    runs = "\n".join(f"  --run {path}" for path in found)
    raise InputError(f"{len(found)} jobs run below {parent}/, name one of them:\n{runs}")


def is_alive(control: Path) -> bool:
    """Whether the job of this folder runs. Raises `OSError` where that may not be known."""
    try:
        descriptor = os.open(control / ALIVE, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a file that only this user can read, whole or not at all. Raises `OSError`."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def _updating(
    run: str | Path,
    path: str | Path,
    version: int,
    policy: str | None,
    timeout_sec: float,
    on_progress: Callable[[Replicas], None] | None,
) -> Generator[None, None, PolicyUpdate]:
    request = {"do": "update", "policy": policy, "path": str(Path(path).absolute()), "version": version}
    answer = yield from _asking(run, request, timeout_sec, on_progress)
    replicas = {int(number): how for number, how in answer["replicas"].items()}
    return PolicyUpdate(answer["policy"], answer["version"], answer["path"], replicas, answer["seconds"])


def _telling(
    run: str | Path, policy: str | None, timeout_sec: float
) -> Generator[None, None, dict[str, PolicyStatus]]:
    answer = yield from _asking(run, {"do": "status", "policy": policy}, timeout_sec, None)
    return {name: PolicyStatus(policy=name, **status) for name, status in answer["policies"].items()}


def _home(run: str | Path) -> Path:
    """Where a job has its folder: in the run itself, and of a run elsewhere in its journal's directory. Raises
    `InputError` where that cannot be read."""
    if "://" not in str(run):
        return Path(run)
    try:
        location = Location(run)
        job = location.read_json("job.json") or {}
    except (RunError, OSError) as error:
        raise InputError(str(error)) from error
    return Path(job.get("config", {}).get("journal") or location.here)


def _asking(
    run: str | Path,
    request: dict[str, Any],
    timeout_sec: float,
    on_progress: Callable[[Replicas], None] | None,
) -> Generator[None, None, dict[str, Any]]:
    """Ask, and return the answer. Whoever drives this waits where it yields; closed, it takes the request back."""
    control, name = _home(run) / FOLDER, f"{time.time_ns()}-{secrets.token_hex(4)}"
    asked, answered = control / f"{name}{REQUEST}", control / f"{name}{ANSWER}"
    deadline = time.monotonic() + timeout_sec
    try:
        if not is_alive(control):
            raise InputError(_not_running(run))
        write_json(asked, request)
        while True:
            alive = is_alive(control)  # before the answer is looked for: a job that has ended writes none
            answer = _read(answered)
            if answer is not None and answer["state"] != "working":
                return _good(answer)
            if answer is not None and on_progress is not None:
                on_progress(answer["replicas"])
            if not alive:
                raise CouldNotRun(f"the job of {run} ended before it had answered")
            if time.monotonic() > deadline:
                raise CouldNotRun(_too_late(run, asked, timeout_sec))
            yield
    except PermissionError as error:
        raise InputError(f"{control}: only the user who runs the job may do this") from error
    except FileNotFoundError as error:
        raise CouldNotRun(f"the job of {run} ended before it could be asked") from error
    except OSError as error:
        raise CouldNotRun(f"the job of {run} cannot be asked: {error}") from error
    finally:
        for file in (asked, answered):
            with suppress(OSError):
                file.unlink()


def _too_late(run: str | Path, asked: Path, timeout_sec: float) -> str:
    said = f"the job of {run} did not answer within {timeout_sec:g} s"
    try:
        asked.unlink()
    except FileNotFoundError:
        return f"{said}, and goes on with it: `rollcage policy status --run {run}` shows how far it is"
    return f"{said}: it had not begun, and will not; its policies may still be starting"


def _not_running(run: str | Path) -> str:
    location = Location(run)
    if location.local and not location.local.is_dir():
        return f"there is no run directory {run}"
    if location.is_there(f"{location.path}/summary.json"):
        return f"the job of {run} has ended"
    if not location.is_there(f"{location.path}/job.json"):
        return f"{run} is no run directory: it has no job.json"
    return f"no job runs in {run}: it was ended without having finished"


def _read(answered: Path) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(answered.read_text())
        return answer
    except FileNotFoundError:
        return None


def _good(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["state"] == "refused":
        raise InputError(answer["error"])
    if answer["state"] == "failed":
        raise CouldNotRun(answer["error"])
    return answer


def _blocking(asking: Generator[None, None, T]) -> T:
    with closing(asking):
        while True:
            try:
                next(asking)
            except StopIteration as end:
                result: T = end.value
                return result
            time.sleep(POLL_SEC)


async def _awaited(asking: Generator[None, None, T]) -> T:
    with closing(asking):
        while True:
            try:
                next(asking)
            except StopIteration as end:
                result: T = end.value
                return result
            await asyncio.sleep(POLL_SEC)
