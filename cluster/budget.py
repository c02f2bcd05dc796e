"""A job's budgets: one actor counts what all hosts spend, and the job stops taking rollouts once it is spent.

The actor lives on the driver's node. Where it is gone nobody knows what was spent: no answer begins any more, and the
job stops as if the budget were spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcage.rollout.outcome import Cancelled, PolicyError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.policies.budget import Budgeted, spent_message

CONCURRENT_CALLS = 10_000
"""Each is over at once, but for those that wait for the budget's end: one of the driver's, one of a host's."""

SPENDING_SEC = 10.0
"""As long as a job that has ended waits to be told what it spent."""

ASK_AGAIN_SEC = 1.0
"""Between tries to reach an actor that cannot be reached now."""


class Purse:
    """The count, in an actor."""

    def __init__(self, limit_usd: float) -> None:
        self._limit_usd = limit_usd
        self._spent = 0.0
        self._empty = asyncio.Event()

    async def charge(self, usd: float) -> None:
        """Count what an answer has cost."""
        self._spent += usd
        if self._spent >= self._limit_usd:
            self._empty.set()

    async def spent(self) -> float:
        """US dollars so far."""
        return self._spent

    async def until_spent(self) -> None:
        """Return once the limit is reached."""
        await self._empty.wait()


class SharedBudget:
    """A `Budget` that is one for all processes of a job. Can be pickled."""

    def __init__(self, purse: Any, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._purse = purse

    async def admit(self) -> None:
        """See `Budget`. Raises `Cancelled` also where the actor is gone."""
        if await self.spent() >= self.limit_usd:
            raise Cancelled(spent_message(self.limit_usd))

    async def charge(self, usd: float) -> None:
        """See `Budget`. Raises `Cancelled` where the actor is gone."""
        await self._ask(self._purse.charge.remote(usd))

    async def spent(self) -> float:
        """See `Budget`. Raises `Cancelled` where the actor is gone."""
        spent: float = await self._ask(self._purse.spent.remote())
        return spent

    async def until_spent(self) -> str:
        """See `Budget`. The actor's loss is such a reason."""
        while True:
            try:
                await self._ask(self._purse.until_spent.remote())
                return spent_message(self.limit_usd)
            except Cancelled as gone:
                return gone.message
            except PolicyError:  # it passes
                await asyncio.sleep(ASK_AGAIN_SEC)

    async def _ask(self, answer: Any) -> Any:
        asked = asyncio.ensure_future(answer)
        asked.add_done_callback(_look_at)
        try:
            # Shielded: a call that its caller is called off from is carried out all the same.
            return await asyncio.shield(asked)
        except ActorUnavailableError as error:  # a RayActorError that passes
            raise PolicyError("policy_unavailable", f"the job's budget cannot be asked: {error}") from error
        except RayActorError as error:
            said = f"the job's budget of ${self.limit_usd:g} is not counted any more: its actor is gone"
            raise Cancelled(said) from error


@asynccontextmanager
async def shared_budgets(
    policies: Mapping[str, Policy],
) -> AsyncIterator[tuple[dict[str, Policy], dict[str, SharedBudget]]]:
    """The same policies, those with a budget paying out of one that all processes share; and these budgets by
    policy. Their actors end with the block."""
    shared: dict[str, SharedBudget] = {}
    actors = []
    made = dict(policies)
    try:
        for name, policy in policies.items():
            if isinstance(policy, Budgeted) and policy.budget is not None:
                limit_usd = policy.budget.limit_usd
                actors.append(_start(limit_usd))
                shared[name] = SharedBudget(actors[-1], limit_usd)
                made[name] = policy.with_budget(shared[name])
        yield made, shared
    finally:
        for actor in actors:
            ray.kill(actor)


@asynccontextmanager
async def stopping_when_spent(
    budgets: Mapping[str, SharedBudget], stop: Callable[[str], None]
) -> AsyncIterator[None]:
    """Inside the block, `stop` is called once with the reason when the first of these budgets is spent."""
    watch = asyncio.create_task(_watch(budgets, stop))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait({watch})


async def spending(budgets: Mapping[str, SharedBudget]) -> dict[str, dict[str, float | None]]:
    """For the summary, by policy: `limit_usd` and `spent_usd`, which is None where the actor does not answer."""
    found: dict[str, dict[str, float | None]] = {}
    for name, budget in budgets.items():
        try:
            async with asyncio.timeout(SPENDING_SEC):
                spent = await budget.spent()
        except (Cancelled, PolicyError, TimeoutError):
            found[name] = {"limit_usd": budget.limit_usd, "spent_usd": None}
        else:
            found[name] = {"limit_usd": budget.limit_usd, "spent_usd": spent}
    return found


def _look_at(asked: asyncio.Future[Any]) -> None:
    """Nobody may wait any more for what is shielded, and asyncio prints an error that nobody has looked at."""
    if not asked.cancelled():
        asked.exception()


async def _watch(budgets: Mapping[str, SharedBudget], stop: Callable[[str], None]) -> None:
    if not budgets:
        return
    waits = [asyncio.create_task(budget.until_spent()) for budget in budgets.values()]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stop(done.pop().result())
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _start(limit_usd: float) -> Any:
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Purse)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(limit_usd)
    )
