"""Saved states: what an agent left of its sandbox, as an image of the sandbox's engine, to be verified again.

A state is made by a commit of the container, not paused: only PID 1, which is ours, is alive then. Measured on 2 cores:
0.05 s for what agents usually leave, 0.5 s for 100 MB, 0.8 s for 5,000 files.

What an image does not hold, and what becomes of it:

- files in /dev/shm, and volumes of the image's own (VOLUME): not saved, and the reason names them;
- processes that the tests need (`keep_processes`) and the other containers of a task of several: the same;
- values of the environment: blanked in the image, and given anew, since some are the host's secrets; engines before 25
  keep a copy of what the container was made with all the same, and a state that has such values there is not kept;
- what the agent changed of its own image, which a verifier asks for (`Sandbox.changes`): in a label.

States are named `rollcage/state:<attempt>-<number of the step>` and labelled with their attempt and job. They have no
name of those that `image_gc.py` removes, and what they stand on stays as long as they do.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from docker.errors import APIError, NotFound

from rollcage.rollout.digest import task_digest
from rollcage.rollout.sandbox.base import Change, Origin
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pulls import BuiltImage, described, image_config, inspect
from rollcage.rollout.sandbox.reaper import DEADLINE_LABEL, HOST_LABEL, JOB_LABEL
from rollcage.rollout.task import Environment

STATES = "rollcage/state"
STATE_LABEL = "rollcage.state"
"""On states: the attempt."""
STEP_LABEL = "rollcage.state.step"
BASE_LABEL = "rollcage.state.base"
"""The id of the image that the sandbox was made of."""
ENVIRONMENT_LABEL = "rollcage.state.environment"
CHANGES_LABEL = "rollcage.state.changes"

STATE_LABELS = (STATE_LABEL, STEP_LABEL, BASE_LABEL, ENVIRONMENT_LABEL, CHANGES_LABEL)

CHANGES_BYTES = 1 << 20
"""Of packed changes: some hundred thousand paths. The engine's list of images has them all."""

GIB = 1 << 30

_NOT_OF_THE_SANDBOX = ("context", "compose", "build_timeout_sec", "healthcheck")


class NotSaved(Exception):
    """There is no state, and the message says why."""


@dataclass(frozen=True)
class SavedState:
    """A state that an engine has. `environment`: see `environment_digest`. `size`: bytes beyond the image below."""

    reference: str
    attempt_id: str
    job: str
    step: str
    environment: str
    size: int


class States:
    """The states of one engine. `disk_gb`: GiB that they may take together before no more are made; None: any."""

    def __init__(self, engine: Engine, disk_gb: float | None = None) -> None:
        self.engine = engine
        self.disk_gb = disk_gb

    async def save(
        self, sandbox: DockerSandbox, environment: Environment, *, attempt_id: str, number: int, step: str
    ) -> str:
        """Save a sandbox whose processes have been stopped; returns the state's name. `number` counts the task's steps
        from 1. Raises `NotSaved`, and `SandboxError`."""
        if environment.compose is not None:
            raise NotSaved("a task of several containers has no state in one image")
        await self._check_mounts(sandbox)
        await self._check_budget()
        packed = pack_changes(await sandbox.changes())
        if len(packed) > CHANGES_BYTES:
            raise NotSaved("the agent changed more files than a state can name")
        reference = f"{STATES}:{attempt_id}-{number}"
        base = sandbox.spec.image
        labels = {
            STATE_LABEL: attempt_id,
            JOB_LABEL: sandbox.spec.labels.get(JOB_LABEL, ""),
            STEP_LABEL: step,
            BASE_LABEL: base,
            ENVIRONMENT_LABEL: await asyncio.to_thread(environment_digest, environment),
            CHANGES_LABEL: packed,
            HOST_LABEL: "",
            DEADLINE_LABEL: "",
        }
        _, was = image_config(await inspect(self.engine, base) or {})
        blank = [f"{name}={was.get(name, '')}" for name in sandbox.spec.env]
        config = {"Labels": labels, "Env": blank, "Cmd": ["/bin/sh"], "Entrypoint": []}
        await self.engine.call("save a container's state", partial(_commit, sandbox.id, reference, config))
        if secrets := _secrets(environment, sandbox.spec.env):
            made = (await inspect(self.engine, reference) or {}).get("ContainerConfig") or {}
            if secrets & set(made.get("Env") or ()):
                await self.drop(attempt_id)
                names = ", ".join(sorted(secret.partition("=")[0] for secret in secrets))
                raise NotSaved(f"an image of this engine would hold the host's values of {names}")
        return reference

    async def drop(self, attempt_id: str) -> int:
        """Remove an attempt's states; how many there were. Raises `SandboxError`."""
        return await remove_states(self.engine, attempt_id=attempt_id)

    async def image(self, reference: str) -> tuple[BuiltImage, SavedState] | None:
        """What a sandbox is made of that begins with this state; None where the engine does not have it."""
        found = await inspect(self.engine, reference)
        if found is None:
            return None
        labels = (found.get("Config") or {}).get("Labels") or {}
        base = await inspect(self.engine, labels.get(BASE_LABEL, ""))
        if base is None:
            return None
        origin = Origin(labels[BASE_LABEL], tuple(unpack_changes(labels.get(CHANGES_LABEL, ""))))
        image = replace(described(base, reference), id=str(found["Id"]), origin=origin)
        size = int(found.get("Size") or 0) - int(base.get("Size") or 0)
        return image, _saved(reference, labels, size)

    async def _check_mounts(self, sandbox: DockerSandbox) -> None:
        found = await self.engine.call("inspect a container", lambda api: api.inspect_container(sandbox.id))
        ours = {bind.split(":")[1] for bind in sandbox.spec.binds}
        volumes = [mount["Destination"] for mount in found.get("Mounts") or []]
        if kept_apart := sorted(set(volumes) - ours):
            raise NotSaved(f"an image does not hold the sandbox's volumes: {', '.join(kept_apart)}")
        if in_memory := await sandbox.shared_memory():
            raise NotSaved(f"an image does not hold what is in memory: {', '.join(in_memory)}")

    async def _check_budget(self) -> None:
        if self.disk_gb is None:
            return
        used = sum(state.size for state in await list_states(self.engine))
        if used >= self.disk_gb * GIB:
            raise NotSaved(
                f"states take {used / GIB:.1f} GiB already (sandbox.states_disk_gb: {self.disk_gb:g})"
            )


async def list_states(engine: Engine, job: str | None = None) -> list[SavedState]:
    """The states that the engine has, of one job or of all. Raises `SandboxError`."""
    images = await engine.call("list images", lambda api: api.images(all=True))
    sizes = {image["Id"]: int(image["Size"]) for image in images}
    found = []
    for image in images:
        labels = image.get("Labels") or {}
        for tag in image.get("RepoTags") or ():
            if (
                tag.startswith(f"{STATES}:")
                and STATE_LABEL in labels
                and job in (None, labels.get(JOB_LABEL))
            ):
                below = sizes.get(labels.get(BASE_LABEL, ""), 0)
                found.append(_saved(tag, labels, int(image["Size"]) - below))
    return found


async def remove_states(engine: Engine, *, job: str | None = None, attempt_id: str | None = None) -> int:
    """Remove the states of a job, of an attempt, or all; how many went. Raises `SandboxError`."""
    removed = 0
    for state in await list_states(engine, job):
        if attempt_id in (None, state.attempt_id):
            removed += await engine.call("remove a state", partial(_remove, state.reference))
    return removed


def environment_digest(environment: Environment) -> str:
    """What a sandbox is made of: the digest of the build context, and every setting that decides what is in it.
    Blocks. Raises `OSError`."""
    settings = {name: value for name, value in asdict(environment).items() if name not in _NOT_OF_THE_SANDBOX}
    context = "" if environment.context is None else task_digest(environment.context)
    return f"{context}:{zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode()):08x}"


def pack_changes(changes: Sequence[Change]) -> str:
    """As a label's text."""
    data = json.dumps([[change.path, change.kind] for change in changes]).encode()
    return base64.b64encode(zlib.compress(data)).decode()


def unpack_changes(packed: str) -> list[Change]:
    """What `pack_changes` packed."""
    if not packed:
        return []
    return [Change(path, kind) for path, kind in json.loads(zlib.decompress(base64.b64decode(packed)))]


def _secrets(environment: Environment, env: Mapping[str, str]) -> set[str]:
    """`NAME=value` of what is the host's: values of its variables, and proxies with a password."""
    named = {name for name, value in environment.env.items() if "${" in value}
    proxies = {name for name, value in env.items() if name.lower().endswith("_proxy") and "@" in value}
    return {f"{name}={env[name]}" for name in named | proxies if env.get(name)}


def _saved(reference: str, labels: Mapping[str, str], size: int) -> SavedState:
    return SavedState(
        reference,
        labels.get(STATE_LABEL, ""),
        labels.get(JOB_LABEL, ""),
        labels.get(STEP_LABEL, ""),
        labels.get(ENVIRONMENT_LABEL, ""),
        max(0, size),
    )


def _commit(container_id: str, reference: str, config: Mapping[str, Any], api: Any) -> None:
    # By hand, because docker-py's own always pauses the container.
    repository, _, tag = reference.rpartition(":")
    params = {"container": container_id, "repo": repository, "tag": tag, "pause": False}
    api._raise_for_status(api._post_json(api._url("/commit"), data=config, params=params))


def _remove(reference: str, api: Any) -> int:
    try:
        api.remove_image(reference)
    except NotFound:
        return 0
    except APIError as error:
        if error.status_code in (403, 409):
            return 0  # in use: by a verifier, or by somebody who looks
        raise
    return 1
