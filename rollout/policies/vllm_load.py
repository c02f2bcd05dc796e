"""What a vLLM engine says of its load, kept as it says it with every step: asking for it costs nothing.

`LoadRecorder` is given to vLLM as a stat logger. It has the methods of vLLM's `StatLoggerBase`, and no more of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineLoad:
    """One engine's load. Counters count from its start (a restart for new weights is one).

    `kv_use`: the share of the KV cache in use, 0 to 1. `running`, `waiting`: requests in the engine's batch and in its
    queue, as of its last step. `unfinished`: requests that it has been given and that have not ended, as of now.
    `prefix_query_tokens`: tokens of prompts looked up in the prefix cache, `prefix_hit_tokens`: those found.
    """

    kv_use: float
    running: int
    waiting: int
    unfinished: int
    version: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    preemptions: int


class LoadRecorder:
    """Keeps the last word of each of the engine's schedulers (several with data parallelism)."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}
        self._queries = 0
        self._hits = 0
        self._preemptions = 0
        self._tokens = 0
        self._moved = asyncio.Event()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """vLLM's word after a step; either part may be missing."""
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats
            self._queries += scheduler_stats.prefix_cache_stats.queries
            self._hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            if iteration_stats.num_generation_tokens:
                self._tokens += iteration_stats.num_generation_tokens
                self._moved.set()

    def log_engine_initialized(self) -> None:
        """Of `StatLoggerBase`."""

    def log(self) -> None:
        """Likewise."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Likewise."""

    def record_admission_rejection(self, reason: str) -> None:
        """Likewise."""

    async def progress(self) -> None:
        """Return once the engine has generated a token, of whatever request, behind those that were recorded."""
        before = self._tokens
        while self._tokens == before:
            self._moved.clear()
            await self._moved.wait()

    def load(self, *, unfinished: int, version: int) -> EngineLoad:
        """As of the last step. The engine says nothing when it has nothing to do, so that its last word may be of
        requests that were aborted since: without unfinished requests nothing runs and nothing waits."""
        last = self._last.values() if unfinished else ()
        return EngineLoad(
            kv_use=max((stats.kv_cache_usage for stats in last), default=0.0),
            running=sum(stats.num_running_reqs for stats in last),
            waiting=sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in last),
            unfinished=unfinished,
            version=version,
            prefix_query_tokens=self._queries,
            prefix_hit_tokens=self._hits,
            generated_tokens=self._tokens,
            preemptions=self._preemptions,
        )
