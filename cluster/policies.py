"""A policy that vLLM serves in Ray: its replicas, started, kept well, updated, scaled and stopped.

    ServedPolicy (the job's process) -> Supervised -> PolicyReplica (an actor each) -> EngineLife -> VllmEngine
                 \\-> Router (an actor) <- Replicas (each process that has rollouts) -> PolicyReplica

The job's process owns the actors, and they end with it. Twice a second it tells the router how each replica is; a
router that does not answer is killed, and Ray starts it again.

The weights that are current are kept here. An update makes them so before the first replica takes them: a replica that
starts meanwhile starts with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from rollcage.cluster.actors import GONE
from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.replica import vllm_engine
from rollcage.cluster.replica_placement import placement_of, replica_settings, require_resources
from rollcage.cluster.replica_protocol import CHECK_SEC, MakeEngine, ReplicaInfo, Weights
from rollcage.cluster.replicas import Replicas
from rollcage.cluster.router import Member, start_router
from rollcage.cluster.supervised import ANSWER_SEC, BOOT_SEC, POLL_SEC, Supervised
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.policies.engine import TokenPolicy

HURRY_SEC = 2.0
"""How long replicas that are not wanted any more may take to end by themselves: one that loads answers no call."""

CLOSE_SEC = 60.0


class ServedPolicy:
    """See the module. `policy` is what hosts are given; it is there once `start` has returned.

    `model` is what vLLM is to load for `config.model`. `say` is shown progress and losses, a line each. `metrics`: see
    `ReplicaSettings`. Raises `InputError` for settings that contradict each other.
    """

    policy: TokenPolicy

    def __init__(
        self,
        name: str,
        config: VllmPolicyConfig,
        model: str,
        *,
        say: Callable[[str], None] = lambda _line: None,
        make_engine: MakeEngine = vllm_engine,
        check_sec: float = CHECK_SEC,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._config = config
        try:
            self._placement = placement_of(config)
        except InputError as error:
            raise InputError(f"policies.{name}: {error}").about("policies", name) from error
        self._settings = replace(replica_settings(config, model, self._placement, check_sec), metrics=metrics)
        self._make_engine = make_engine
        self._say_line = say
        self._weights = Weights(config.version)
        self._replicas: dict[int, Supervised] = {}
        self._following: dict[int, asyncio.Task[None]] = {}
        self._syncing: asyncio.Task[None] | None = None
        self._router: Any = None
        self._router_answered = False
        self._sessions: dict[int, int] = {}
        self._one_change = asyncio.Lock()

    @property
    def version(self) -> int:
        """Of the weights that are current."""
        return self._weights.version

    @property
    def path(self) -> str | None:
        """What was replaced last; None before the first update."""
        return self._weights.path

    async def start(self) -> None:
        """Start all replicas, side by side, and wait until each generates.

        Raises `InputError` for an engine argument that vLLM does not take, or a model that cannot hold a conversation,
        and `CouldNotRun` where the cluster has not what is asked for or a replica does not come up; then the others are
        stopped.
        """
        started = False
        try:
            self._require(self._config.replicas)
            self._router = start_router()
            info = await self._add(range(1, self._config.replicas + 1))
            self._syncing = asyncio.create_task(self._sync_for_ever())
            engine = Replicas(self._router, info, retry_sec=self._config.retry_sec)
            self.policy = self._policy(engine)
            started = True
        finally:
            if not started:
                await self.close(within_sec=HURRY_SEC)

    async def update(self, path: str, version: int) -> dict[int, str]:
        """Have all replicas answer with the weights at `path`, from now on as `version`: by replica, how it took them
        (`PolicyReplica.update`), or `failed: ...` for one that is down until it can start with them. The version that
        is current again changes nothing.

        Where turns in flight are to finish, half of the replicas at a time take them, so that the others serve.
        Raises `ValueError` for a lower version, and where no replica can load what is at `path`: nothing has changed.
        """
        async with self._one_change:
            before = self._weights
            if version < before.version:
                raise ValueError(f"the weights are of version {before.version} already, {version} is older")
            if version == before.version:
                return dict.fromkeys(sorted(self._replicas), "same")
            self._weights = before.updated(path, version)
            results: dict[int, str] = {}
            refused: ValueError | None = None
            for wave in self._waves():
                took = await asyncio.gather(*(self._update(replica) for replica in wave))
                for replica, result in zip(wave, took, strict=True):
                    results[replica.number] = f"failed: {result}" if isinstance(result, Exception) else result
                    refused = result if isinstance(result, ValueError) else refused
                if refused is not None and all(not _loaded(result) for result in results.values()):
                    await self._take_back(before, results)
                    raise refused
            await self._sync()
            return results

    async def scale(self, replicas: int) -> None:
        """Have so many replicas: start more, or drain and stop those with the highest numbers. Raises as `start`."""
        async with self._one_change:
            if replicas < 1:
                raise ValueError("a policy has at least one replica")
            now = sorted(self._replicas)
            if replicas > len(now):
                self._require(replicas)
                first = now[-1] + 1
                await self._add(range(first, first + replicas - len(now)))
            else:
                await asyncio.gather(*(self._drain(number) for number in now[replicas:]))

    async def drain(self, number: int) -> None:
        """Stop one replica once its turns have ended; its sessions move at their next turn. Raises `ValueError` for the
        last one, and for one that is not there."""
        async with self._one_change:
            if number not in self._replicas or len(self._replicas) == 1:
                raise ValueError(f"replica {number} of policy {self.name} cannot be drained")
            await self._drain(number)

    def status(self) -> list[dict[str, Any]]:
        """Each replica as it was last seen, at most a second ago."""
        return [
            {
                "replica": number,
                "state": str(replica.status.state),
                "version": replica.status.version,
                "kv_use": replica.status.kv_use,
                "running": replica.status.running,
                "waiting": replica.status.waiting,
                "sessions": self._sessions.get(number, 0),
                "restarts": replica.restarts,
                "said": replica.status.said,
                "metrics": replica.status.metrics,
            }
            for number, replica in sorted(self._replicas.items())
        ]

    async def close(self, *, within_sec: float = CLOSE_SEC) -> None:
        """Stop everything. Nothing is left in the cluster."""
        tasks = [*self._following.values(), *([] if self._syncing is None else [self._syncing])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._following.clear()
        try:
            await asyncio.gather(*(replica.stop(within_sec) for replica in self._replicas.values()))
        finally:
            self._replicas.clear()
            if self._router is not None:
                ray.kill(self._router, no_restart=True)

    async def _add(self, numbers: Iterable[int]) -> ReplicaInfo:
        """Start these replicas; when one fails the others are stopped."""
        new = {number: self._supervised(number) for number in numbers}
        self._replicas |= new
        starting = [
            asyncio.create_task(self._begin(replica, len(self._replicas))) for replica in new.values()
        ]
        try:
            infos = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            await asyncio.gather(*(replica.stop(HURRY_SEC) for replica in new.values()))
            for number in new:
                del self._replicas[number]
            raise
        for number, replica in new.items():
            following = asyncio.create_task(
                replica.follow(
                    lambda: self._weights,
                    self._config.on_update,
                    settled=lambda: not self._one_change.locked(),
                )
            )
            following.add_done_callback(self._unfollowed)
            self._following[number] = following
        await self._sync()
        return infos[0]

    def _policy(self, engine: Replicas) -> TokenPolicy:
        config = self._config
        try:
            return TokenPolicy(
                engine,
                name=self.name,
                template_kwargs=config.template_kwargs,
                max_staleness=config.max_staleness if config.stale == "drop" else None,
            )
        except ValueError as error:
            raise InputError(
                f"policies.{self.name}: {config.model}: {error}; `engine_args: {{tokenizer: ...}}` names another"
            ).about("policies", self.name, "model") from error

    def _require(self, replicas: int) -> None:
        try:
            require_resources(self._placement, replicas)
        except CouldNotRun as error:
            raise CouldNotRun(f"policy {self.name}: {error}").about("policies", self.name) from error

    async def _begin(self, replica: Supervised, of: int) -> ReplicaInfo:
        began = time.monotonic()
        which = f"replica {replica.number} of {of}"
        try:
            info = await replica.start(self._weights)
        except CouldNotRun as error:
            raise CouldNotRun(f"policy {self.name}: {which}: {error}").about("policies", self.name) from error
        except (ValueError, RolloutError) as error:
            setting = ("policies", self.name, *self._config.setting_of(str(error)))
            said = f"{which}: {error} (see {'.'.join(setting)})"
            if isinstance(error, ValueError):
                raise InputError(f"policies.{self.name}: {said}").about(*setting) from error
            failed = RuntimeError(f"policy {self.name}: {said}")
            raise CouldNotRun.because(failed).about(*setting) from error
        self._say(f"{which} ready after {time.monotonic() - began:.0f} s")
        return info

    def _supervised(self, number: int) -> Supervised:
        return Supervised(number, self._settings, self._placement, self._make_engine, self._say)

    def _waves(self) -> list[list[Supervised]]:
        replicas = [replica for _, replica in sorted(self._replicas.items())]
        if self._config.on_update == "continue" or len(replicas) == 1:
            return [replicas]
        half = (len(replicas) + 1) // 2
        return [replicas[:half], replicas[half:]]

    async def _update(self, replica: Supervised) -> str | Exception:
        try:
            return await replica.update(self._weights, self._config.on_update)
        except (RolloutError, ValueError) as error:
            return error

    async def _take_back(self, before: Weights, results: dict[int, str]) -> None:
        """No replica could load the new weights: those that were to start with them start with the old ones."""
        self._weights = before
        later = [self._replicas[number] for number, result in results.items() if result == "later"]
        await asyncio.gather(*(self._update(replica) for replica in later))

    async def _drain(self, number: int) -> None:
        replica = self._replicas[number]
        await replica.drain()
        following = self._following.pop(number)
        following.cancel()
        await asyncio.wait([following])
        await replica.stop(CLOSE_SEC)
        del self._replicas[number]
        await self._sync()
        self._say(f"replica {number} is drained")

    async def _sync_for_ever(self) -> None:
        while True:
            await self._sync()
            await asyncio.sleep(POLL_SEC)

    async def _sync(self) -> None:
        members = {
            number: Member(replica.actor, replica.report, replica.said)
            for number, replica in self._replicas.items()
        }
        # The oldest that a new session may meet: with the newest, those would be stale that are begun anew.
        versions = [replica.status.version for replica in self._replicas.values() if replica.report.open]
        try:
            async with asyncio.timeout(ANSWER_SEC if self._router_answered else BOOT_SEC):
                self._sessions = await self._router.sync.remote(members, min(versions, default=0))
            self._router_answered = True
        except GONE:
            self._router_answered = False  # Ray starts it again, and the next time tells it everything
        except TimeoutError:
            self._router_answered = False
            self._say("the router hangs: it is started again")
            ray.kill(self._router, no_restart=False)

    def _unfollowed(self, following: asyncio.Task[None]) -> None:
        """An error that has no name: turns still go on, and what is lost then stays lost."""
        if not following.cancelled() and (error := following.exception()) is not None:
            self._say(f"a replica is no longer looked after: {error!r}")

    def _say(self, line: str) -> None:
        self._say_line(f"policy {self.name}: {line}")


def _loaded(result: str) -> bool:
    return result not in ("later", "lost") and not result.startswith("failed: ")
