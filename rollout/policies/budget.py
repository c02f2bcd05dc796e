"""A budget in US dollars, out of which the answers of a policy are paid.

Each answer is charged as it ends, one that breaks off with what was counted of it, and none begins once the budget is
spent: the overshoot is at most what the answers cost that were under way then. Who asks for another, or waits to be
tried again, gets `Cancelled`, which ends the rollout and is nobody's fault.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from rollcage.rollout.outcome import Cancelled
from rollcage.rollout.policies.base import Policy


class Budget(Protocol):
    """Counts what was spent."""

    @property
    def limit_usd(self) -> float: ...

    async def admit(self) -> None:
        """Return where an answer may begin. Raises `Cancelled` once the budget is spent."""
        ...

    async def charge(self, usd: float) -> None:
        """Count what an answer has cost, also where the caller is cancelled meanwhile."""
        ...

    async def spent(self) -> float:
        """US dollars so far."""
        ...

    async def until_spent(self) -> str:
        """Wait until no answer may begin any more; why that is."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A policy that pays its answers out of a budget, where it has one."""

    @property
    def budget(self) -> Budget | None: ...

    def with_budget(self, budget: Budget) -> Policy:
        """The same policy, paying out of another budget."""
        ...


class LocalBudget:
    """A budget of one process."""

    def __init__(self, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._spent = 0.0
        self._empty = asyncio.Event()

    async def admit(self) -> None:
        """See `Budget`."""
        if self._spent >= self.limit_usd:
            raise Cancelled(spent_message(self.limit_usd))

    async def charge(self, usd: float) -> None:
        """See `Budget`."""
        self._spent += usd
        if self._spent >= self.limit_usd:
            self._empty.set()

    async def spent(self) -> float:
        """See `Budget`."""
        return self._spent

    async def until_spent(self) -> str:
        """See `Budget`."""
        await self._empty.wait()
        return spent_message(self.limit_usd)


def spent_message(limit_usd: float) -> str:
    """How the end of a budget is told."""
    return f"the job's budget of ${limit_usd:g} is spent"
