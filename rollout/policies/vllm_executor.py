"""The executor of engines with several workers on a CPU: vLLM's own, but its engine core sleeps while they compute.

vLLM's waits for the step in a loop without end, for it takes a millisecond on a GPU. On a CPU it takes a hundred, and
of two cores one is lost to that loop, which sandboxes, Ray and the worker itself want. Loaded by vLLM in the process of
its engine core, by name (`SEVERAL_WORKERS_ON_CPU`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

LOOK_MS = 5
"""A worker's word wakes the sleeper at once. One that is lost, for its sender drops what it cannot send, is found so
much later."""


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]
    """See the module."""

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        for queue in self.response_mqs:
            condition = getattr(queue, "_spin_condition", None)
            if condition is not None:  # None: a worker of another machine, heard over a socket
                _sleep_in(condition)


def _sleep_in(condition: Any) -> None:
    """Have `condition`, a `SpinCondition`, wait for its worker's word from the start."""
    wait = condition.wait
    condition.busy_loop_s = 0.0
    condition.wait = lambda timeout_ms=None: wait(
        timeout_ms=LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS)
    )
