"""An old Terminal-Bench task becomes a Harbor task that asks and verifies the same."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from rollcage.rollout.task import check_task, load_task
from rollcage.rollout.terminal_bench import ImportReport, import_terminal_bench
from rollcage.rollout.toml_text import toml_text

TASK_YAML = """# x-bench-canary GUID 1
instruction: |-
  Write "42" to /app/answer.txt.
author_name: Somebody
difficulty: easy
category: files
tags:
  - files
parser_name: pytest
max_agent_timeout_sec: 900.0
max_test_timeout_sec: 180
"""
COMPOSE_YAML = """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
FILES = {
    "task.yaml": TASK_YAML,
    "docker-compose.yaml": COMPOSE_YAML,
    "Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY data/ ./data/\n",
    "data/input.txt": "41\n",
    "solution.sh": "echo 42 > /app/answer.txt\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_answer(): ...\n",
}


def old_task(root: Path, **files: str | None) -> Path:
    """The task of `FILES`; `files` override (by path, or by a name of `NAMES`) or, with None, leave out."""
    return write(root / "old", {**FILES, **{NAMES.get(name, name): text for name, text in files.items()}})


NAMES = {
    "task": "task.yaml",
    "compose": "docker-compose.yaml",
    "dockerfile": "Dockerfile",
    "solution": "solution.sh",
    "solution_yaml": "solution.yaml",
    "run_tests": "run-tests.sh",
    "tests": "tests/test_outputs.py",
    "test_script": "tests/test.sh",
}


def write(root: Path, files: dict[str, str | None]) -> Path:
    for path, text in files.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return root


def imported(tmp_path: Path, **files: str | None) -> ImportReport:
    return import_terminal_bench(old_task(tmp_path, **files), tmp_path / "new")


def below(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_a_task_is_carried_over_whole(tmp_path: Path) -> None:
    report = imported(tmp_path)
    assert report == ImportReport(tmp_path / "old", tmp_path / "new", written=True)
    assert below(report.target) == {
        "task.toml",
        "instruction.md",
        "environment/Dockerfile",
        "environment/data/input.txt",
        "solution/solve.sh",
        "tests/test.sh",
        "tests/run-tests.sh",
        "tests/test_outputs.py",
    }
    task = load_task(report.target)
    [step] = task.steps
    assert step.instruction == 'Write "42" to /app/answer.txt.\n'
    assert (step.agent_timeout_sec, step.verifier.timeout_sec) == (900.0, 180.0)
    assert task.environment.env == {"TEST_DIR": "/tests"}
    assert task.metadata["difficulty"] == "easy"
    assert task.metadata["tags"] == ["files"]
    assert (report.target / "solution/solve.sh").read_text().startswith("#!/bin/bash\n")
    for script in ("solution/solve.sh", "tests/test.sh"):
        assert os.access(report.target / script, os.X_OK)


def test_the_canary_goes_along(tmp_path: Path) -> None:
    target = imported(tmp_path).target
    assert (target / "task.toml").read_text().startswith("# x-bench-canary GUID 1\n")
    assert (target / "instruction.md").read_text().startswith("<!-- x-bench-canary GUID 1 -->\n")


def test_timeouts_that_are_not_set_are_the_harnesss_defaults(tmp_path: Path) -> None:
    [step] = load_task(imported(tmp_path, task="instruction: Do it.\n").target).steps
    assert (step.agent_timeout_sec, step.verifier.timeout_sec) == (360.0, 60.0)


def test_an_older_task_yaml_with_several_descriptions_uses_the_one_it_names(tmp_path: Path) -> None:
    descriptions = "descriptions: [{key: base, description: Do A.}, {key: hard, description: Do B.}]\n"
    report = imported(tmp_path, task=descriptions + "instruction: hard\n")
    assert load_task(report.target).steps[0].instruction == "Do B.\n"
    assert report.notes == ("of the descriptions base, hard only hard is used",)


def test_what_compose_says_of_its_one_service_goes_into_the_task(tmp_path: Path) -> None:
    compose = """services:
  sandbox:
    build: {context: ./img, dockerfile: Other, args: {VERSION: "1 2"}}
    working_dir: /srv
    user: "1000:1000"
    network_mode: none
    environment: {A: "x${T_BENCH_CONTAINER_LOGS_PATH}/y", B: 1, C: $HOST, D: "${H-d}", E: "a$$b", F: }
    deploy: {resources: {limits: {cpus: "0.5", memory: 2G}}}
    healthcheck: {test: [CMD, test, -e, "/a b"], interval: 1m30s, retries: 2}
    command: tail -f /dev/null
"""
    files = {
        "compose": compose,
        "dockerfile": None,
        "img/Other": "FROM x\nARG VERSION\n",
        "img/tests/x": "kept",
    }
    report = imported(tmp_path, **files)
    assert report.problems == ()
    task = load_task(report.target)
    environment = task.environment
    assert (environment.cpus, environment.memory_mb, environment.workdir) == (0.5, 2048, "/srv")
    assert environment.network_mode == "no-network"
    assert environment.env == {
        "A": "x/logs/y", "B": "1", "C": "${HOST}", "D": "${H:-d}", "E": "a$b", "F": "${F:-}"
    }  # fmt: skip
    assert environment.healthcheck is not None
    assert environment.healthcheck.command == "test -e '/a b'"
    assert (environment.healthcheck.interval_sec, environment.healthcheck.retries) == (90.0, 2)
    assert (task.steps[0].agent_user, task.steps[0].verifier.user) == (1000, 1000)
    assert (report.target / "environment/Dockerfile").read_text() == 'FROM x\nARG VERSION="1 2"\n'
    assert (report.target / "environment/tests/x").is_file()


def test_an_image_without_a_build_is_used_as_it_is(tmp_path: Path) -> None:
    report = imported(tmp_path, compose="services: {client: {image: 'python:3.13'}}", dockerfile=None)
    assert load_task(report.target).environment.docker_image == "python:3.13"


@pytest.mark.parametrize(
    ("dockerfile", "there", "not_there", "note"),
    [
        ("COPY solution.sh /oracle/", {"solution.sh"}, {"run-tests.sh", "tests"}, "the solution"),
        ("COPY tests/ /x/\n", {"tests"}, {"solution.sh", "run-tests.sh"}, "the tests"),
        ('ADD ["run-*.sh", "/x/"]', {"run-tests.sh"}, {"tests", "solution.sh"}, "the tests"),
        ("COPY --chown=1 \\\n  . /app", {"tests", "run-tests.sh"}, {"solution.sh", "task.yaml"}, "the tests"),
        ("COPY --from=base tests /x", set(), {"tests", "solution.sh"}, None),
    ],
)
def test_the_image_gets_of_tests_and_solution_what_its_dockerfile_copies(
    tmp_path: Path, dockerfile: str, there: set[str], not_there: set[str], note: str | None
) -> None:
    report = imported(tmp_path, dockerfile=f"FROM x\n{dockerfile}\n")
    names = {file.name for file in (report.target / "environment").iterdir()}
    assert there <= names
    assert not names & not_there
    assert len(report.notes) == (note is not None)
    assert note is None or note in report.notes[0]


def test_what_was_mounted_of_the_task_is_copied_to_its_place(tmp_path: Path) -> None:
    compose = """services:
  client:
    build: .
    volumes: ["./data:/mnt/data:ro", "./run-tests.sh:/r.sh", {type: bind, source: ./runs, target: /runs}, "v:/v"]
volumes: {v: {}}
"""
    report = imported(tmp_path, compose=compose)
    assert report.problems == ()
    assert (report.target / "environment/Dockerfile").read_text().split("\n")[-4:-1] == [
        'COPY ["data", "/mnt/data/"]',
        'COPY ["run-tests.sh", "/r.sh"]',
        "RUN mkdir -p /runs",
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("privileged: true", "privileged"),
        ("cap_add: [NET_ADMIN]", "cap_add"),
        ("command: ./serve.sh", "command (./serve.sh)"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "/var/run/docker.sock"),
        ("network_mode: host", "network_mode (host)"),
    ],
)
def test_what_one_container_of_ours_does_not_do_is_named(tmp_path: Path, line: str, named: str) -> None:
    report = imported(tmp_path, compose=f"services:\n  client:\n    build: .\n    {line}\n")
    assert report.written
    [problem] = report.problems
    assert named in problem.message
    assert problem.error_class == "unsupported"


def test_several_services_become_a_task_of_several_containers(tmp_path: Path) -> None:
    compose = (
        COMPOSE_YAML + "    depends_on: [db]\n  db:\n    image: ${T_BENCH_TASK_DOCKER_NAME_PREFIX}__db\n"
        "    command: echo $$HOME ${PORT:-80}\n    volumes: ['./tests/data:/data']\n"
    )
    report = imported(tmp_path, compose=compose)
    assert (report.written, report.problems) == (True, ())
    text = (report.target / "environment/docker-compose.yaml").read_text()
    assert "T_BENCH" not in text
    assert (report.target / "environment/Dockerfile").is_file()
    assert (report.target / "environment/tests").is_dir()
    task = load_task(report.target)
    assert task.environment.compose is not None
    services = task.environment.compose.services({})
    assert set(services) == {"main", "db"}
    assert services["main"].aliases == ("client",)
    assert [wait.service for wait in services["main"].depends] == ["db"]
    assert services["db"].image == "task__db"
    assert services["db"].command == ("echo", "$HOME", "80")


def test_what_only_a_compose_file_can_say_of_one_service_stays_in_one(tmp_path: Path) -> None:
    body = "    build: .\n    tmpfs: ['/cache:size=1m']\n    shm_size: 64m\n"
    report = imported(tmp_path, compose=f"services:\n  client:\n{body}")
    assert report.problems == ()
    compose = load_task(report.target).environment.compose
    assert compose is not None
    main = compose.services({})["main"]
    assert (main.tmpfs, main.shm_mb) == ({"/cache": "size=1m"}, 64)


def test_services_that_cannot_be_run_are_named_in_the_report(tmp_path: Path) -> None:
    compose = COMPOSE_YAML + "  db: {image: db, privileged: true, depends_on: [client]}\n"
    report = imported(tmp_path, compose=compose)
    assert report.written
    [problem] = report.problems
    assert problem.error_class == "unsupported"
    assert "services.db.privileged" in problem.message
    assert problem.line is not None


def test_commands_that_were_waited_for_become_a_script(tmp_path: Path) -> None:
    commands = """
- {command: "cd /app", block: true, append_enter: true}
- {command: "cat > x <<'E'\\na\\nE", block: true, min_timeout_sec: 1}
- {command: "echo done"}
"""
    report = imported(tmp_path, solution=None, solution_yaml=commands)
    assert report.problems == ()
    script = (report.target / "solution/solve.sh").read_text()
    assert script == "#!/bin/bash\ncd /app\ncat > x <<'E'\na\nE\necho done\n"


@pytest.mark.parametrize(
    ("commands", "error_class"),
    [
        ("- {command: vim x, block: false}\n- {command: ':wq', block: false}\n", "unsupported"),
        ("- {command: 'i', block: true, append_enter: false}\n", "unsupported"),
        ("just text\n", "task_malformed"),
    ],
)
def test_keys_for_a_program_are_not_made_a_script(tmp_path: Path, commands: str, error_class: str) -> None:
    report = imported(tmp_path, solution=None, solution_yaml=commands)
    assert report.written
    assert [problem.error_class for problem in report.problems] == [error_class]
    assert load_task(report.target).steps[0].solution is None


@pytest.mark.parametrize(
    ("files", "place", "said"),
    [
        ({"task": None}, "task.yaml", "is missing"),
        ({"task": "instruction: x\nb: ]\n"}, "task.yaml:2", "does not parse"),
        ({"task": "difficulty: easy\n"}, "task.yaml", "instruction is missing"),
        ({"task": "instruction: x\nblob: !!binary aGk=\n"}, "task.yaml", "TOML has no form for bytes"),
        ({"compose": "services: {}\n"}, "docker-compose.yaml", "there are no services"),
        ({"compose": "services: {a: {}}\n"}, "docker-compose.yaml", "neither build nor image"),
        ({"compose": "services: {a: {build: ../..}}\n"}, "docker-compose.yaml", "outside of the task"),
        ({"run_tests": None}, "run-tests.sh", "is missing"),
    ],
)
def test_a_broken_task_is_not_written(
    tmp_path: Path, files: dict[str, str | None], place: str, said: str
) -> None:
    report = imported(tmp_path, **files)
    assert not report.written
    assert os.listdir(tmp_path) == ["old"]
    [problem] = report.problems
    assert str(problem).startswith(str(tmp_path / "old" / place) + ": ")
    assert said in problem.message


def test_what_is_there_already_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    source, target = old_task(tmp_path), tmp_path / "new"
    import_terminal_bench(source, target)
    (target / "mine").touch()
    with pytest.raises(FileExistsError):
        import_terminal_bench(source, target)
    assert (target / "mine").exists()
    assert import_terminal_bench(source, target, overwrite=True).written
    assert not (target / "mine").exists()


def test_a_directory_that_is_no_task_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not a task"):
        import_terminal_bench(old_task(tmp_path), tmp_path / "new", overwrite=True)
    assert (tmp_path / "new/thesis.tex").exists()


def verdict(tmp_path: Path, run_tests: str, parser: str = "pytest", **files: str) -> tuple[str | None, str]:
    """Run the imported test.sh in a directory that stands for the sandbox's root: the reward, and the output."""
    task = TASK_YAML.replace("parser_name: pytest", f"parser_name: {parser}")
    target = imported(tmp_path, run_tests=run_tests, task=task, **files).target
    tests, logs = target / "tests", tmp_path / "logs"
    script = tests / "test.sh"
    script.write_text(script.read_text().replace("/tests", str(tests)).replace("/logs", str(logs)))
    done = subprocess.run([script], capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False)
    reward = logs / "verifier/reward.txt"
    return (reward.read_text().strip() if reward.exists() else None), done.stdout + done.stderr


def summary(*lines: str, status: int = 0) -> str:
    shown = "\n".join(["x.py .F", "= short test summary info =", *lines])
    return f"cat <<'E'\n{shown}\nE\nexit {status}\n"


@pytest.mark.parametrize(
    ("run_tests", "reward"),
    [
        (summary("PASSED t.py::a", "PASSED t.py::b", "=== 2 passed in 0.01s ==="), "1"),
        (summary("PASSED t.py::a", "FAILED t.py::b - assert 0", "== 1 failed, 1 passed in 0.01s =="), "0"),
        (summary("FAILED t.py::b - PASSED", status=1), "0"),
        (summary("PASSED t.py::a", "ERROR t.py - ImportError", status=1), "0"),
        (summary("PASSED t.py::a", "SKIPPED [1] t.py:3: no", "XFAIL t.py::c"), "1"),
        (summary("SKIPPED [1] t.py:3: no"), "0"),
        (summary("PASSED t.py::a", "XPASS t.py::b"), "0"),
        # -rp shows what passed only; the last line tells of the rest.
        (summary("PASSED t.py::a", "== 1 failed, 1 passed in 0.01s ==", status=1), "0"),
        # The exit status is not the verdict: what comes behind the tests may fail.
        (summary("PASSED t.py::a", status=3), "1"),
        # What a test printed before the summary does not count, and cannot hide what failed.
        ("echo 'PASSED t.py::fake'\n" + summary("FAILED t.py::a", status=1), "0"),
        ("echo '= short test summary info ='; echo 'PASSED x.py::fake'\n" + summary("FAILED t.py::a"), "0"),
        (
            "printf '\\033[1m= short test summary info =\\033[0m\\r\\n\\033[32mPASSED\\033[0m t.py::a\\r\\n'",
            "1",
        ),
        # Without -rA there is no summary where all passed.
        ("echo '===== 3 passed in 0.12s ====='", "1"),
        ("echo 'CMake build failed'; exit 1", "0"),
        # No verdict: nothing ran.
        ("nothing-like-this; true", None),
        ("nothing-like-this", None),
        ("echo 'no tests ran in 0.00s'", None),
    ],
)
def test_every_test_in_pytests_summary_must_have_passed(
    tmp_path: Path, run_tests: str, reward: str | None
) -> None:
    got, output = verdict(tmp_path, run_tests)
    assert got == reward, output
    assert (reward is None) == ("left no pytest verdict" in output)


@pytest.mark.parametrize(
    ("parser", "run_tests", "reward"),
    [
        (
            "swebench",
            "echo x SWEBench results starts here; echo PASSED; echo SWEBench results ends here",
            "1",
        ),
        ("swebench", "echo SWEBench results starts here; echo FAILED; echo SWEBench results ends here", "0"),
        ("swebench", "echo SWEBench results starts here; echo PASSED", None),
        ("sweperf", "echo SWE-Perf results starts here; echo PASSED; echo SWE-Perf results ends here", "1"),
        ("mlebench", "echo MLEBench results starts here; echo PASSED; echo MLEBench results ends here", "0"),
        ("own", "exit 0", "1"),
        ("own", "exit 3", "0"),
    ],
)
def test_other_parsers_have_their_own_verdict(
    tmp_path: Path, parser: str, run_tests: str, reward: str | None
) -> None:
    assert verdict(tmp_path, run_tests, parser)[0] == reward


def test_run_tests_finds_the_layout_that_it_expects(tmp_path: Path) -> None:
    run_tests = "ls $TEST_DIR; cat $TEST_DIR/test.sh\n" + summary("PASSED t.py::a")
    reward, output = verdict(tmp_path, run_tests, test_script="echo the task's own\n")
    assert reward == "1"
    assert {"run-tests.sh", "test_outputs.py", "echo the task's own"} <= set(output.split("\n"))


def test_a_process_that_the_tests_leave_behind_does_not_hold_the_verdict(tmp_path: Path) -> None:
    reward, _ = verdict(tmp_path, "sleep 20 &\n" + summary("PASSED t.py::a"))
    assert reward == "1"


def test_a_task_that_was_imported_is_checked_like_any_other(tmp_path: Path) -> None:
    report = imported(tmp_path, dockerfile=None)
    assert report.written
    assert report.problems == tuple(check_task(report.target)[1])
    assert [problem.file for problem in report.problems] == [str(report.target / "environment/Dockerfile")]


def test_toml_is_read_back_as_it_was_written() -> None:
    values = {
        "text": 'a "b"\n\t\\ \x00\x1f\x7f ä 😀',
        "number": 1e22,
        "table": {
            "list": [1, "x", {"a b": True}],
            "inner": {"x": {"y": 1}},
            "odd key!": "",
            "inf": float("inf"),
        },
    }
    assert tomllib.loads(toml_text(values)) == values
    assert toml_text({"a": {"none": None}, "b": None}) == "\n"
