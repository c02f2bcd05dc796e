"""The command line as a user meets it: exit statuses, messages, and what goes to which stream."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.arrow import Location
from rollcage.rollout.outcome import Evidence, Outcome
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.trajectory import Attempt, Reward, Trajectory

ROLLCAGE = Path(sys.executable).parent / "rollcage"
EXAMPLES = Path(__file__).parents[2] / "examples"
NO_ENGINE = "unix:///nonexistent.sock"


def rollcage(*arguments: str | Path, cwd: Path | None = None, **environ: str) -> Any:
    """Run the command; standard output that is not the result is a failure of its own in `--json` tests."""
    done = subprocess.run(
        [ROLLCAGE, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environ},
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def test_a_name_that_standard_output_cannot_take_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "t\u00e4sk").mkdir()
    (tmp_path / "t\u00e4sk" / "task.toml").touch()
    done = rollcage("tasks", "check", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, "t\\xe4sk" in done.stdout) == (1, True), done.stdout


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run: 3 passed, 1 failed of one task, and a quarantined task whose 4 rollouts are invalid."""

    def attempt(task: str, sample: int, **changes: Any) -> Attempt:
        common = {"started_at": 1e9 + sample, "ended_at": 1e9 + sample + 1, "trajectory": Trajectory()}
        return Attempt(f"{task}-{sample}", "job-1", task, "d", sample, 1, "nop", "", "h", **common, **changes)

    async def write() -> None:
        ledger = Ledger.create(tmp_path / "run", {"job": "job-1"})
        for sample in range(4):
            outcome = Outcome.PASSED if sample else Outcome.FAILED
            good = attempt("good", sample, outcome=outcome, reward=Reward(float(sample > 0)))
            await ledger.record_attempt(good)
            await ledger.record_rollout(good, 1, 4)
            bad = attempt(
                "bad", sample, outcome=Outcome.INVALID, error_class="image_build", evidence=Evidence("exit 7")
            )
            bad.attempt_id = ""
            await ledger.record_rollout(bad, 0, 4)
        for task in ("good", "bad"):
            await ledger.commit_group("nop", task)
        await ledger.finish({"job": "job-1", "wall_seconds": 8.0})

    asyncio.run(write())
    return tmp_path / "run"


# Usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run"], "name a job file, or give --tasks and --agent"),
        (["run", "--frobnicate"], "No such option"),
        (["run", "--samples", "nine"], "Invalid value for '--samples'"),
        (["run", "--tasks", EXAMPLES / "tasks", "--agent", "nop", "--samples", "0"], "--samples: samples: must be"),
        (["run", "--tasks", "nowhere", "--agent", "nop"], "there is no"),
        (["run", "--tasks", EXAMPLES / "tasks", "--agent", "nopp"], "did you mean 'nop'?"),
        (["run", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["tasks", "check"], "Missing argument"),
        (["tasks", "check", "nowhere"], "no such path: 'nowhere'"),
        (["try", EXAMPLES / "tasks"], "holds 6 tasks: name one of them"),
        (["try", EXAMPLES / "tasks/say-hello", "--option", "x"], "give it as name=value"),
        (["try", EXAMPLES / "tasks/say-hello", "--agent", "bash"], "polic"),
        (["report"], "Missing argument"),
    ],
)  # fmt: skip
def test_wrong_usage_is_status_1_and_says_what_is_wrong(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = rollcage(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_command_is_wrong_usage_too() -> None:
    done = rollcage()
    assert done.returncode == 1
    assert "Usage: rollcage" in done.stdout + done.stderr


def test_help_is_status_0() -> None:
    for command in (["--help"], ["run", "--help"], ["tasks", "--help"]):
        done = rollcage(*command)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage" in done.stdout


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(
    tmp_path: Path, write_task: Any
) -> None:
    write_task("tasks/one")
    job = tmp_path / "job.yaml"
    job.write_text("tasks: tasks\nagent: nop\nsandbox:\n  build_slot: 3\nconcurency: 2\n")
    done = rollcage("run", job)
    assert (done.returncode, done.stdout) == (1, "")
    assert "job.yaml:4" in done.stderr
    assert "did you mean 'build_slots'?" in done.stderr
    assert "job.yaml:5" in done.stderr
    assert "did you mean 'concurrency'?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_script_that_is_wrong_is_found_before_anything_is_started(tmp_path: Path, write_task: Any) -> None:
    write_task("tasks/one")
    (tmp_path / "answers.yaml").write_text("defualt: [x]\n")
    arguments = ["run", "--tasks", "tasks", "--agent", "bash", "--policy", "answers.yaml", "--output", "out"]
    done = rollcage(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "answers.yaml" in done.stderr
    assert "starting Ray" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_directory_that_holds_a_run_is_not_written_over(run_dir: Path, write_task: Any) -> None:
    before = sorted(run_dir.rglob("*"))
    done = rollcage("run", "--tasks", write_task("tasks/one"), "--agent", "nop", "--output", run_dir)
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds a run already" in done.stderr
    assert sorted(run_dir.rglob("*")) == before


# The engine


@pytest.mark.ray
def test_without_an_engine_a_job_could_not_run_and_leaves_nothing(tmp_path: Path, write_task: Any) -> None:
    task = write_task("tasks/one")
    override = f"sandbox.docker_host={NO_ENGINE}"
    arguments = ["run", "--tasks", task, "--agent", "nop", "--set", override, "--output", tmp_path / "out"]
    with tempfile.TemporaryDirectory() as scratch:
        done = rollcage(*arguments, "--json", TMPDIR=scratch)
        assert os.listdir(scratch) == []
    assert (done.returncode, done.stdout) == (2, "")
    assert "could not run: docker_unavailable: could not connect to the Docker Engine" in done.stderr
    assert "rollcage doctor" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]


def test_without_an_engine_the_other_commands_say_so_too(write_task: Any) -> None:
    for command in (["try", write_task("tasks/one")], ["gc"]):
        done = rollcage(*command, "--docker-host", NO_ENGINE)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert "docker_unavailable" in done.stderr
        assert "rollcage doctor" in done.stderr
    done = rollcage("doctor", "--docker-host", NO_ENGINE, "--json")
    assert done.returncode == 2
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert not checks["engine"]["ok"]
    assert "DOCKER_HOST" in checks["engine"]["remedy"]


def test_nothing_listens_at_the_address_of_the_cluster(tmp_path: Path, write_task: Any) -> None:
    arguments = ["--agent", "nop", "--address", "127.0.0.1:1", "--output", tmp_path / "out"]
    done = rollcage("run", "--tasks", write_task("tasks/one"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "could not join the Ray cluster at 127.0.0.1:1" in done.stderr
    assert "--address local" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.docker
def test_doctor_looks_at_everything_a_job_needs(tmp_path: Path) -> None:
    done = rollcage("doctor", "--json", ROLLCAGE_CACHE=str(tmp_path / "not/there/yet"))
    said = json.loads(done.stdout)
    checks = {check["name"]: check for check in said["checks"]}
    assert len(checks) == len(said["checks"]), "no two checks have one name"
    assert {"engine", "networks", "disk", "memory", "ray", "vllm", "cache"} <= checks.keys()
    assert checks["engine"]["ok"]
    assert str(tmp_path) in checks["cache"]["said"]
    assert all(bool(check["remedy"]) != check["ok"] for check in checks.values())
    assert said["fit"] == all(check["ok"] for check in checks.values())
    assert done.returncode == (0 if said["fit"] else 2)
    assert done.stderr == ""


# Reports


def test_a_report_of_no_run_is_status_1(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        done = rollcage("report", place)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{place}: there is no run here" in done.stderr


def test_a_report_as_json_has_what_scripts_read(run_dir: Path) -> None:
    done = rollcage("report", run_dir, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert {key: report[key] for key in ("rollouts", "attempts", "passed", "failed", "invalid", "cancelled")} == {
        "rollouts": 8, "attempts": 4, "passed": 3, "failed": 1, "invalid": 4, "cancelled": 0,
    }  # fmt: skip
    assert report["by_error_class"] == {"image_build": 4}
    assert report["by_domain"]["task"] == 4
    assert report["pass_rate"] == 0.75
    assert 0 < report["pass_rate_low"] < 0.75 < report["pass_rate_high"] < 1
    assert [report[key] for key in ("wall_seconds", "rollout_seconds", "rollouts_per_second")] == [
        8.0,
        4.0,
        2.0,
    ]
    tasks = {task["task"]: task for task in report["tasks"]}
    assert {"task", "digest", "passed", "failed", "invalid", "error_classes"} <= tasks["bad"].keys()
    assert (tasks["bad"]["invalid"], tasks["bad"]["error_classes"]) == (4, {"image_build": 4})


def test_a_report_for_people_names_the_outcomes(run_dir: Path) -> None:
    done = rollcage("report", run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("passed", "failed", "invalid", "image_build", "exit 7", "good", "bad"):
        assert word in done.stdout


def test_a_report_into_a_pipe_is_not_wrapped(run_dir: Path) -> None:
    said = "a step that says what was wrong, word after word, to its very end, " * 3
    job = Location(run_dir)
    evidence = Evidence(said, "builder")
    lost = Attempt(
        "", "job-1", "lost", "d", 0, 1, "nop", "", "h", Outcome.INVALID, "build_infra", evidence=evidence
    )
    job.write_shard("rollouts", [rollouts_batch([(lost, 0, 1)])])
    done = rollcage("report", run_dir, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert said.strip() in done.stdout


# Tasks


def test_one_bad_task_among_some_is_told_with_file_line_and_remedy(tmp_path: Path, write_task: Any) -> None:
    for name in ("a", "b"):
        write_task(f"tasks/{name}")
    write_task("tasks/bad", toml='[environment]\ncpus = "four"\n')
    done = rollcage("tasks", "check", "tasks", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    [line, last] = done.stdout.splitlines()
    assert line.startswith("task_malformed ")
    assert "tasks/bad/task.toml:3: " in line
    assert line.rstrip().endswith(")"), "the remedy"
    assert last == "3 tasks checked, 1 with problems"

    done = rollcage("tasks", "check", "tasks", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (done.returncode, said["checked"], said["with_problems"]) == (1, 3, 1)
    [bad] = [task for task in said["tasks"] if task["problems"]]
    [problem] = bad["problems"]
    assert (bad["task"], problem["line"], problem["error_class"]) == ("bad", 3, "task_malformed")
    assert problem["file"].endswith("tasks/bad/task.toml")
    assert problem["message"]
    assert problem["remedy"]


def test_what_is_wrong_with_a_dockerfile_is_told_without_a_build(tmp_path: Path, write_task: Any) -> None:
    task = write_task("tasks/a")
    (task / "environment/Dockerfile").write_text(
        "ARG V\nFROM a\nRUN <<EOF\nx\nEOF\nCOPY nope /\nCOPY --from=b /x /\n"
    )
    done = rollcage("tasks", "check", task, cwd=tmp_path)
    assert done.returncode == 1
    [line, last] = done.stdout.splitlines()
    assert line.startswith("image_build ")
    assert "environment/Dockerfile:6: COPY source nope is not in the build context (add the file" in line
    assert last == "1 tasks checked, 1 with problems"


def test_files_that_are_nested_too_deep_are_one_tasks_problem(tmp_path: Path, write_task: Any) -> None:
    deep = "${A:-" * 3000 + "}" * 3000
    write_task("tasks/a", dockerfile=f"FROM a\nENV A={deep}\n")
    compose = write_task("tasks/b") / "environment/docker-compose.yaml"
    compose.write_text(f"services:\n  main: {{environment: {{A: '{deep}'}}}}\n")
    write_task("tasks/c")
    done = rollcage("tasks", "check", "tasks", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    first, second, last = done.stdout.splitlines()
    assert "tasks/a/environment/Dockerfile:2: " in first
    assert "substitutions are nested more than 50 deep" in first
    assert "tasks/b/environment/docker-compose.yaml:2: services.main.environment.A nests variables" in second
    assert last == "3 tasks checked, 2 with problems"


def test_good_tasks_are_status_0(write_task: Any) -> None:
    done = rollcage("tasks", "check", write_task("tasks/a"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 tasks checked, 0 with problems\n", "")


def test_a_key_that_looks_like_a_known_one_is_a_warning_and_no_problem(write_task: Any) -> None:
    toml = (
        "[environment]\nmemory_md = 64\nanother = 1\n[environment.env]\ntimeout = '1'\n"
        "[metadata]\ntimeout_sek = 1\n[agents]\ntimeout = 3\n[[verifier.collect]]\ncommand = 'x'\nuzer = 'y'\n"
    )
    task = write_task("tasks/a", toml=toml)
    done = rollcage("tasks", "check", task)
    assert done.returncode == 0, done.stdout
    assert [line.partition("task.toml:")[2] for line in done.stdout.splitlines()[:-1]] == [
        "3: [environment].memory_md is not known and ignored (did you mean memory_mb?)",
        "9: agents is not known and ignored (did you mean agent?)",
        "13: verifier.collect[0].uzer is not known and ignored (did you mean user?)",
    ]
    assert done.stdout.splitlines()[-1] == "1 tasks checked, 0 with problems"
    shown = json.loads(rollcage("tasks", "check", task, "--json").stdout)
    assert [warning["line"] for warning in shown["tasks"][0]["warnings"]] == [3, 9, 13]


def test_an_allowlist_over_private_ranges_is_a_warning(write_task: Any) -> None:
    listed = 'network_mode = "allowlist"\nallowed_hosts = ["8.0.0.0/5", "1.1.1.1", "a.org"]\n'
    done = rollcage("tasks", "check", write_task("tasks/a", toml=f"[environment]\n{listed}"))
    assert done.returncode == 0, done.stdout
    [warning, _] = done.stdout.splitlines()
    assert (
        "task.toml: allowed_hosts has 8.0.0.0/5, and 10.0.0.0/8 is not the internet: what overlaps stays"
        in warning
    )
    assert "sandbox.network.allow_private" in warning


def old_task(root: Path) -> Path:
    files = {
        "task.yaml": "instruction: Make /app/hello.\nparser_name: pytest\ndifficulty: easy\n",
        "docker-compose.yaml": "services:\n  client:\n    build: {dockerfile: Dockerfile}\n",
        "Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "solution.sh": "touch /app/hello\n",
        "run-tests.sh": "test -e /app/hello\n",
        "tests/test_outputs.py": "def test_it(): ...\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_old_terminal_bench_task_is_imported_once(tmp_path: Path) -> None:
    old, new = old_task(tmp_path / "old/hello"), tmp_path / "new"
    done = rollcage("tasks", "import", tmp_path / "old", new, "--json")
    [report] = json.loads(done.stdout)["tasks"]
    assert (done.returncode, done.stderr, report["problems"]) == (0, "", [])
    assert (report["written"], report["target"]) == (True, str(new / "hello"))
    assert rollcage("tasks", "check", new).returncode == 0

    again = rollcage("tasks", "import", old, new)
    assert again.returncode == 1
    assert f"not imported {old} -> {new / 'hello'}" in again.stdout
    assert "exists already (name another directory, or pass --overwrite" in again.stdout
    assert rollcage("tasks", "import", old, new, "--overwrite").returncode == 0


def test_a_task_that_cannot_be_imported_does_not_stop_the_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        old_task(tmp_path / "old" / name)
    (tmp_path / "old/b/run-tests.sh").unlink()
    done = rollcage("tasks", "import", tmp_path / "old", tmp_path / "new")
    assert (done.returncode, done.stderr) == (1, "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "c"]
    assert done.stdout.count("not imported") == 1
    assert "b/run-tests.sh: is missing" in done.stdout


def test_there_is_nothing_to_import(tmp_path: Path) -> None:
    done = rollcage("tasks", "import", tmp_path, tmp_path / "new")
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds no Terminal-Bench task" in done.stderr


# Configuration


def test_the_schema_is_one_and_takes_the_demo() -> None:
    done = rollcage("config", "schema")
    assert (done.returncode, done.stderr) == (0, "")
    schema = json.loads(done.stdout)
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    demo = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    validator(schema).validate(demo)
    for wrong in (demo | {"concurency": 4}, demo | {"samples": "4"}, {"tasks": ["x"]}):
        assert not validator(schema).is_valid(wrong)
