"""Asking a job that runs: who may, what is refused, and what becomes of it when the job or the asker goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import GATE
from local_ray import local_ray
from serving import Serving, serving, until

from rollcage.cluster.cli_policy import how_told
from rollcage.cluster.control import (
    only_running_job,
    policy_status,
    policy_status_async,
    running_jobs,
    update_policy,
    update_policy_async,
)
from rollcage.cluster.control_requests import control_folder, job_control
from rollcage.cluster.errors import CouldNotRun, InputError

pytestmark = [pytest.mark.timeout(120)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"


class Fixed:
    """A policy that takes any weights once `gate` is open."""

    def __init__(self) -> None:
        self.version, self.path = 3, None
        self.gate = asyncio.Event()
        self.gate.set()

    async def update(self, path: str, version: int) -> dict[int, str]:
        if version < self.version:
            raise ValueError(f"the weights are of version {self.version} already, {version} is older")
        await self.gate.wait()
        how = "same" if version == self.version else "reload"
        if how == "reload":
            self.version, self.path = version, path
        if path.endswith("bug"):
            raise ZeroDivisionError("a bug of ours")
        return {1: how}

    def status(self) -> list[dict[str, Any]]:
        return [{"replica": 1, "state": "ready", "version": self.version}]


@asynccontextmanager
async def job(run: Path, policies: Mapping[str, Any], said: list[str]) -> AsyncIterator[Path]:
    """What a job does for those who ask it."""
    (weights(run, ".") / "job.json").write_text("{}")
    async with job_control(run, said.append) as control, control.serving(policies):
        yield run / "control"


def weights(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    return folder / name


async def test_a_trainer_updates_a_policy_and_asks_how_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    policy, run = Fixed(), tmp_path / "runs/a"
    async with job(run, {"p": policy}, said) as folder:
        assert only_running_job(tmp_path / "runs") == run
        policy.gate.clear()
        seen: list[Any] = []
        updating = asyncio.create_task(
            update_policy_async(run, weights(tmp_path, "new"), 4, on_progress=lambda now: seen.append(now))
        )
        await until(lambda: bool(seen))
        assert (await policy_status_async(run))["p"].version == 3, (
            "status is told while an update is under way"
        )
        policy.gate.set()
        done = await updating
        assert (done.policy, done.version, done.replicas, done.failed) == ("p", 4, {1: "reload"}, False)
        [status] = (await asyncio.to_thread(policy_status, run)).values()
        assert (status.version, status.path) == (4, str(tmp_path / "new"))
        again = await asyncio.to_thread(update_policy, run, tmp_path / "new", 4)
        assert again.replicas == {1: "same"}
        assert sorted(os.listdir(folder)) == ["alive"], "nothing of those who asked is left"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "alive").stat().st_mode & 0o777 == 0o600
    assert not (run / "control").exists()
    assert [line for line in said if "version 4 from" in line and "replica 1 reload" in line]


async def test_what_a_job_refuses_is_said_and_changes_nothing(tmp_path: Path) -> None:
    policy, run = Fixed(), tmp_path / "run"
    async with job(run, {"p": policy, "q": Fixed()}, []):
        new = weights(tmp_path, "new")
        for arguments, words in [
            ((tmp_path / "none", 4), "there is no such directory of weights"),
            ((new, 2), "the weights are of version 3 already, 2 is older"),
            ((new, -1), "version: Input should be greater than or equal to 0"),
        ]:
            with pytest.raises(InputError, match=words):
                await update_policy_async(run, *arguments, policy="p")
        with pytest.raises(InputError, match="several policies, say which: p, q"):
            await update_policy_async(run, new, 4)
        with pytest.raises(InputError, match="no policy 'r', but p, q"):
            await policy_status_async(run, policy="r")
        assert policy.version == 3
        await update_policy_async(run, new, 4, policy="p")
        with pytest.raises(
            InputError, match=r"version 4 of policy p is what was at .*new: other weights need a higher"
        ):
            await update_policy_async(run, weights(tmp_path, "other"), 4, policy="p")
    async with job(run, {}, []):
        assert await policy_status_async(run) == {}
        with pytest.raises(InputError, match="serves no policy with vLLM"):
            await update_policy_async(run, new, 4)


async def test_whatever_lies_in_the_folder_is_answered_and_the_job_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    run = tmp_path / "run"
    async with job(run, {"p": Fixed()}, said) as folder:
        (folder / "a.request.json").write_text("{")
        (folder / "b.request.json").write_text('{"do": "format"}')
        (folder / "c.request.json").write_text('{"do": "update", "path": 4, "version": "5"}')
        (folder / "d.request.json").write_text("x" * 100_000)
        (folder / "e.request.json").symlink_to("/etc/passwd")
        os.mkfifo(folder / "f.request.json")
        (folder / "g.request.json").mkdir()
        (folder / "h.request.json").write_bytes(b"\xff\xfe")
        foreign = folder / "i.request.json.tmp"
        foreign.write_text('{"do": "status"}')
        os.chown(foreign, 12345, 12345)
        foreign.rename(folder / "i.request.json")
        (folder / "note").write_text("is no request")
        (folder / "j.answer.json").mkdir()
        (folder / "j.request.json").write_text('{"do": "status"}')
        answers = {name: folder / f"{name}.answer.json" for name in "abcdefghi"}
        await until(lambda: all(file.exists() for file in answers.values()) and bool(said))
        told = {name: json.loads(file.read_text()) for name, file in answers.items()}
        assert {answer["state"] for answer in told.values()} == {"refused"}
        assert "path: Input should be a valid string" in told["c"]["error"]
        assert "another user's file" in told["i"]["error"]
        with pytest.raises(CouldNotRun, match="ZeroDivisionError"):
            await update_policy_async(run, weights(tmp_path, "bug"), 4)
        assert (await policy_status_async(run))["p"].version == 4
        assert [line for line in said if "could not be answered" in line], said
    assert not (run / "control").exists()


async def test_a_request_that_comes_too_late_or_is_taken_back_is_not_carried_out(tmp_path: Path) -> None:
    policy, run, new = Fixed(), tmp_path / "run", weights(tmp_path, "new")
    folder = weights(run, "control")
    (run / "job.json").write_text("{}")
    async with job_control(run, print, {"p": 3}) as control:
        [status] = (await policy_status_async(run)).values()
        assert (status.policy, status.version, status.starting) == ("p", 3, True)
        with pytest.raises(InputError, match="no policy 'q', but p"):
            await policy_status_async(run, policy="q")
        done = await asyncio.to_thread(
            subprocess.run, [ROLLCAGE, "policy", "status", "--run", run], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "policy p: starting\n"), "that is no error"
        with pytest.raises(CouldNotRun, match="had not begun, and will not"):
            await update_policy_async(run, new, 4, timeout_sec=0.5)
        gone = asyncio.create_task(update_policy_async(run, new, 4))
        await until(lambda: any(name.endswith(".request.json") for name in os.listdir(folder)))
        gone.cancel()
        await asyncio.wait([gone])
        assert os.listdir(folder) == ["alive"]
        waits = asyncio.create_task(update_policy_async(run, new, 4))
        async with control.serving({"p": policy}):
            assert (await waits).replicas == {1: "reload"}
            policy.gate.clear()
            with pytest.raises(CouldNotRun, match=r"goes on with it: .*policy status"):
                await update_policy_async(run, new, 5, timeout_sec=0.5)
            policy.gate.set()
            await until(lambda: policy.version == 5)
            assert os.listdir(folder) == ["alive"], "nobody waits for this answer"
            policy.gate.clear()
            cut_off = asyncio.create_task(update_policy_async(run, new, 6))
            await until(lambda: any(name.endswith(".answer.json") for name in os.listdir(folder)))
        with pytest.raises(CouldNotRun, match="the job ended before it was done"):
            await cut_off
        late = asyncio.create_task(update_policy_async(run, new, 6))
        await until(lambda: any(name.endswith(".request.json") for name in os.listdir(folder)))
    with pytest.raises(CouldNotRun, match="ended before it had answered"):
        await late


def test_a_job_that_does_not_run_is_told_at_once(tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        done = subprocess.run([ROLLCAGE, "policy", *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        return " ".join(done.stderr.split())

    weighs = ("--path", weights(tmp_path, "new"), "--version", "1")
    assert "no job runs below runs/: name the run directory with --run" in refused("update", *weighs)
    run = weights(tmp_path, "runs/a")
    for file, words in [
        (None, "is no run directory: it has no job.json"),
        ("job.json", "it was ended without having finished"),
        ("summary.json", "has ended"),
    ]:
        if file is not None:
            (run / file).write_text("{}")
        with pytest.raises(InputError, match=words):
            update_policy(run, tmp_path / "new", 1)
    with pytest.raises(InputError, match="there is no run directory"):
        policy_status(tmp_path / "elsewhere")

    script = (
        "import sys, time; from pathlib import Path; from rollcage.cluster.control_requests import control_folder\n"
        "with control_folder(Path(sys.argv[1]), print): print('here', flush=True); time.sleep(600)"
    )
    jobs = []
    for name in ("a", "b"):
        weights(tmp_path, f"runs/{name}")
        (tmp_path / f"runs/{name}/summary.json").unlink(missing_ok=True)
        (tmp_path / f"runs/{name}/job.json").write_text("{}")
        command = [sys.executable, "-c", script, tmp_path / f"runs/{name}"]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert jobs[-1].stdout is not None
        assert jobs[-1].stdout.readline() == "here\n"
    assert "2 jobs run below runs/, name one of them: --run runs/a --run runs/b" in refused("status")

    def kill(progress: Any) -> None:
        jobs[0].kill()
        jobs[0].wait()

    async def killed() -> None:
        asking = asyncio.create_task(update_policy_async(tmp_path / "runs/a", tmp_path / "new", 1))
        await until(lambda: any((tmp_path / "runs/a/control").glob("*.request.json")))
        kill(None)
        with pytest.raises(CouldNotRun, match="ended before it had answered"):
            await asking

    asyncio.run(killed())
    assert running_jobs(tmp_path / "runs") == [tmp_path / "runs/b"]
    with pytest.raises(InputError, match="ended without having finished"):
        update_policy(tmp_path / "runs/a", tmp_path / "new", 1)
    with control_folder(tmp_path / "runs/a", print) as folder:
        assert folder is not None
        assert os.listdir(folder) == ["alive"], "the next job of the directory begins with an empty folder"
    jobs[1].kill()
    jobs[1].wait()


def test_a_restart_says_why() -> None:
    assert (
        how_told("restart: it has another shape")
        == "started its engine anew with them (restart): it has another shape"
    )
    assert how_told("restart") == "started its engine anew with them (restart)"
    assert how_told("failed: it hangs: for ever") == "failed: it hangs: for ever"


def test_a_job_goes_on_where_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("a file in its place")
    said: list[str] = []
    with control_folder(tmp_path, said.append) as folder:
        assert folder is None
    assert "weights cannot be replaced in this job" in said[0]
    assert (tmp_path / "control").read_text() == "a file in its place"


# On replicas (fake engines, real actors)


@asynccontextmanager
async def served(tmp_path: Path, said: list[str], **settings: Any) -> AsyncIterator[tuple[Serving, Path]]:
    with local_ray():
        async with (
            serving(weights(tmp_path, "model"), **settings) as p,
            job(tmp_path / "run", {"p": p.served}, said),
        ):
            yield p, tmp_path / "run"


@pytest.mark.ray
async def test_updates_of_replicas_that_are_replaced_follow_each_other_and_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    async with served(tmp_path, said) as (p, run):
        assert await p.engine.current_version() == 0
        for name in ("nothing", *map(str, range(1, 9))):
            weights(tmp_path, name)
        with pytest.raises(InputError, match="holds no weights"):
            await update_policy_async(run, tmp_path / "nothing", 1)
        assert {(await p.turn(f"s{i}")).version for i in range(4)} == {0}, (
            "the job goes on with the old weights"
        )
        assert await p.engine.current_version() == 0

        # Two at once: in their order, and the older of two is refused where it comes second.
        both = await asyncio.gather(
            update_policy_async(run, tmp_path / "1", 1), update_policy_async(run, tmp_path / "2", 2),
            return_exceptions=True,
        )  # fmt: skip
        assert await p.engine.current_version() == 2
        assert [one for one in both if not isinstance(one, Exception)]
        assert all(
            isinstance(one, InputError) and "is older" in str(one)
            for one in both
            if isinstance(one, Exception)
        )
        assert {(await p.turn(f"t{i}")).version for i in range(4)} == {2}

        # While a replica is replaced: its process is killed, and starts again with weights that came meanwhile.
        os.kill(await p.who_is(1), signal.SIGKILL)
        done = await update_policy_async(run, tmp_path / "3", 3)
        assert set(done.replicas) == {1, 2}
        assert done.replicas[2] == "reload"
        assert done.replicas[1] in ("lost", "later", "reload", "restart")
        await p.until_ready()
        assert [one["version"] for one in (await policy_status_async(run))["p"].replicas] == [3, 3]
        assert {(await p.turn(f"u{i}")).version for i in range(4)} == {3}

        # What is current is no newer than what a new session is answered by: else it would be stale at once.
        turn = asyncio.ensure_future(p.turn("held", GATE))
        await until(lambda: len(p.noted("turns")) >= 1 and p.noted("turns")[-1].split()[1] == "held")
        updating = asyncio.create_task(update_policy_async(run, tmp_path / "4", 4))
        await until(lambda: "updating" in {one["state"] for one in p.served.status()})
        assert await p.engine.current_version() <= (await p.turn("new")).version
        (tmp_path / "model/gate").touch()
        assert (await turn).version == 3
        assert (await updating).version == 4
        assert await p.engine.current_version() == 4
    assert not (tmp_path / "run/control").exists()
