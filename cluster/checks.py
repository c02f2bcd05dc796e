"""What the commands beside `run` do: check and import tasks, collect garbage. Results are plain values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.scratch import remove_abandoned
from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.task import Environment, Problem, Task, check_task, find_tasks, near_misses

MOST_NAMED = 20
"""Jobs that one message lists."""


def locate_tasks(paths: Sequence[str], base: Path | None = None) -> list[Path]:
    """Directories of tasks below these paths and globs. Raises `InputError` that names what has none."""
    try:
        return find_tasks(paths, base or Path.cwd())
    except ValueError as error:
        raise InputError(str(error)) from error


def check_tasks(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Every task below `paths`: its name, digest and problems; and warnings, which are no problems."""
    checked = []
    for path in locate_tasks(paths):
        task, problems = check_task(path)
        problems = [*problems, *_image_problems(path, task)]
        checked.append(
            {
                "path": str(path),
                "task": task.name if task else path.name,
                "digest": task.digest if task else None,
                "problems": [asdict(problem) for problem in problems],
                "warnings": [asdict(warning) for warning in (*near_misses(path), *_shut(path, task))],
            }
        )
    return checked


def _image_problems(path: Path, task: Task | None) -> list[Problem]:
    """What is wrong with the Dockerfiles of a task and of its verifiers; of a task that cannot be read, with the one
    in `environment/`. Those of a compose file's services are looked at when they are built."""
    from rollcage.rollout.sandbox.lint import dockerfile_problems

    environments = [Environment(path / "environment")]
    if task is not None:
        own = [step.verifier.environment for step in task.steps]
        environments = [task.environment, *(one for one in own if one is not None)]
    found: list[Problem] = []
    for one in environments:
        if one.context is not None and one.compose is None:
            try:
                found += dockerfile_problems(one.context, one.dockerfile, one.target)
            except OSError as error:
                said = f"cannot be read: {error.strerror}"
                found.append(Problem(str(error.filename or one.context), None, said, "make it readable"))
            except RecursionError:
                file = str(one.context / one.dockerfile)
                found.append(Problem(file, None, "is nested too deep", "is it the right file?"))
    return list(dict.fromkeys(found))


def _shut(path: Path, task: Task | None) -> list[Problem]:
    """Entries of a task's allowlists of which private ranges stay shut."""
    from rollcage.rollout.sandbox.egress import not_internet

    if task is None:
        return []
    policies: list[Any] = [task.environment, *(step.verifier for step in task.steps)]
    policies += [one.environment for one in policies[1:] if one.environment is not None]
    entries = {host for one in policies for host in one.allowed_hosts or ()}
    return [
        Problem(
            str(path / "task.toml"),
            None,
            f"allowed_hosts has {network}, and {', '.join(ranges)} is not the internet: what overlaps stays shut",
            "write what is needed of the internet; a job opens private ranges with sandbox.network.allow_private",
        )
        for network, ranges in not_internet(sorted(entries)).items()
    ]


def import_tasks(source: Path, target: Path, *, overwrite: bool) -> list[dict[str, Any]]:
    """Import one Terminal-Bench task, or each one in a directory of them, into `target/<name>`. One that cannot be
    imported (`written` is false) does not stop the others."""
    from rollcage.rollout.terminal_bench import ImportReport, import_terminal_bench

    if not source.is_dir():
        raise InputError(f"{source} is not a directory: give a Terminal-Bench task, or a directory of them")
    sources = (
        [source] if (source / "task.yaml").is_file() else sorted(p.parent for p in source.glob("*/task.yaml"))
    )
    if not sources:
        raise InputError(f"{source} holds no Terminal-Bench task: none has a task.yaml")
    reports = []
    for one in sources:
        # Resolved, so that the one task `.` has a name.
        to = target / one.resolve().name
        try:
            report = import_terminal_bench(one, to, overwrite=overwrite)
        except FileExistsError:
            remedy = "name another directory, or pass --overwrite, which replaces a task"
            report = ImportReport(one, to, False, (Problem(str(to), None, "exists already", remedy),))
        except OSError as error:
            said = Problem(str(error.filename or one), None, f"{error.strerror}", "mend this")
            report = ImportReport(one, to, False, (said,))
        reports.append(
            {
                "source": str(one),
                "target": str(to),
                "written": report.written,
                "problems": [asdict(problem) for problem in report.problems],
                "notes": list(report.notes),
            }
        )
    return reports


def _no_such_job(job: str, living: set[str], saved: Counter[str]) -> str:
    """`living` have sandboxes, `saved` have so many states."""
    if saved[job]:
        return f"the job {job!r} has no sandbox on this engine, but {saved[job]} saved state(s): --states removes them"
    there = sorted(living | {name for name, count in saved.items() if name and count})
    known = ", ".join(there[:MOST_NAMED]) + (", ..." if len(there) > MOST_NAMED else "") if there else "none"
    return f"there is no job {job!r} on this engine (`job` in job.json is a job's name); there are: {known}"


async def clean_up_after(hosts: Iterable[str], docker_host: str | None) -> None:
    """Remove what these hosts left on this machine and on the engine at `docker_host`. Raises `CouldNotRun`."""
    remove_abandoned()
    from rollcage.rollout.sandbox.engine import Engine
    from rollcage.rollout.sandbox.reaper import reap

    try:
        engine = Engine(docker_host)
        try:
            for host in hosts:
                await reap(engine, host=host, job=None, now=time.time())
        finally:
            engine.close()
    except SandboxError as error:
        raise CouldNotRun.because(error) from error


async def collect_garbage(
    docker_host: str | None, *, job: str | None, everything: bool, images: bool, states: bool = False
) -> dict[str, int]:
    """Remove what is past its deadline, and all of hosts whose process on this machine is dead; or all of a job's,
    or all of ours. With `states`, saved states too: the job's, or all. Counts by kind; beside them `stuck_networks`,
    what the engine would not remove, and `states_left` and `states_left_bytes`, all that are there then.

    Raises `CouldNotRun`, and `InputError` that names the jobs which have something there for one that has not.
    """
    from rollcage.rollout.sandbox.engine import Engine
    from rollcage.rollout.sandbox.reaper import hosts_of, jobs_on, reap, reap_dead, stuck_networks
    from rollcage.rollout.sandbox.states import list_states, remove_states

    now = float("inf") if everything else time.time()
    counts: Counter[str] = Counter(containers=0, networks=0, images=0)
    remove_abandoned()
    try:
        engine = Engine(docker_host)
        try:
            hosts: set[str] = await hosts_of(engine, job) if job else set()
            if job and not hosts:
                saved = Counter(state.job for state in await list_states(engine))
                if not (states and saved[job]):
                    raise InputError(_no_such_job(job, await jobs_on(engine), saved))
            if states:
                counts["states"] += await remove_states(engine, job=job)
            for host in hosts:
                counts.update(asdict(await reap(engine, host=host, job=None, now=now)))
            if not job:
                counts.update(asdict(await reap_dead(engine, now=now)))
            counts.update(asdict(await reap(engine, host=None, job=None, now=now, images=images)))
            left = await list_states(engine)
        finally:
            engine.close()
    except SandboxError as error:
        raise CouldNotRun.because(error) from error
    return {
        **counts,
        "stuck_networks": stuck_networks(),
        "states_left": len(left),
        "states_left_bytes": sum(state.size for state in left),
    }
