"""Whatever is wrong with a task is said with its file, its line and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollcage.rollout import task as task_module
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.task import Problem, check_task, load_task, near_misses

FILES = {
    "task.toml": "",
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


def problems_of(root: Path, files: dict[str, str | bytes | None]) -> list[Problem]:
    for path, content in {**FILES, **files}.items():
        if content is not None:
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    task, problems = check_task(root)
    assert (task is None) == bool(problems)
    return problems


@pytest.mark.parametrize(
    ("toml", "line", "said", "remedy"),
    [
        ("[agent]\n\ntimeout_sec = -5", 3, "[agent].timeout_sec must be greater than 0, not -5", "larger"),
        ("[agent]\ntimeout_sec = 0", 2, "greater than 0", "larger"),
        ("[agent]\ntimeout_sec = nan", 2, "must be a finite number, not nan", "leave the key out"),
        ("[verifier]\ntimeout_sec = inf", 2, "must be a finite number", "leave the key out"),
        ('[verifier]\ntimeout_sec = "600"', 2, 'a number, not "600"', "timeout_sec = 600"),
        ("[verifier]\ntimeout_sec = true", 2, "a number, not True", "without quotes"),
        ("[agent]\nuser = 1.5", 2, "[agent].user must be a string", 'user = "..."'),
        ("[agent]\nuser = -1", 2, "a user's name or id", "from 0 up"),
        ('[agent]\nuser = ""', 2, "not empty", "leave the key out"),
        ("agent = 3", 1, "agent must be a table", "[agent]"),
        ("[environment]\ncpus = 0", 2, "[environment].cpus must be greater than 0", "larger"),
        ("[environment]\nmemory_mb = 0.5", 2, "at least 6", "larger"),
        ("[environment]\nmemory_mb = 5", 2, "[environment].memory_mb must be at least 6, not 5", "larger"),
        ("[environment]\nmemory_mb = 1e300", 2, "at most 1,073,741,824", "smaller"),
        ('[environment]\nmemory = "4M"', 2, "is 4 MiB, not 6 to 1,073,741,824", "memory_mb = 2048"),
        ('[environment]\nstorage = "9999999999G"', 2, "not 1 to 1,073,741,824", "storage_mb = 2048"),
        ("[environment]\nstorage_mb = 1099511627776", 2, "at most 1,073,741,824", "smaller"),
        ("[environment]\ncpus = 0.001", 2, "at least 0.01", "larger"),
        ("[environment]\ncpus = 1e300", 2, "at most 100,000", "smaller"),
        ("[agent]\ntimeout_sec = 1e300", 2, "at most 1,000,000,000", "smaller"),
        ("[verifier]\ntimeout_sec = 1e10", 2, "at most 1,000,000,000", "smaller"),
        ("[environment]\nbuild_timeout_sec = 1e300", 2, "at most 1,000,000,000", "smaller"),
        (
            "[environment.healthcheck]\ncommand = 'x'\nstart_period_sec = 1e300",
            3,
            "at most 1,000,000,000",
            "smaller",
        ),
        ("[environment.healthcheck]\ncommand = 'x'\nretries = 1e300", 3, "at most 1,000,000,000", "smaller"),
        (f'[environment]\nworkdir = "/{"x" * 300}"', 2, "longer than a path can be", "shorter"),
        ('[environment.env]\nA = "x\\u0000y"', 2, "[environment.env].A holds a NUL", "without"),
        (f'[environment.env]\nA = "{"x" * (128 << 10)}"', 2, "longer than the 131,071 bytes", "a file"),
        ('[environment.env]\n"A\\nB" = "x"', 1, "is not a variable's name", "letters"),
        ('[environment.env]\n"A B" = "x"', 2, "is not a variable's name", "letters"),
        ('[verifier.env]\n"a.b" = "x"', 2, "is not a variable's name", "letters"),
        ('[solution.env]\n"1st" = "x"', 2, "is not a variable's name", "letters"),
        ("[environment]\nmemory_mb = 100.5", 2, "a whole number", "memory_mb = 101"),
        ('[environment]\nmemory = "lots"', 2, "must be a size", "memory_mb = 2048"),
        (
            '[environment]\nmemory = "1G"\nmemory_mb = 2048',
            2,
            "(1024 MiB) and memory_mb (2048 MiB) differ",
            "leave",
        ),
        ('[environment]\nworkdir = "app"', 2, "must be an absolute path", '"/app"'),
        ('[environment]\nnetwork_mode = "off"', 2, '"public", "no-network", "allowlist"', "one of these"),
        ('[environment]\nallowed_hosts = ["a.b"]', 2, "only goes with an allowlist", "leave it out"),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.b/c"]',
            3,
            '"https://a.b/c" is no name, IP address or CIDR',
            "correct it",
        ),
        (
            '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b", "a.*.c"]',
            3,
            'may have a star only as a leading "*."',
            "correct it",
        ),
        *(
            (f'[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{entry}"]', 3, said, "correct it")
            for entry, said in (
                ("0xC0000202", "another spelling of an IP address: write 192.0.2.2"),
                ("0300.0.2.2", "another spelling of an IP address: write 192.0.2.2"),
                ("3221225986", "another spelling of an IP address: write 192.0.2.2"),
                ("127.1", "another spelling of an IP address: write 127.0.0.1"),
                ("1.2.3", "another spelling of an IP address: write 1.2.0.3"),
                ("*.1.2.3", "another spelling of an IP address"),
                ("1.2.3.4.5", "ends in a number, and is no IP address"),
                ("example.08", "ends in a number, and is no IP address"),
                ("Localhost.", "is the sandbox itself"),
                ("a.localhost", "is the sandbox itself"),
            )
        ),
        ('[environment]\nallow_internet = "no"', 2, "true or false", "allow_internet = true"),
        ("[environment.env]\nPORT = 80", 2, "[environment.env].PORT must be a string, not 80", 'PORT = "80"'),
        ('[environment.env]\n"A=B" = "x"', 2, "is not a variable's name", "letters"),
        ("[environment.healthcheck]\nretries = 0\ncommand = 'x'", 2, "at least 1", "larger"),
        ("[environment.healthcheck]\nretries = 2", 1, "command is missing", "write the command"),
        ('[verifier]\nenvironment_mode = "own"', 2, '"shared", "separate"', "one of these"),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
            2,
            "of its own",
            "one of",
        ),
        ("[[verifier.collect]]\nuser = 'a'", 1, "command is missing", "write the command"),
        ('artifacts = "x"', 1, "artifacts must be a list", 'artifacts = ["/path"]'),
        ('artifacts = ["/a/../b"]', 1, 'must not hold ".."', "the path itself"),
        ("[task]\nname = 'noorg'", 2, 'must be "org/name"', "letters"),
        ("[task]\nname = 'a/b'\nkeywords = 'x'", 3, "a list of strings", "keywords = ["),
        ("multi_step_reward_strategy = 'best'", 1, '"mean", "final"', "one of these"),
        ("[steps]\nname = 'a'", 1, "steps must be an array of tables", "[[steps]]"),
        (
            "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b/c'",
            4,
            "steps[1].name must be the name of one",
            "steps/",
        ),
        ("[[steps]]\nmin_reward = 1", 1, "steps[0].name is missing", "a directory in steps/"),
        ("[[steps]]\nname = 'nowhere'", 2, 'is "nowhere", and there is no', "make the directory"),
        # The scan for lines is not led astray by what only looks like a key.
        (
            '[metadata]\ntext = """\n[agent]\ntimeout_sec = 1\n"""\n[agent]\ntimeout_sec = -1',
            7,
            "greater",
            "",
        ),
        ("environment = {cpus = -1}", 1, "[environment].cpus", ""),
        ("agent.timeout_sec = -1", 1, "[agent].timeout_sec", ""),
        ('["agent"] # x\r\n"timeout_sec" = -1\r\n', 2, "[agent].timeout_sec", ""),
        (
            '[[verifier.collect]]\ncommand = "x"\nservice = "db"',
            3,
            "verifier.collect[0].service",
            "docker-compose.yaml",
        ),
        ('artifacts = [{source = "/x", service = "db"}]', 1, "artifacts[0].service", "main"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    tmp_path: Path, toml: str, line: int, said: str, remedy: str
) -> None:
    problems = problems_of(tmp_path, {"task.toml": toml})
    assert problems, "nothing was found"
    problem = next((one for one in problems if said in one.message), None)
    assert problem is not None, problems
    assert problem.file == str(tmp_path / "task.toml")
    assert problem.line == line
    assert remedy in problem.remedy
    assert problem.error_class == "task_malformed"


@pytest.mark.parametrize(
    ("toml", "files", "key"),
    [
        ("[environment]\ngpus = 2", {}, "[environment].gpus"),
        ('[environment]\nos = "windows"', {}, "[environment].os"),
        ('[environment]\nskills_dir = "/skills"', {}, "[environment].skills_dir"),
        ('[[environment.mcp_servers]]\nname = "x"', {}, "[environment].mcp_servers"),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["2001:db8::1"]',
            {},
            "[environment].allowed_hosts",
        ),
        ('[agent]\nnetwork_mode = "allowlist"', {}, "[agent].network_mode"),
        ('[agent]\nnetwork_mode = "no-network"', {}, "[agent].network_mode"),
        ('[verifier]\nnetwork_mode = "no-network"', {}, "[verifier].network_mode"),
        ('schema_version = "2.0"', {}, "schema_version"),
        (
            "",
            {"environment/docker-compose.yaml": "services: {main: {privileged: true}}"},
            "services.main.privileged",
        ),
        ("", {"trajectory.json": "{}"}, "conversation"),
        (
            '[verifier]\nenvironment_mode = "separate"',
            {"tests/docker-compose.yaml": "services: {main: {devices: [/dev/kvm]}}"},
            "services.main.devices",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, toml: str, files: dict[str, str | bytes | None], key: str
) -> None:
    problems = problems_of(tmp_path, {"task.toml": toml, **files})
    assert [problem.error_class for problem in problems] == ["unsupported"]
    assert key in problems[0].message
    assert problems[0].remedy


@pytest.mark.parametrize(
    ("files", "place", "said"),
    [
        ({"task.toml": None}, "task.toml", "is missing"),
        ({"task.toml": b"a = 1\nb = '\xff'\n"}, "task.toml:2", "is not UTF-8: byte 0xff"),
        ({"task.toml": "a = 1\r\na = 2\r\n"}, "task.toml:2", "does not parse"),
        ({"task.toml": 'a = """\nx'}, "task.toml:2", "does not parse"),
        ({"task.toml": "#" * (1 << 20) + "x"}, "task.toml", "is larger than 1,048,576 bytes"),
        ({"task.toml": "a = " + "[" * 5000 + "]" * 5000}, "task.toml", "is nested too deep"),
        ({"instruction.md": None}, "instruction.md", "is missing"),
        ({"instruction.md": " \n"}, "instruction.md", "says nothing"),
        ({"instruction.md": "<!-- canary -->\n"}, "instruction.md", "says nothing"),
        ({"instruction.md": b"Do\nit \xe4\n"}, "instruction.md:2", "is not UTF-8"),
        ({"environment/Dockerfile": None}, "environment", "is missing"),
        ({"environment/Dockerfile": None, "environment/x": ""}, "environment/Dockerfile", "is missing"),
        ({"environment/Dockerfile": ""}, "environment/Dockerfile", "is empty"),
        ({"environment/Dockerfile": b"FROM \xff"}, "environment/Dockerfile:1", "is not UTF-8"),
        ({"environment/Dockerfile": None, "environment": "x"}, "environment", "is not a directory"),
        ({"tests/test.sh": None}, "tests/test.sh", "is missing"),
        ({"tests/.harborignore": "*.sh\n"}, "tests/.harborignore", "leaves test.sh out"),
    ],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, files: dict[str, str | bytes | None], place: str, said: str
) -> None:
    [problem] = problems_of(tmp_path, files)
    where = problem.file if problem.line is None else f"{problem.file}:{problem.line}"
    assert where == str(tmp_path / place)
    assert said in problem.message
    assert str(problem).startswith(where)


@pytest.mark.parametrize("file", ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_a_directory_where_a_file_belongs_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).mkdir(parents=True)
    [problem] = problems_of(tmp_path, {file: None})
    assert problem.file == str(tmp_path / file)
    assert problem.message in {"is a directory", "is not a file"}


def test_all_problems_are_found_not_only_the_first(tmp_path: Path) -> None:
    toml = '[agent]\ntimeout_sec = -1\nuser = []\n[environment]\ncpus = "2"\ngpus = 1\n[verifier]\ntimeout_sec = 0'
    problems = problems_of(tmp_path, {"task.toml": toml, "instruction.md": "", "tests/test.sh": None})
    assert [problem.line for problem in problems if problem.line] == [6, 5, 2, 3, 8]
    assert {Path(problem.file).name for problem in problems} == {"task.toml", "instruction.md", "test.sh"}


def test_problems_of_the_other_files_are_found_behind_a_broken_task_toml(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, {"task.toml": "[", "instruction.md": None, "tests/test.sh": None})
    assert [Path(problem.file).name for problem in problems] == ["task.toml", "instruction.md", "test.sh"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for file in ("tests", "environment"):
        (tmp_path / file).mkdir()
    os.symlink("task.toml", tmp_path / "task.toml")
    task, problems = check_task(tmp_path)
    assert task is None
    assert problems[0].file == str(tmp_path / "task.toml")
    assert "leads back to itself" in problems[0].message


def test_a_path_that_is_no_task_is_named(tmp_path: Path) -> None:
    assert check_task(tmp_path / "no")[1][0].message == "does not exist"
    (tmp_path / "file").touch()
    assert check_task(tmp_path / "file")[1][0].message == "is not a directory"


def test_an_old_terminal_bench_task_is_sent_to_the_importer(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("instruction: x\n")
    [problem] = check_task(tmp_path)[1]
    assert "rollcage tasks import" in problem.remedy


def test_a_directory_whose_name_is_not_utf_8_is_a_problem_and_stops_nothing(tmp_path: Path) -> None:
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff\xfename"))
    strange.mkdir()
    task, [problem] = check_task(strange)
    assert task is None
    assert str(problem).encode()
    assert "not UTF-8" in problem.message


@pytest.mark.parametrize(
    "path",
    ["instruction.md", "task.toml", "environment", "environment/Dockerfile", "environment/.dockerignore", "tests",
     "tests/test.sh", "tests/deep/data", "solution", "solution/solve.sh", "steps/one", "steps/one/instruction.md",
     "steps/one/workdir/data", "steps/one/tests/test.sh"],
)  # fmt: skip
def test_a_link_out_of_the_task_is_refused_wherever_it_is(tmp_path: Path, path: str) -> None:
    root = tmp_path / "task"
    steps = {"steps/one/instruction.md": "Do it.", "steps/one/tests/test.sh": "", "solution/solve.sh": ""}
    toml = '[[steps]]\nname = "one"\n' if path.startswith("steps") else ""
    problems_of(root, {**steps, "task.toml": toml})
    link = root / path
    link.parent.mkdir(parents=True, exist_ok=True)
    (target := tmp_path / "elsewhere" / path).parent.mkdir(parents=True)
    if link.exists():
        link.rename(target)
    else:
        target.write_text("x")
    link.symlink_to(target)
    _, problems = check_task(root)
    said = [problem for problem in problems if "outside of the task" in problem.message]
    assert [problem.file for problem in said] == [str(link)]
    assert said[0].remedy == "put the file itself there"


def test_links_within_a_task_and_those_that_a_builder_copies_as_they_are_stay(tmp_path: Path) -> None:
    problems_of(tmp_path, {"tests/data/one": "1", "environment/app/x": ""})
    (tmp_path / "tests/two").symlink_to("data/one")
    (tmp_path / "environment/app/python").symlink_to("/usr/bin/python3")
    task, problems = check_task(tmp_path)
    assert problems == []
    assert task is not None


def test_a_pipe_among_the_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / "environment/pipe")
    os.mkfifo(tmp_path / ".git/pipe")  # no part of the task
    [problem] = problems_of(tmp_path, {})
    assert problem.file == str(tmp_path / "environment/pipe")
    assert problem.message.startswith("is a pipe")
    assert problem.error_class == "task_malformed"


def test_what_nobody_foresaw_of_one_task_is_a_problem_of_that_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(task_module, "with_context", surprise)
    [problem] = problems_of(tmp_path, {})
    assert (problem.file, problem.error_class) == (str(tmp_path), "internal_error")
    assert "RecursionError in test_task_problems.py:" in problem.message
    assert problem.message.endswith("too deep")
    assert near_misses(tmp_path) == []
    with pytest.raises(RolloutError) as raised:
        load_task(tmp_path)
    assert raised.value.error_class == "internal_error"


def test_an_interrupt_is_no_problem_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(task_module, "with_context", interrupt)
    with pytest.raises(KeyboardInterrupt):
        problems_of(tmp_path, {})
