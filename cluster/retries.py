"""How often a failure is tried again, and when: the outcome table's budgets, a job's changes, seeded jitter."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from math import isfinite

from rollcage.rollout.outcome import BY_NAME, ErrorClass, Quarantine, backoff
from rollcage.rollout.policies.retry import LONGEST_SHUT_SEC

JITTER = 0.5
"""A wait is lengthened by up to this share, so that what failed together does not come back together. It is
never shortened: a server that names a time means it."""

RETRY_AFTER_CAP_SEC = LONGEST_SHUT_SEC
"""No server's `Retry-After` holds a rollout for longer: its policy asks again by then, too."""


class Verdict(Enum):
    """What an error means for whoever spent a try on it. `QUARANTINE`: it gives up, and its task may be at fault."""

    RETRY = "retry"
    GIVE_UP = "give up"
    QUARANTINE = "quarantine"


def row_of(error_class: str | None) -> ErrorClass:
    """The table's row; whatever it does not know is `internal_error`."""
    return BY_NAME.get(error_class or "", BY_NAME["internal_error"])


class Retries:
    """Budgets per error class. `overrides` gives another number of retries for some classes.

    A class that quarantines at once has no budget, whatever a job says: the next try would end the same way.
    """

    def __init__(self, overrides: Mapping[str, int] | None = None, *, seed: int = 0) -> None:
        self._overrides = dict(overrides or {})
        self._seed = seed
        for name, retries in self._overrides.items():
            if name not in BY_NAME or retries < 0:
                raise ValueError(f"no such retry budget: {name}: {retries}")

    def budget(self, row: ErrorClass) -> int:
        """Further tries that one rollout (or one task's preparation) may spend on this class."""
        if row.quarantine is Quarantine.AT_ONCE:
            return 0
        return self._overrides.get(row.name, row.retries)

    def verdict(self, row: ErrorClass, failures: int) -> Verdict:
        """What follows from failure number `failures` (from 1) of this class."""
        if failures <= self.budget(row):
            return Verdict.RETRY
        return Verdict.GIVE_UP if row.quarantine is Quarantine.NEVER else Verdict.QUARANTINE

    def delay(self, row: ErrorClass, failures: int, retry_after_sec: float | None, token: str) -> float:
        """Seconds to wait after failure number `failures`.

        The jitter comes from the seed and `token` alone, so it is the same in whatever order things end.
        """
        wait = backoff(row.name, min(failures, 64))  # past the cap for long; 2.0**1024 would overflow
        if retry_after_sec is not None and isfinite(retry_after_sec):
            wait = max(wait, min(retry_after_sec, RETRY_AFTER_CAP_SEC))
        draw = int.from_bytes(blake2b(f"{self._seed}/{token}".encode(), digest_size=8).digest(), "big")
        return wait * (1 + JITTER * draw / 2**64)
