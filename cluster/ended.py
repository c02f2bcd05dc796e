"""Which rollouts of a run have ended, and which attempts are in it: all of a run's, in about 100 bytes a rollout."""

from __future__ import annotations

from hashlib import blake2b
from sys import intern

from rollcage.rollout.trajectory import RolloutKey


class Known:
    """Rollouts that have ended, as one bit each beside their group, and attempts, as 8 bytes of their id's hash (two
    of a million are taken for one with a probability of 3e-8)."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str, str, int], int] = {}
        self._count = 0
        self._attempts: set[int] = set()

    def __contains__(self, key: RolloutKey) -> bool:
        return bool(self._ended.get(_group(key), 0) >> key.sample & 1)

    def __len__(self) -> int:
        """Rollouts that have ended."""
        return self._count

    def end(self, key: RolloutKey) -> None:
        """Count a rollout as ended; one that has changes nothing."""
        if key not in self:
            self._count += 1
            group = _group(key)
            self._ended[group] = self._ended.get(group, 0) | 1 << key.sample

    def reopen(self, key: RolloutKey) -> None:
        """Count a rollout as one that has not ended."""
        if key in self:
            self._count -= 1
            self._ended[_group(key)] ^= 1 << key.sample

    def has_attempt(self, attempt_id: str) -> bool:
        """Whether the attempt is recorded."""
        return _hash(attempt_id) in self._attempts

    def add_attempt(self, attempt_id: str) -> None:
        """Count an attempt as recorded."""
        self._attempts.add(_hash(attempt_id))

    def drop_attempt(self, attempt_id: str) -> None:
        """Count an attempt as not recorded."""
        self._attempts.discard(_hash(attempt_id))


def _group(key: RolloutKey) -> tuple[str, str, str, int]:
    return intern(key.job), intern(key.agent), intern(key.task), key.draw


def _hash(attempt_id: str) -> int:
    return int.from_bytes(blake2b(attempt_id.encode("utf-8", "replace"), digest_size=8).digest())
