"""Which rollouts of a run have ended, and which attempts are in it: all of a run's, in some 13 bytes each."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from rollcage.rollout.trajectory import RolloutKey

LEAST_NEW = 4096
"""So many hashes, or a sixteenth of those that are sorted, are kept in a set before they are sorted in: each is moved
some twenty times while a run grows to a million."""


class Known:
    """Rollouts that have ended, and attempts, by 8 bytes of the hash of what names them: two of a million are taken for
    one with a probability of 3e-8."""

    def __init__(self) -> None:
        self._ended = Hashes()
        self._attempts = Hashes()

    def __contains__(self, key: RolloutKey) -> bool:
        return _of_rollout(key) in self._ended

    def __len__(self) -> int:
        """Rollouts that have ended."""
        return len(self._ended)

    def end(self, key: RolloutKey) -> None:
        """Count a rollout as ended; one that has changes nothing."""
        self._ended.add(_of_rollout(key))

    def reopen(self, key: RolloutKey) -> None:
        """Count a rollout as one that has not ended."""
        self._ended.discard(_of_rollout(key))

    def has_attempt(self, attempt_id: str) -> bool:
        """Whether the attempt is recorded."""
        return _hash(attempt_id) in self._attempts

    def add_attempt(self, attempt_id: str) -> None:
        """Count an attempt as recorded."""
        self._attempts.add(_hash(attempt_id))

    def drop_attempt(self, attempt_id: str) -> None:
        """Count an attempt as not recorded."""
        self._attempts.discard(_hash(attempt_id))


class Hashes:
    """A set of numbers of 64 bits that grows for long and loses few: a sorted array, what is new, and what is gone."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._new: set[int] = set()
        self._gone: set[int] = set()
        """Of those that are sorted."""

    def __contains__(self, number: int) -> bool:
        return number in self._new or (number not in self._gone and self._is_sorted(number))

    def __len__(self) -> int:
        return len(self._sorted) + len(self._new) - len(self._gone)

    def add(self, number: int) -> None:
        """Have it in the set."""
        if number in self:
            return
        if number in self._gone:
            self._gone.discard(number)
            return
        self._new.add(number)
        if len(self._new) > max(LEAST_NEW, len(self._sorted) // 16):
            new = np.fromiter(self._new, np.uint64, len(self._new))
            self._sorted = np.concatenate((self._sorted, new))
            self._sorted.sort()
            self._new.clear()

    def discard(self, number: int) -> None:
        """Have it not in the set."""
        if number in self._new:
            self._new.discard(number)
        elif self._is_sorted(number):
            self._gone.add(number)

    def _is_sorted(self, number: int) -> bool:
        place = int(self._sorted.searchsorted(np.uint64(number)))
        return place < len(self._sorted) and int(self._sorted[place]) == number


def _of_rollout(key: RolloutKey) -> int:
    return _hash("\0".join((key.job, key.agent, key.task, str(key.draw), str(key.sample))))


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8).digest())
