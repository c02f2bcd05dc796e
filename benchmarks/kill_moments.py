"""kill -9 of a run with 32 live sandboxes, at random moments: what `rollcage gc` leaves of it.

Each moment is a run of oracle rollouts in a process of its own, with and without internet, with anonymous volumes,
and now and then with a build under way. Once all its sandboxes have been seen alive it is killed some seconds later.
Then `rollcage gc` is run, and looked for: containers, networks, volumes and unnamed images on the engine, rules of
iptables, files and processes. Every fifth run is `rollcage run` with its Ray; the others drive one host in their own
process, which is what a Ray actor does.

    python benchmarks/kill_moments.py [--moments 20] [--sandboxes 32] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostSpec, SandboxHost
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxSettings
from rollcage.rollout.sandbox.reaper import BUILD_LABEL, HOST_LABEL
from rollcage.rollout.task import find_tasks, load_task

IMAGE = "debian:bookworm-slim"
TASKS, SAMPLES = 60, 4
"""More than are done before the end; several tasks are under way at a time, of both modes."""

SPARE = 8
"""Rollouts beside those whose sandboxes are alive: they start, end and are removed."""

MARK = "ROLLCAGE_KILL_MOMENT"
"""In the environment of all processes of a run."""

ALIVE_SEC = 300.0
LATEST_SEC = 5.0
"""After all sandboxes were alive."""

ENDING_SEC = 30.0
"""For what Ray had started to find out that its driver is gone."""

MODES = ("no-network", "public")

SOME_TIME = "n=$(date +%N); n=${n#${n%??}}; sleep $((8 + ${n#0} / 8))"
"""8 to 20 seconds."""


def write_task(root: Path, mode: str, steps: str = "") -> Path:
    files = {
        "task.toml": f'[environment]\nnetwork_mode = "{mode}"\nmemory_mb = 64\n',
        "instruction.md": "Write 42 to /app/answer.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nVOLUME /data\nWORKDIR /app\n{steps}",
        "solution/solve.sh": f"#!/bin/sh\n{SOME_TIME}\necho 42 >/app/answer\n",
        "tests/test.sh": "#!/bin/sh\nsleep 0.2\necho 1 >/logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    return root


# The run that is killed


class OneHost:
    """The driver's `Hosts`: one, in this process."""

    def __init__(self, host: SandboxHost) -> None:
        self.host = host

    async def start(self) -> list[Any]:
        await self.host.open()
        return [self.host]

    async def replace(self, lost: Any) -> None:
        return None


async def drive(tasks: Path, run: Path, job: str, sandboxes: int) -> None:
    """Run oracle rollouts without Ray, until killed."""
    found = {
        TaskKey(task.name, task.digest): task for task in map(load_task, find_tasks([str(tasks)], tasks))
    }
    agents = (AgentPlan("oracle", "oracle", samples=SAMPLES),)
    plan = JobPlan(job, agents, found, concurrency=sandboxes)
    settings = SandboxSettings(pids=64, warm=4, network_modes=frozenset(MODES))
    host = SandboxHost(HostSpec(job, settings))
    progress = JobProgress(TASKS * SAMPLES, Console(quiet=True))
    await Driver(plan, Ledger.create(run, {"job": job}), OneHost(host), progress).run()


# What is left of it


class Moment:
    """One run, to be killed. `scratch` is its directory for temporary files."""

    def __init__(self, engine: Engine, scratch: Path, *, with_ray: bool, building: bool) -> None:
        self.api = engine.api
        self.scratch = scratch / "tmp"
        self.scratch.mkdir()
        self.mark = uuid.uuid4().hex
        self.env = {**os.environ, MARK: self.mark, "TMPDIR": str(self.scratch)}
        self.hosts: set[str] = set()
        self.volumes: set[str] = set()
        self.building = building
        tasks = scratch / "tasks"
        for number in range(TASKS):
            write_task(tasks / f"{number:02d}", MODES[number % len(MODES)])
        if building:
            write_task(tasks / "01-slow", "no-network", f"RUN echo {self.mark}; sleep 60\n")
        rollcage = Path(sys.executable).parent / "rollcage"
        self.job = f"kill-{self.mark[:8]}"
        run = scratch / "run"
        self.log = (scratch / "log").open("w+b")
        child = [sys.executable, __file__, "--drive", str(tasks), str(run), self.job]
        config = scratch / "job.yaml"
        config.write_text(
            f"name: {self.job}\ntasks: [{tasks}]\nagents: [{{name: oracle, samples: {SAMPLES}}}]\noutput: {run}\n"
        )
        ray = [str(rollcage), "run", str(config), "--json"]
        self.command = ray if with_ray else child
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, sandboxes: int) -> None:
        size = "--concurrency" if "--json" in self.command else "--sandboxes"
        self.process = subprocess.Popen(
            [*self.command, size, str(sandboxes + SPARE)], env=self.env, stdout=self.log, stderr=self.log
        )

    def alive(self) -> int:
        """How many sandboxes run; notes whose they are."""
        count = 0
        for one in self.api.containers(filters={"label": HOST_LABEL}):
            if one["Labels"].get("rollcage.job", "").startswith(self.job):
                self.hosts.add(one["Labels"][HOST_LABEL])
                self.volumes |= {mount["Name"] for mount in one["Mounts"] if mount["Type"] == "volume"}
                count += 1
        return count

    def steps(self) -> int:
        """How many of its build steps run."""
        built = self.api.containers(filters={"label": BUILD_LABEL})
        return sum(
            one["Labels"][BUILD_LABEL] in self.hosts and HOST_LABEL not in one["Labels"] for one in built
        )

    def kill(self, delay_sec: float) -> tuple[int, int]:
        """Kill it so many seconds after all was alive; how many sandboxes and build steps there were."""
        assert self.process is not None
        time.sleep(delay_sec)
        seen = self.alive(), self.steps()
        self.process.kill()
        self.process.wait()
        return seen

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def collect(self) -> dict[str, int]:
        """What `rollcage gc` says that it removed."""
        psutil.wait_procs(self.processes(), ENDING_SEC)
        rollcage = Path(sys.executable).parent / "rollcage"
        done = subprocess.run(
            [rollcage, "gc", "--json"], env=self.env | {MARK: ""}, capture_output=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"rollcage gc failed: {done.stderr.decode()}")
        return dict(json.loads(done.stdout))

    def left(self) -> Counter[str]:
        """What is left, by kind."""
        labels = self.api.containers(all=True, filters={"label": HOST_LABEL})
        networks = self.api.networks(filters={"label": HOST_LABEL})
        steps = self.api.containers(all=True, filters={"label": BUILD_LABEL})
        images = self.api.images(filters={"label": BUILD_LABEL, "dangling": True})
        volumes = {one["Name"] for one in self.api.volumes().get("Volumes") or []}
        hosts = self.hosts
        return +Counter(
            containers=sum(one["Labels"][HOST_LABEL] in hosts for one in labels),
            networks=sum(one["Labels"][HOST_LABEL] in hosts for one in networks),
            steps=sum(
                one["Labels"][BUILD_LABEL] in hosts and HOST_LABEL not in one["Labels"] for one in steps
            ),
            images=sum(one["Labels"][BUILD_LABEL] in hosts for one in images),
            volumes=len(self.volumes & volumes),
            rules=rules_left(),
            files=len(os.listdir(self.scratch)),
            processes=len(self.processes()),
        )

    def close(self) -> None:
        """End whatever lives, and remove the run's images."""
        for process in self.processes():
            process.kill()
        for host in self.hosts:
            for image in self.api.images(filters={"label": f"{BUILD_LABEL}={host}"}):
                for tag in image["RepoTags"] or ():
                    self.api.remove_image(tag)
        self.log.close()


def rules_left() -> int:
    """Chains of ours for bridges that are gone; all of them where no bridge is left."""
    iptables = firewall.program()
    if iptables is None:
        return 0
    shown = subprocess.run([iptables, "-w", "30", "-S"], capture_output=True, text=True, check=True).stdout
    chains = {line.split()[1] for line in shown.splitlines() if line.startswith("-N ROLLCAGE-")}
    bridges = firewall.interfaces()
    own = f"ROLLCAGE-{firewall.INTERFACE}"
    return sum(
        not bridges or (name.startswith(own) and name.removeprefix("ROLLCAGE-") not in bridges)
        for name in chains
    )


@contextmanager
def moment(engine: Engine, *, with_ray: bool, building: bool) -> Iterator[Moment]:
    # Short, for it holds Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        one = Moment(engine, Path(scratch), with_ray=with_ray, building=building)
        try:
            yield one
        finally:
            one.close()


def kill_at(
    engine: Engine, delay_sec: float, *, sandboxes: int, with_ray: bool, building: bool
) -> dict[str, Any]:
    """One moment: what lived when it was killed, what was removed and what is left."""
    with moment(engine, with_ray=with_ray, building=building) as one:
        one.start(sandboxes)
        assert one.process is not None
        until = time.monotonic() + ALIVE_SEC
        while one.alive() < sandboxes or (building and not one.steps()):
            if one.process.poll() is not None or time.monotonic() > until:
                one.log.seek(0)
                raise SystemExit(
                    f"never were {sandboxes} sandboxes alive:\n{one.log.read().decode()[-3000:]}"
                )
            time.sleep(0.05)
        alive, steps = one.kill(delay_sec)
        started = time.monotonic()
        removed = one.collect()
        seconds = time.monotonic() - started
        return {"alive": alive, "steps": steps, "removed": removed, "seconds": seconds, "left": one.left()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--sandboxes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", nargs=3, metavar=("TASKS", "RUN", "JOB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        tasks, run, job = options.drive
        asyncio.run(drive(Path(tasks), Path(run), job, options.sandboxes))
        return
    chance = random.Random(options.seed)
    engine = Engine()
    total: Counter[str] = Counter()
    print("moment  alive  steps   ray  killed after  gc took  removed / left")
    for number in range(options.moments):
        delay, with_ray, building = chance.uniform(0, LATEST_SEC), number % 5 == 4, number % 3 == 1
        seen = kill_at(engine, delay, sandboxes=options.sandboxes, with_ray=with_ray, building=building)
        total += seen["left"]
        left = json.dumps(seen["left"]) if seen["left"] else "nothing"
        print(
            f"{number + 1:6d}  {seen['alive']:5d}  {seen['steps']:5d}  {'yes' if with_ray else 'no':>4}"
            f"  {delay:10.2f} s  {seen['seconds']:5.1f} s  {json.dumps(seen['removed'])} / {left}",
            flush=True,
        )
    print(f"{options.moments} moments, left in all: {json.dumps(total) if total else 'nothing'}")
    engine.close()
    sys.exit(bool(total))


if __name__ == "__main__":
    main()
