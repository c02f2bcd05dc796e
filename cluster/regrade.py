"""`rollcage regrade`: a run's verifiers again, with the tests as they are now, on the states that its job kept.

The new run has the same rollouts with the new reward, outcome and error class (`extra["regraded_from"]` has the old
ones). A rollout whose state is not on this engine is carried over as it was (`extra["not_regraded"]` says why), so that
groups stay whole. The run itself is never written to. No Ray is needed: states lie on one engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rollcage.cluster.config import JobConfig
from rollcage.cluster.decisions import Assignment, RolloutKey
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.host import SandboxHost
from rollcage.cluster.interrupts import Interrupts
from rollcage.cluster.job import forget_unbegun, new_run_directory
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import host_spec
from rollcage.cluster.recorded_run import (
    KEY,
    RecordedRun,
    Selection,
    called,
    changed_tasks,
    check_output,
    open_run,
    plan_again,
    select,
    shortened,
)
from rollcage.cluster.regraded import Regraded
from rollcage.cluster.verdicts import verdict_of
from rollcage.rollout.arrow import RunError
from rollcage.rollout.kept_states import PASSED
from rollcage.rollout.outcome import Outcome, RolloutError
from rollcage.rollout.rows import attempt_from_row
from rollcage.rollout.sandbox.states import SavedState, environment_digest
from rollcage.rollout.trajectory import Attempt

NO_VERIFIER = "it ended before its verifier began"

_COLUMNS = ("attempt_id", "outcome", "extra")

TRIES = 2
"""A verifier that fails is asked once more, as in a job."""


@dataclass(frozen=True)
class RegradeOptions:
    """What the command line says. `task`: a name or a pattern. `docker_host`, `concurrency` None: the run's."""

    run: Path | str
    task: str | None = None
    output: Path | None = None
    changed_environment: bool = False
    docker_host: str | None = None
    concurrency: int | None = None


def regrade(options: RegradeOptions, console: Console) -> Regraded:
    """Regrade what is selected into a new run.

    Raises `InputError` where the run has no states, or its tasks are gone or have another environment; `CouldNotRun`
    where the engine cannot be had, or the new run cannot be written; and `KeyboardInterrupt` where a signal ended it:
    what was graded is written.
    """
    run = open_run(options.run)
    check_output(run, options.output)
    rows = select(run, Selection(task=options.task), list(run.rows(_COLUMNS)))
    saved = {row["task"] for row in rows if _images(row)}
    if not saved:
        reasons = Counter(
            reason for row in rows for reason in set((_state(row).get("missing") or {}).values())
        )
        said = shortened([f"{count} because {reason}" for reason, count in reasons.items()], "; ")
        remedy = "jobs keep them with sandbox.keep_states: all, or failed"
        raise InputError(f"{run.path}: no rollout that is meant has a saved state: {said or remedy}")
    config = _config(run, options.docker_host)
    plan = replace(
        plan_again(run, config, sorted(saved)), concurrency=options.concurrency or config.concurrency
    )
    try:
        output = options.output or new_run_directory(Path("runs"), f"{config.name}-regraded")
        job = {
            **run.job,
            "tasks": [_task(run, plan, name) for name in dict.fromkeys(row["task"] for row in rows)],
            "regraded_from": {"run": str(run.path), "job": run.job.get("job")},
        }
        ledger = Ledger.create(output, job)
    except (RunError, OSError) as error:
        raise InputError(f"the run directory cannot be made: {error}") from error
    result = Regraded(Path(os.path.abspath(output)), changed_tasks(run, plan))
    work = _Regrade(run, plan, ledger, result, rows)
    host = SandboxHost(host_spec(config, plan, {}))
    try:
        asyncio.run(work.run(host, console, changed_environment=options.changed_environment))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except RolloutError as error:
        raise CouldNotRun.because(error) from error
    except (OSError, RunError) as error:
        raise CouldNotRun(f"{ledger.location} cannot be written: {error}") from error
    finally:
        forget_unbegun(ledger.location)
        ledger.close()
    return result


def _config(run: RecordedRun, docker_host: str | None) -> JobConfig:
    """The run's job without what only its agents need: prompts, and the variables of solutions, may be gone."""
    changes: dict[str, Any] = {"keep_states": "none", "warm": 0}
    if docker_host is not None:
        changes["docker_host"] = docker_host
    idle = [
        agent.model_copy(update={"name": "nop", "label": agent.called, "options": {}, "policy": None})
        for agent in run.config.agents
    ]
    sandbox = run.config.sandbox.model_copy(update=changes)
    return run.config.model_copy(update={"sandbox": sandbox, "agents": idle})


class _Regrade:
    """One command under way. `rows` are the rollouts that are meant, without their content."""

    def __init__(
        self,
        run: RecordedRun,
        plan: JobPlan,
        ledger: Ledger,
        result: Regraded,
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        self._run = run
        self._plan = plan
        self._ledger = ledger
        self._result = result
        self._rows = rows
        self._meant = {tuple(row[name] for name in KEY) for row in rows}
        self._left = Counter((row["agent"], row["task"], row["draw"]) for row in rows)
        self._images: frozenset[str] = frozenset()

    async def run(self, host: SandboxHost, console: Console, *, changed_environment: bool) -> None:
        """Raises `InputError` before anything is graded, `SandboxError` where there is no engine, and what the ledger
        raises."""

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        started = time.monotonic()
        with Interrupts(say):
            await host.open()
            try:
                states = {state.reference: state for state in await host.saved_states()}
                self._images = frozenset(states)
                if not changed_environment:
                    await asyncio.to_thread(self._check_environments, states)
                for task in self._plan.tasks.values():
                    prepared = await host.prepare(task)
                    if prepared.error_class is not None:
                        said = prepared.evidence.message if prepared.evidence else ""
                        raise InputError(f"{task.name} cannot be made ready: {prepared.error_class}: {said}")
                say(f"grading {len(self._meant)} rollouts, {self._plan.concurrency} at once")
                await self._grade_all(host)
                job = self._run.job.get("job")
                await self._ledger.finish({"job": job, "wall_seconds": time.monotonic() - started})
            finally:
                await host.close()

    def _check_environments(self, states: Mapping[str, SavedState]) -> None:
        """Raise `InputError` for tasks whose states were saved of another environment than they have now."""
        now = {key.name: environment_digest(task.environment) for key, task in self._plan.tasks.items()}
        changed = {
            row["task"]
            for row in self._rows
            for name in _images(row).values()
            if name in states and states[name].environment != now[row["task"]]
        }
        if changed:
            raise InputError(
                "these tasks have another environment than the states were saved in, so that agents would meet another "
                "one now; --changed-environment grades the states all the same:\n  "
                + shortened(sorted(changed))
            )

    async def _grade_all(self, host: SandboxHost) -> None:
        """Raises what the first that failed has raised: it ends the others."""
        try:
            await self._grade_each(host)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _grade_each(self, host: SandboxHost) -> None:
        slots = asyncio.Semaphore(self._plan.concurrency)
        async with asyncio.TaskGroup() as group:
            for batch in self._run.batches():
                for index in range(batch.num_rows):
                    key = tuple(batch[name][index].as_py() for name in KEY)
                    if key in self._meant:
                        await slots.acquire()
                        row = (await asyncio.to_thread(batch.slice(index, 1).to_pylist))[0]
                        group.create_task(self._one(host, row)).add_done_callback(lambda _: slots.release())

    async def _one(self, host: SandboxHost, row: Mapping[str, Any]) -> None:
        old = attempt_from_row(row)
        new, why, lost = await self._graded(host, old)
        result = self._result
        if new is None:
            new = replace(old, extra={**old.extra, "not_regraded": why})
            (result.missing if lost else result.carried_over)[f"{called(row)} by {old.agent}"] = why
        else:
            new.extra.pop("not_regraded", None)  # of an earlier one
            result.regraded += 1
            result.then[old.outcome.value] += 1
            result.now[new.outcome.value] += 1
        result.rollouts += 1
        if verdict_of(new) != verdict_of(old):
            change = {
                "rollout": called(row),
                "agent": old.agent,
                "then": verdict_of(old),
                "now": verdict_of(new),
            }
            result.changed.append(change)
        if new.attempt_id:
            await self._ledger.record_attempt(new)
        await self._ledger.record_rollout(new, row["attempts"], row["group_size"])
        group = (old.agent, old.task, old.draw)
        self._left[group] -= 1
        if not self._left[group]:
            await self._ledger.commit_group(*group)

    async def _graded(self, host: SandboxHost, old: Attempt) -> tuple[Attempt | None, str, bool]:
        """The attempt with its new verdict, or why there is none, and whether something is lost by that."""
        state = old.extra.get("state")
        if state is None:
            return None, NO_VERIFIER, False
        missing = sorted(set(state["missing"].values()))
        if missing or not state["images"]:
            return None, "; ".join(missing) or NO_VERIFIER, bool(missing) and missing != [PASSED]
        if gone := sorted(set(state["images"].values()) - self._images):
            return None, f"the engine here does not have it: kept on {old.host}, or removed", bool(gone)
        key = next(key for key in self._plan.tasks if key.name == old.task)
        for _ in range(TRIES):
            name = f"regrade-{uuid.uuid4().hex[:12]}"
            rollout = RolloutKey(self._plan.job, old.agent, *key, old.sample, old.draw)
            spec = self._plan.attempt(Assignment(rollout, old.number, host.name, name))
            new = await host.regrade(old, spec, state["images"])
            if new is None:
                return None, "it was removed meanwhile", True
            if new.outcome is Outcome.CANCELLED:
                raise asyncio.CancelledError
            if new.reward_valid:
                break
        return new, "", False


def _task(run: RecordedRun, plan: JobPlan, name: str) -> dict[str, str]:
    digest = next((key.digest for key in plan.tasks if key.name == name), run.tasks[name].digest)
    return {"task": name, "digest": digest, "path": run.tasks[name].path}


def _images(row: Mapping[str, Any]) -> dict[str, str]:
    """Names of a rollout's states, by step."""
    found: dict[str, str] = _state(row).get("images") or {}
    return found


def _state(row: Mapping[str, Any]) -> dict[str, Any]:
    """See `kept_states.py`."""
    found: dict[str, Any] = json.loads(row["extra"]).get("state") or {}
    return found
