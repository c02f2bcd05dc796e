"""Connections to a server, of one event loop: as many as are needed, up to a bound.

A pool of httpx looks at all of its connections whenever a request begins or ends, so that the cost of 2,000 requests at
once is that of 4,000,000 looks. Here the connections are in small pools, each made when those before it are full.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai

from rollcage.rollout.policies.pulse import Pulse
from rollcage.rollout.policies.retry import Gate

CONNECT_SEC = 30.0

POOL = 100
"""Connections of one pool. Making one takes a tenth of a second: it loads the certificates that are trusted."""

OWN_FILES = 512
"""File descriptors of this process for anything else than connections to the server."""


@dataclass(eq=False)
class _Pool:
    client: openai.AsyncOpenAI
    out: int = 0


class Lines:
    """`gate` lets as many requests out as there may be connections; `pulse`, set by who asks, goes beside them."""

    pulse: Pulse

    def __init__(self, base_url: str, key: str | None, connections: int) -> None:
        self.gate = Gate(files_for(connections))
        self._base_url = base_url
        self._key = key or "none"  # the SDK wants one; it is left out of the headers
        self._pools: list[_Pool] = []

    @contextmanager
    def client(self) -> Iterator[openai.AsyncOpenAI]:
        """A client with a connection to spare, for one request."""
        pool = next((pool for pool in self._pools if pool.out < POOL), None)
        if pool is None:
            pool = _Pool(self._client())
            self._pools.append(pool)
        pool.out += 1
        try:
            yield pool.client
        finally:
            pool.out -= 1

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.client.close()
        self._pools.clear()

    def _client(self) -> openai.AsyncOpenAI:
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=POOL, max_keepalive_connections=POOL)
        return openai.AsyncOpenAI(
            base_url=self._base_url,
            api_key=self._key,
            max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_SEC),
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )


def files_for(connections: int) -> int:
    """As many connections as this process may hold files for, `connections` at most: its soft limit is raised to what
    they need, or to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, max(1, soft - OWN_FILES))
