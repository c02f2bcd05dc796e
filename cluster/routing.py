"""Which replica a session's turns go to: a pure state machine, without Ray and without a clock of its own.

- A session stays with its replica, for the prefix cache, as long as that one takes turns.
- A new session goes to the least loaded replica: by KV use in steps of `KV_STEP`, then by requests on it and sessions
  placed there since it was last measured, then by sessions.
- A replica that is being updated keeps its sessions and gets new ones only where there is no other; one that drains
  or is lost keeps none.
- Who says that a life of a replica's engine is over is believed for `DOUBT_SEC`: reports that were under way when it
  ended must not bring it back, and a client that was wrong must not lose it for ever.
- A client that is not heard of for `CLIENT_SEC` is gone, and its sessions with it.

Times are seconds of any clock that runs evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KV_STEP = 0.1
"""Smaller differences of KV use come and go with every answer."""

DOUBT_SEC = 10.0
CLIENT_SEC = 120.0


@dataclass(frozen=True)
class Report:
    """What a replica says of itself. `life` names one life of its engine, "" where there is none. `serves`: it takes
    turns; `open`: new sessions too."""

    life: str = ""
    serves: bool = False
    open: bool = False
    kv_use: float = 0.0
    requests: int = 0


@dataclass(eq=False)
class _Replica:
    report: Report = Report()
    placed: int = 0
    sessions: set[str] = field(default_factory=set)


class Routing:
    """Sessions and replicas. Replicas are named by number."""

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._replica_of: dict[str, int] = {}
        self._sessions_of: dict[str, set[str]] = {}
        self._client_of: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        self._doubted: dict[str, float] = {}

    def report(self, reports: Mapping[int, Report]) -> None:
        """What all replicas are like now; those that are not in it are gone."""
        for number in self._replicas.keys() - reports.keys():
            for session in list(self._replicas[number].sessions):
                self._take_off(session)
            del self._replicas[number]
        for number, report in reports.items():
            replica = self._replicas.setdefault(number, _Replica())
            replica.report, replica.placed = report, 0

    def doubt(self, life: str, now: float) -> None:
        """Somebody's turn ended with this life."""
        self._doubted = {other: until for other, until in self._doubted.items() if until > now}
        if life:
            self._doubted[life] = now + DOUBT_SEC

    def place(self, client: str, session: str, now: float) -> int | None:
        """The replica of the session's next turn; None where there is none now."""
        self.seen(client, now)
        number = self._replica_of.get(session)
        if number is not None and self._serves(number, now):
            return number
        self._take_off(session)
        serving = [number for number in self._replicas if self._serves(number, now)]
        if not serving:
            return None
        opened = [number for number in serving if self._replicas[number].report.open]
        best = min(opened or serving, key=self._load)
        self._replicas[best].placed += 1
        self._put_on(client, session, best)
        return best

    def ended(self, sessions: Iterable[str]) -> None:
        """These sessions are over."""
        for session in sessions:
            self._take_off(session)
            client = self._client_of.pop(session, None)
            if client is not None:
                self._sessions_of[client].discard(session)

    def knows(self, client: str) -> bool:
        """False where this client's sessions are not counted: it must say which it has (`adopt`)."""
        return client in self._seen

    def adopt(self, client: str, sessions: Mapping[str, int], now: float) -> None:
        """The sessions that a client has, and where: what a router that began anew cannot know."""
        self.seen(client, now)
        for session, number in sessions.items():
            if number in self._replicas and session not in self._replica_of:
                self._put_on(client, session, number)

    def seen(self, client: str, now: float) -> None:
        """A client is there. Those that have not been for long are forgotten."""
        self._seen[client] = now
        for other, at in list(self._seen.items()):
            if now - at > CLIENT_SEC:
                self.ended(list(self._sessions_of.get(other, ())))
                self._sessions_of.pop(other, None)
                del self._seen[other]

    def sessions(self, number: int) -> int:
        """Sessions that a replica has."""
        return len(self._replicas[number].sessions) if number in self._replicas else 0

    def _serves(self, number: int, now: float) -> bool:
        replica = self._replicas.get(number)
        if replica is None or not replica.report.serves:
            return False
        return now >= self._doubted.get(replica.report.life, now)

    def _load(self, number: int) -> tuple[int, int, int, int]:
        replica = self._replicas[number]
        report = replica.report
        return (
            int(report.kv_use / KV_STEP),
            report.requests + replica.placed,
            len(replica.sessions),
            number,
        )

    def _put_on(self, client: str, session: str, number: int) -> None:
        self._replica_of[session] = number
        self._replicas[number].sessions.add(session)
        self._client_of[session] = client
        self._sessions_of.setdefault(client, set()).add(session)

    def _take_off(self, session: str) -> None:
        number = self._replica_of.pop(session, None)
        if number is not None:
            self._replicas[number].sessions.discard(session)
