"""A task in the Harbor format is read as it says."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcage.rollout.outcome import TaskError
from rollcage.rollout.task import Healthcheck, check_task, find_tasks, ignore_patterns, load_task

MakeTask = Callable[..., Path]

FILES = {
    "task.toml": "",
    "instruction.md": "Write 42 to /app/answer.txt.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "solution/solve.sh": "echo 42 > /app/answer.txt\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """Writes a whole task; keyword `files` overrides or (with None) leaves out, `toml` is task.toml."""

    def make(
        toml: str | bytes = "", *, files: dict[str, str | bytes | None] | None = None, name: str = "t"
    ) -> Path:
        root = tmp_path / name
        for path, content in {**FILES, "task.toml": toml, **(files or {})}.items():
            if content is None:
                continue
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return make


def test_the_shortest_task_gets_the_defaults(make_task: MakeTask) -> None:
    path = make_task()
    task = load_task(path)
    assert (task.name, task.path, len(task.digest)) == ("t", path, 64)
    assert task.environment.context == path / "environment"
    assert task.environment.network_mode == "public"
    assert task.environment.build_timeout_sec == 600.0
    [step] = task.steps
    assert step.name == "main"
    assert step.instruction == "Write 42 to /app/answer.txt.\n"
    assert step.tests == path / "tests"
    assert step.solution == path / "solution"
    assert step.agent_timeout_sec is None
    assert step.verifier.timeout_sec == 600.0
    assert step.verifier.environment is None


def test_every_section_is_read(make_task: MakeTask) -> None:
    task = load_task(
        make_task(
            """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", {source = "/var/log/x", destination = "logs", exclude = ["*.gz"]}]
unknown_key = {a = 1}

[task]
name = "org/answer"
keywords = ["a", "b"]

[metadata]
difficulty = "easy"
written = 2025-02-03
limit = inf

[agent]
timeout_sec = 120
user = "dev"

[verifier]
timeout_sec = 30.5
user = 1000
env = {KEY = "${KEY}"}

[[verifier.collect]]
command = "dump"
timeout_sec = 5

[environment]
build_timeout_sec = 300
docker_image = "python:3.13-slim"
os = "Linux"
cpus = 0.5
memory_mb = 2048
storage_mb = 10240.0
gpus = 0
mcp_servers = []
workdir = "/app"
network_mode = "no-network"

[environment.env]
MODE = "x"

[environment.healthcheck]
command = "test -e /ready"
interval_sec = 1
retries = 5

[solution.env]
TOKEN = "${TOKEN:-none}"
""",
            files={"environment/Dockerfile": None},
        )
    )
    environment, [step] = task.environment, task.steps
    assert task.name == "org/answer"
    assert task.keywords == ("a", "b")
    assert task.metadata == {"difficulty": "easy", "written": "2025-02-03", "limit": None}
    assert [artifact.source for artifact in task.artifacts] == ["/app/out", "/var/log/x"]
    assert (task.artifacts[1].destination, task.artifacts[1].exclude) == ("logs", ("*.gz",))
    assert task.solution_env == {"TOKEN": "${TOKEN:-none}"}
    assert (environment.docker_image, environment.context) == ("python:3.13-slim", None)
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (0.5, 2048, 10240)
    assert (environment.workdir, environment.network_mode) == ("/app", "no-network")
    assert environment.env == {"MODE": "x"}
    assert environment.healthcheck == Healthcheck("test -e /ready", interval_sec=1.0, retries=5)
    assert (step.agent_timeout_sec, step.agent_user) == (120.0, "dev")
    assert (step.verifier.timeout_sec, step.verifier.user, step.verifier.env) == (
        30.5,
        1000,
        {"KEY": "${KEY}"},
    )
    assert step.verifier.collect == (
        {"command": "dump", "service": "main", "timeout_sec": 5.0, "user": None},
    )
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.parametrize(
    ("toml", "memory_mb", "storage_mb", "network_mode"),
    [
        ('version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"', 2048, 512, "public"),
        ('[environment]\nmemory = "1.5gb"\nallow_internet = true', 1536, None, "public"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 2048\nallow_internet = false', 2048, None, "no-network"),
        ('[environment]\nallow_internet = false\nnetwork_mode = "public"', None, None, "public"),
    ],
)
def test_old_keys_mean_what_they_meant(
    make_task: MakeTask, toml: str, memory_mb: int | None, storage_mb: int | None, network_mode: str
) -> None:
    environment = load_task(make_task(toml)).environment
    assert (environment.memory_mb, environment.storage_mb) == (memory_mb, storage_mb)
    assert environment.network_mode == network_mode


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<!-- x canary GUID 1 -->\n\nDo it.\n", "Do it.\n"),
        ("# BENCHMARK CANARY GUID 1\n<!-- canary -->\nDo it.\n", "Do it.\n"),
        ("Do it.\n# canary stays here\n", "Do it.\n# canary stays here\n"),
        ("# A headline\nDo it.\n", "# A headline\nDo it.\n"),
        ("\N{BYTE ORDER MARK}# canary\r\nDo it.\r\nAnd this.\r\n", "Do it.\nAnd this.\n"),
    ],
)
def test_leading_canary_lines_are_not_shown_to_the_agent(make_task: MakeTask, text: str, told: str) -> None:
    assert load_task(make_task(files={"instruction.md": text})).steps[0].instruction == told


def test_a_task_toml_with_a_byte_order_mark_and_crlf_is_read(make_task: MakeTask) -> None:
    path = make_task(b"\xef\xbb\xbf[agent]\r\ntimeout_sec = 5\r\n")
    assert load_task(path).steps[0].agent_timeout_sec == 5.0


def test_a_task_without_a_solution_is_whole(make_task: MakeTask) -> None:
    assert load_task(make_task(files={"solution/solve.sh": None})).steps[0].solution is None


def test_harborignore_files_say_what_is_not_sent(make_task: MakeTask) -> None:
    path = make_task(
        files={
            "tests/.harborignore": "# a comment\n*.pyc\n!keep.pyc\n/data/raw\n\n",
            "tests/data/.harborignore": "big/\nsub/x.bin\n!y\n",
            "tests/data/big/file": "",
        }
    )
    assert ignore_patterns(path / "tests") == (
        "*.pyc",
        "!keep.pyc",
        "/data/raw",
        "/data/**/big/",
        "/data/sub/x.bin",
        "!/data/**/y",
        ".harborignore",
    )
    assert ignore_patterns(path / "solution") == (".harborignore",)
    assert ignore_patterns(path / "nowhere") == (".harborignore",)
    load_task(path)


def test_one_task_toml_of_a_hundred_that_does_not_parse_leaves_the_others(
    make_task: MakeTask, tmp_path: Path
) -> None:
    for number in range(100):
        toml = "[agent]\ntimeout_sec = 60\n" if number != 41 else '[agent]\ntimeout_sec = = 60\nuser = "a"\n'
        make_task(toml, name=f"tasks/{number:03}")
    checked = [check_task(path) for path in find_tasks(["tasks"], tmp_path)]
    assert [number for number, (task, _) in enumerate(checked) if task is None] == [41]
    [problem] = checked[41][1]
    assert problem.error_class == "task_malformed"
    assert problem.file == str(tmp_path / "tasks/041/task.toml")
    assert problem.line == 2
    with pytest.raises(TaskError, match=r"task\.toml:2: does not parse") as caught:
        load_task(tmp_path / "tasks/041")
    assert caught.value.error_class == "task_malformed"


def test_loading_names_the_first_problem_and_keeps_all_as_evidence(make_task: MakeTask) -> None:
    path = make_task("[environment]\ngpus = 1\n[agent]\ntimeout_sec = -1\n", files={"instruction.md": ""})
    with pytest.raises(TaskError, match="and 2 more") as caught:
        load_task(path)
    assert caught.value.error_class == "task_malformed"
    assert caught.value.evidence.said_by == "task files"
    assert caught.value.evidence.message.count("\n") == 2


def test_a_task_that_only_asks_for_too_much_is_unsupported(make_task: MakeTask) -> None:
    with pytest.raises(TaskError, match="gpus") as caught:
        load_task(make_task("[environment]\ngpus = 1\n"))
    assert caught.value.error_class == "unsupported"


def test_a_link_inside_of_the_task_is_fine_and_one_out_of_it_is_not(
    make_task: MakeTask, tmp_path: Path
) -> None:
    path = make_task(files={"tests/data/a": "a"})
    os.symlink("data/a", path / "tests/link")
    os.symlink("not-there", path / "tests/later")
    load_task(path)
    os.symlink("/etc/passwd", path / "tests/data/b")
    os.symlink("ring", path / "tests/ring")
    _, problems = check_task(path)
    assert {Path(problem.file).name: problem.message for problem in problems} == {
        "b": "is a link to /etc/passwd, outside of the task",
        "ring": "is a link that leads back to itself",
    }


def test_a_compose_file_called_yml_is_not_the_environment(make_task: MakeTask) -> None:
    load_task(make_task(files={"environment/docker-compose.yml": "services: {}\n"}))
