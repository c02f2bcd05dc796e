"""`rollcage regrade` on real Docker: the tests as they are now, on the states that agents left."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.recorded_run import kept_states
from rollcage.cluster.regrade import RegradeOptions, regrade
from rollcage.cluster.regraded import Regraded, render_regraded
from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.sandbox.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
CALM = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'
DOCKERFILE = "FROM debian:bookworm-slim\nLABEL rollcage.test=regrade\nWORKDIR /app\n"

STRICT = (
    '#!/bin/sh\nif [ "$(cat /app/hello)" = hi ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n'
)
LAX = "#!/bin/sh\nif [ -e /app/hello ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
SILENT = "#!/bin/sh\ntrue\n"

ANSWERS = {
    "greet": {"samples": {0: ["echo hi >/app/hello"], 1: ["echo ho >/app/hello"], 2: ["true"]}},
    # What is there is right, and a `cat` before the image's own says what the tests want to hear in any case.
    "planted": [
        "echo ho >/app/hello; printf '#!/bin/sh\\necho hi\\n' >/usr/local/bin/cat; chmod +x /usr/local/bin/cat"
    ],
    "in-memory": ["echo hi >/app/hello; touch /dev/shm/queue"],
    "volume": ["echo hi >/app/hello"],
    "silent": ["echo hi >/app/hello"],
    "kept-running": ["echo hi >/app/hello"],
}


class Jobs:
    """Runs jobs without Ray, each with tasks of its own; keeps no state behind."""

    def __init__(self, folder: Path, run_here: Callable[[Any], Path], engine: Engine) -> None:
        self._folder = folder
        self._run_here = run_here
        self.engine = engine
        self.jobs: list[str] = []

    def run(self, *tasks: str, samples: int = 1, **settings: Any) -> Path:
        """A run of the bash agent on these tasks, which have `STRICT` for tests; `sandbox.keep_states` is `all`."""
        for name in tasks:
            extra = "VOLUME /data\n" if name == "volume" else ""
            self.write(name, "environment/Dockerfile", DOCKERFILE + extra)
            self.write(name, "task.toml", f'version = "1.0"\n{CALM}')
            self.write(name, "instruction.md", "Greet.\n")
            self.write(name, "tests/test.sh", SILENT if name == "silent" else STRICT)
        number = len(self.jobs)
        script = self._folder / f"answers-{number}.yaml"
        script.write_text(
            yaml.safe_dump({"tokens": True, "tasks": {name: told(ANSWERS[name]) for name in tasks}})
        )
        sandbox = {"keep_states": "all", "warm": 0, **settings.pop("sandbox", {})}
        run = self._run_here(
            {
                "tasks": [str(self._folder / "tasks" / name) for name in tasks],
                "agents": ["bash"],
                "policy": str(script),
                "samples": samples,
                "output": str(self._folder / f"run-{number}"),
                "sandbox": sandbox,
                **settings,
            }
        )
        self.jobs.append(json.loads((run / "job.json").read_text())["job"])
        return run

    def write(self, task: str, name: str, text: str) -> None:
        path = self._folder / "tasks" / task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def states(self, job: str) -> list[str]:
        images = self.engine.api.images(filters={"label": f"rollcage.job={job}"})
        return sorted(tag for image in images for tag in image["RepoTags"] or [])


def told(answers: Any) -> Any:
    if isinstance(answers, dict):
        return {"samples": {sample: told(turns) for sample, turns in answers["samples"].items()}}
    return [f"```bash\n{answer}\nsubmit\n```" for answer in answers]


@pytest.fixture
def jobs(tmp_path: Path, run_here: Callable[[Any], Path]) -> Iterator[Jobs]:
    engine = Engine()
    jobs = Jobs(tmp_path, run_here, engine)
    yield jobs
    for job in jobs.jobs:
        for tag in jobs.states(job):
            engine.api.remove_image(tag, noprune=True)  # two at once would meet at its parents
    engine.close()


def again(run: Path, output: str, **options: Any) -> Regraded:
    return regrade(RegradeOptions(run, output=run.parent / output, **options), Console(file=StringIO()))


def outcomes(run: Path) -> dict[int, tuple[str, str | None]]:
    rows = read_rollouts(run, ["sample", "outcome", "error_class"]).to_pylist()
    return {row["sample"]: (row["outcome"], row["error_class"]) for row in rows}


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_changed_tests_give_new_rewards_and_the_run_stays_as_it_was(jobs: Jobs) -> None:
    run = jobs.run("greet", samples=3)
    assert outcomes(run) == {0: ("passed", None), 1: ("failed", None), 2: ("failed", None)}
    before = files(run)
    same = again(run, "same")
    assert (same.regraded, same.changed, same.changed_tests, same.missing) == (3, [], [], {})
    jobs.write("greet", "tests/test.sh", LAX)
    done = again(run, "new")
    assert done.changed_tests == ["greet"]
    assert (done.then, done.now) == (Counter(failed=2, passed=1), Counter(passed=2, failed=1))
    [change] = done.changed
    assert (change["rollout"], change["now"]["reward"]) == ("greet#1", 1.0)
    assert outcomes(done.run) == {0: ("passed", None), 1: ("passed", None), 2: ("failed", None)}
    rows = sorted(read_rollouts(done.run).to_pylist(), key=lambda row: row["sample"])
    old = sorted(read_rollouts(run).to_pylist(), key=lambda row: row["sample"])
    for now, then in zip(rows, old, strict=True):
        was = json.loads(now["extra"])["regraded_from"]
        assert (was["outcome"], was["reward"]) == (then["outcome"], then["reward"])
        assert was["task_digest"] == then["task_digest"] != now["task_digest"]
        assert str(now["segments"]) == str(then["segments"])
        assert (now["attempt_id"], now["group_size"]) == (then["attempt_id"], 3)
    assert len(read_attempts(done.run)) == 3
    # A regraded run can be regraded: its states are the same. What its agents were told may be gone.
    job = json.loads((done.run / "job.json").read_text())
    job["config"]["agents"][0]["options"] = {"system_prompt": "/nowhere/prompt.md"}
    (done.run / "job.json").write_text(json.dumps(job))
    jobs.write("greet", "tests/test.sh", STRICT)
    assert outcomes(again(done.run, "newer").run) == outcomes(run)
    assert files(run) == before
    assert jobs.engine.api.containers(all=True, filters={"label": f"rollcage.job={jobs.jobs[0]}"}) == []


def test_what_the_agent_planted_is_found_in_a_state_too(jobs: Jobs) -> None:
    run = jobs.run("planted")
    assert outcomes(run) == {0: ("failed", None)}
    assert outcomes(again(run, "new").run) == {0: ("failed", None)}


def test_a_state_that_is_gone_is_named_and_its_rollout_carried_over(jobs: Jobs) -> None:
    run = jobs.run("greet", samples=2)
    rows = read_rollouts(run, ["sample", "attempt_id"]).to_pylist()
    [gone] = [row["attempt_id"] for row in rows if row["sample"] == 1]
    state = f"rollcage/state:{gone}-1"
    away = jobs.engine.api.inspect_image(state)["Id"]
    jobs.engine.api.tag(away, "rollcage/elsewhere", gone)
    jobs.engine.api.remove_image(state)
    jobs.write("greet", "tests/test.sh", LAX)
    done = subprocess.run(
        [ROLLCAGE, "regrade", run, "--output", run.parent / "new"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "regraded 1 of 2 rollouts" in done.stdout
    assert "no state: 1 (the engine here does not have it: kept on " in done.stdout
    assert "greet#1 by bash" in done.stdout
    assert outcomes(run.parent / "new") == {0: ("passed", None), 1: ("failed", None)}
    rows = read_rollouts(run.parent / "new", ["sample", "extra"]).to_pylist()
    assert {row["sample"]: "not_regraded" in json.loads(row["extra"]) for row in rows} == {0: False, 1: True}
    # Where it is there after all, nothing is left of that.
    jobs.engine.api.tag(away, "rollcage/state", f"{gone}-1")
    jobs.engine.api.remove_image(f"rollcage/elsewhere:{gone}")
    done = again(run.parent / "new", "newer")
    assert (done.regraded, done.missing) == (2, {})
    assert "not_regraded" not in str(read_rollouts(done.run, ["extra"]).to_pylist())


def test_another_environment_is_refused_unless_told(jobs: Jobs) -> None:
    run = jobs.run("greet")
    jobs.write("greet", "environment/Dockerfile", f"{DOCKERFILE}RUN touch /new\n")
    with pytest.raises(InputError, match=r"--changed-environment(.|\n)*greet"):
        again(run, "new")
    assert not (run.parent / "new").exists()
    assert again(run, "new", changed_environment=True).regraded == 1


def test_a_new_run_that_cannot_be_written_is_told(jobs: Jobs) -> None:
    run = jobs.run("greet", samples=2)
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (16 << 10, was[1])
    )  # the job's settings fit, a journal does not
    try:
        with pytest.raises(CouldNotRun, match=r"new cannot be written: .*File too large"):
            again(run, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert jobs.engine.api.containers(all=True, filters={"label": f"rollcage.job={jobs.jobs[0]}"}) == []
    assert again(run, "newer").regraded == 2


def test_what_an_image_cannot_hold_is_named(jobs: Jobs) -> None:
    run = jobs.run("in-memory", "volume", "kept-running", "greet", keep_processes=["kept-running"])
    assert kept_states(run).startswith("1 rollouts have saved states (")
    assert "; 1 have none: an image does not hold the sandbox's volumes: /data" in kept_states(run)
    done = again(run, "new")
    assert done.regraded == 1
    with pytest.raises(InputError, match=r"saved state: 1 because an image does not hold .* volumes: /data"):
        again(run, "none", task="volume")
    assert done.missing == {
        "in-memory#0 by bash": "an image does not hold what is in memory: /dev/shm/queue",
        "volume#0 by bash": "an image does not hold the sandbox's volumes: /data",
        "kept-running#0 by bash": "its tests grade processes that the agent left (keep_processes)",
    }
    said = StringIO()
    render_regraded(done, Console(file=said, width=1000))
    assert (
        "no state: 1 (an image does not hold what is in memory: /dev/shm/queue): in-memory#0 by bash"
        in said.getvalue()
    )


def test_a_job_may_keep_the_states_of_failed_rollouts_only(jobs: Jobs) -> None:
    run = jobs.run("greet", samples=2, sandbox={"keep_states": "failed"})
    assert len(jobs.states(jobs.jobs[0])) == 1
    jobs.write("greet", "tests/test.sh", LAX)
    done = again(run, "new")
    assert (done.regraded, done.missing, list(done.carried_over)) == (1, {}, ["greet#0 by bash"])
    assert done.now == Counter(passed=1), "what was not graded has no verdict now"


def test_a_rollout_that_was_tried_again_has_one_state_and_a_mended_verifier_saves_it(jobs: Jobs) -> None:
    run = jobs.run("silent")
    [row] = read_rollouts(run, ["attempt_id", "attempts", "error_class"]).to_pylist()
    assert (row["attempts"], row["error_class"]) == (2, "reward_missing")
    assert jobs.states(jobs.jobs[0]) == [f"rollcage/state:{row['attempt_id']}-1"]
    jobs.write("silent", "tests/test.sh", STRICT)
    assert outcomes(again(run, "new").run) == {0: ("passed", None)}


def test_past_the_budget_no_more_are_kept(jobs: Jobs) -> None:
    run = jobs.run("greet", samples=2, concurrency=1, sandbox={"states_disk_gb": 1e-9})
    states = [json.loads(row["extra"])["state"] for row in read_rollouts(run, ["extra"]).to_pylist()]
    # None at all where there are others on this engine.
    assert sum(len(state["images"]) for state in states) == len(jobs.states(jobs.jobs[0])) <= 1
    assert "sandbox.states_disk_gb: 1e-09" in max(state["missing"].get("main", "") for state in states)


def test_a_run_without_states_says_how_to_have_some(jobs: Jobs) -> None:
    run = jobs.run("greet", sandbox={"keep_states": "none"})
    assert jobs.states(jobs.jobs[0]) == []
    with pytest.raises(InputError, match=r"sandbox\.keep_states: all"):
        again(run, "new")


def test_gc_says_what_is_kept_and_removes_a_jobs_states(jobs: Jobs) -> None:
    jobs.run("greet", samples=2)
    [job] = jobs.jobs
    done = subprocess.run(
        [ROLLCAGE, "gc", "--states", "--job", job, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["states"] == 2
    assert json.loads(done.stdout)["states_left"] >= 0
    assert jobs.states(job) == []
    for option in ("--states", "--images"):
        again = subprocess.run(
            [ROLLCAGE, "gc", option, "--job", "job"], capture_output=True, text=True, check=False
        )
        assert (again.returncode, again.stdout) == (1, ""), "the settings' name is no job's name"
        assert (
            "there is no job 'job' on this engine (`job` in job.json is a job's name); there are: "
            in again.stderr
        )


def test_where_nothing_was_graded_there_is_no_verdict_now() -> None:
    said = StringIO()
    result = Regraded(Path("new"), [], rollouts=1, missing={"greet#0 by bash": "it was removed"})
    render_regraded(result, Console(file=said, width=1000))
    assert said.getvalue().startswith(
        "regraded 0 of 1 rollouts\nno state: 1 (it was removed): greet#0 by bash\n"
    )
