"""Old Terminal-Bench tasks: `import_terminal_bench` writes a Harbor task directory from one.

| Terminal-Bench | Harbor |
|---|---|
| `task.yaml` | `instruction.md`, `task.toml` |
| `docker-compose.yaml`, its build context | `environment/`, settings in `task.toml` |
| a `docker-compose.yaml` of several services | `environment/docker-compose.yaml`, `client` called `main` |
| `solution.sh`, or commands in `solution.yaml` | `solution/solve.sh` |
| `run-tests.sh`, `tests/` | `tests/`, with a `test.sh` that runs the former and leaves its verdict |

The harness put `run-tests.sh` and what is in `tests/` into `/tests`, and read the verdict from the output with
the parser that `parser_name` says (pytest's short test summary, if none): see `terminal_bench_test.sh`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollcage.rollout.task import Problem, check_task
from rollcage.rollout.task_toml import read_text
from rollcage.rollout.terminal_bench_compose import Service, as_harbor, mounted_files, only_service
from rollcage.rollout.terminal_bench_context import copy_context
from rollcage.rollout.toml_text import toml_text

PARSERS = ("pytest", "swebench", "sweperf", "mlebench")
_TEST_SCRIPT = Path(__file__).with_name("terminal_bench_test.sh")
_CONFIGURATION = frozenset(
    {"instruction", "descriptions", "max_agent_timeout_sec", "max_test_timeout_sec", "disable_asciinema"}
)
"""Keys of task.yaml that do not go into `[metadata]`."""


@dataclass(frozen=True)
class ImportReport:
    """What became of one task. `problems`: what the Harbor task lacks, or what is wrong with it, by file.

    `notes`: what whoever runs it should know. Nothing is at `target` where it was not `written`.
    """

    source: Path
    target: Path
    written: bool
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Import:
    source: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, file: str, message: str, remedy: str, *, unsupported: bool = False) -> None:
        kind = "unsupported" if unsupported else "task_malformed"
        self.problems.append(Problem(str(self.source / file), None, message, remedy, kind))


def import_terminal_bench(source: Path, target: Path, *, overwrite: bool = False) -> ImportReport:
    """Write the Harbor task of the old Terminal-Bench task `source` at `target`.

    It is written whole or not at all. A task that asks for more than rollcage does is written all the same, and
    the report says what that is.

    Raises `FileExistsError` where there is something at `target`, unless `overwrite` is set and it is a task or
    an empty directory; `OSError` where files cannot be read or written.
    """
    if os.path.lexists(target) and not (overwrite and _may_go(target)):
        raise FileExistsError(f"{target} exists already" + (", and is not a task" if overwrite else ""))
    work = _Import(source)
    config = _read_yaml(work, "task.yaml")
    compose = _read_yaml(work, "docker-compose.yaml")
    if not (source / "run-tests.sh").is_file():
        work.problem("run-tests.sh", "is missing", "without it there is no verdict")
    if config is None or compose is None or work.problems:
        return ImportReport(source, target, False, tuple(work.problems))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".importing-") as scratch:
        made = Path(scratch, "task")
        made.mkdir(mode=0o755)
        if _write(work, config, compose, made):
            if os.path.lexists(target):
                shutil.rmtree(target)
            made.rename(target)
    if not target.is_dir():
        return ImportReport(source, target, False, tuple(work.problems), tuple(work.notes))
    _, problems = check_task(target)
    return ImportReport(source, target, True, (*work.problems, *problems), tuple(work.notes))


def _may_go(target: Path) -> bool:
    return (
        target.is_dir()
        and not target.is_symlink()
        and (os.path.lexists(target / "task.toml") or not any(target.iterdir()))
    )


def _read_yaml(work: _Import, name: str) -> dict[str, Any] | None:
    file = work.source / name
    text = read_text(file, work.problems)
    if text is None:
        return None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        said = getattr(error, "problem", None) or str(error)
        work.problems.append(Problem(str(file), line, f"does not parse: {said}", "correct the YAML syntax"))
        return None
    if not isinstance(values, dict):
        work.problem(name, "is not a table", "is it the right file?")
        return None
    return values


def _write(work: _Import, config: dict[str, Any], compose: dict[str, Any], made: Path) -> bool:
    instruction = _instruction(work, config)
    if instruction is None:
        return False
    try:
        service = only_service(compose)
    except (ValueError, TypeError, AttributeError) as error:
        work.problem("docker-compose.yaml", f"cannot be read: {error}", "correct it, or write a Dockerfile")
        return False
    canary = _canary(work.source / "task.yaml")
    environment: dict[str, Any] = {}
    if service is None:
        mounted = mounted_files(compose)
        copy_context(work.source, made / "environment", Service(), work.notes, mounted)
        _write_compose(made, as_harbor(compose))
    else:
        for key, reason in service.left_out.items():
            remedy = "see whether the task can do without"
            work.problem("docker-compose.yaml", f"{key} {reason}", remedy, unsupported=True)
        environment = _environment(service)
        try:
            if service.image is None or service.mounts:
                copy_context(work.source, made / "environment", service, work.notes)
            else:
                environment["docker_image"] = service.image
            if service.kept:
                (made / "environment").mkdir(exist_ok=True)
                _write_compose(made, {"services": {"main": service.kept}})
        except ValueError as error:
            work.problem("docker-compose.yaml", str(error), "move what it needs into the task")
            return False
    (made / "instruction.md").write_text(
        "".join(f"<!-- {line} -->\n" for line in canary) + instruction.rstrip("\n") + "\n"
    )
    try:
        settings = _task_toml(work, config, environment, service)
    except TypeError as error:
        work.problem("task.yaml", f"holds what task.toml cannot: {error}", "write it as text")
        return False
    (made / "task.toml").write_text("".join(f"# {line}\n" for line in canary) + settings)
    _write_solution(work, made / "solution")
    _write_tests(work, config, made / "tests")
    return True


def _write_compose(made: Path, values: dict[str, Any]) -> None:
    text = yaml.safe_dump(values, sort_keys=False)
    (made / "environment" / "docker-compose.yaml").write_text(text)


def _instruction(work: _Import, config: dict[str, Any]) -> str | None:
    """The instruction, or the description that it names: older tasks have several, by key."""
    instruction, descriptions = config.get("instruction"), config.get("descriptions")
    if isinstance(descriptions, list):
        texts = {
            item.get("key"): item.get("description") or item.get("instruction")
            for item in descriptions
            if isinstance(item, dict)
        }
        key = instruction if instruction in texts else "base" if "base" in texts else next(iter(texts), None)
        if len(texts) > 1:
            work.notes.append(f"of the descriptions {', '.join(map(str, texts))} only {key} is used")
        instruction = texts.get(key, instruction)
    if not isinstance(instruction, str) or not instruction.strip():
        work.problem("task.yaml", "instruction is missing", "write what the agent is to do")
        return None
    return instruction


def _canary(file: Path) -> list[str]:
    """The canary comments at the head of task.yaml: they keep the task out of training data here as well."""
    lines: list[str] = []
    for line in file.read_text("utf-8-sig").splitlines():
        if not line.startswith("#"):
            break
        if "canary" in line.lower():
            lines.append(line.strip("# "))
    return lines


def _environment(service: Service) -> dict[str, Any]:
    return {
        "cpus": service.cpus,
        "memory_mb": service.memory_mb,
        "gpus": service.gpus or None,
        "workdir": service.workdir,
        "network_mode": service.network_mode,
        "env": service.env or None,
        "healthcheck": service.healthcheck,
    }


def _task_toml(
    work: _Import, config: dict[str, Any], environment: dict[str, Any], service: Service | None
) -> str:
    user = service.user if service is not None else None
    tables = {
        "metadata": {key: value for key, value in config.items() if key not in _CONFIGURATION},
        "agent": {"timeout_sec": _seconds(work, config, "max_agent_timeout_sec", 360.0), "user": user},
        "verifier": {"timeout_sec": _seconds(work, config, "max_test_timeout_sec", 60.0), "user": user},
        "environment": environment,
    }
    return toml_text({"schema_version": "1.4", "source": "terminal-bench", **tables})


def _seconds(work: _Import, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        work.problem(
            "task.yaml", f"{key} must be a number above 0, not {value!r}", f"write {key}: {default:g}"
        )
        return default
    return float(value)


def _write_solution(work: _Import, directory: Path) -> None:
    script, commands = work.source / "solution.sh", work.source / "solution.yaml"
    if script.is_file():
        directory.mkdir()
        content = script.read_bytes()
        # The harness ran it with bash, whatever its first line says; ours is run as a program.
        directory.joinpath("solve.sh").write_bytes(
            content if content.startswith(b"#!") else b"#!/bin/bash\n" + content
        )
    elif commands.is_file():
        text = _script_of(work, commands)
        if text is None:
            return
        directory.mkdir()
        directory.joinpath("solve.sh").write_text(text)
    else:
        work.notes.append("there is no solution: the oracle cannot be run on it")
        return
    directory.joinpath("solve.sh").chmod(0o755)


def _script_of(work: _Import, file: Path) -> str | None:
    """The commands of solution.yaml as one script; None (and a problem) where they are keys for a program.

    A command that was waited for, and ended with Enter, is a line of a script. One that was not waited for may
    be an editor that takes what follows, and no script can tell.
    """
    text = read_text(file, work.problems)
    try:
        entries = yaml.safe_load(text) if text is not None else None
    except yaml.YAMLError:
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        work.problem("solution.yaml", "is not a list of commands", "write a solution/solve.sh")
        return None
    lines = ["#!/bin/bash"]
    for number, entry in enumerate(entries, start=1):
        command = entry.get("command")
        waited = entry.get("block", False) is True and entry.get("append_enter", True) is True
        if not isinstance(command, str) or not (
            waited or (number == len(entries) and entry.get("append_enter", True))
        ):
            work.problem(
                "solution.yaml",
                f"command {number} is typed at a running program, which a script cannot do",
                "write a solution/solve.sh",
                unsupported=True,
            )
            return None
        lines.append(command)
    return "\n".join(lines) + "\n"


def _write_tests(work: _Import, config: dict[str, Any], directory: Path) -> None:
    directory.mkdir()
    shutil.copy(work.source / "run-tests.sh", directory / "run-tests.sh")
    if (work.source / "tests").is_dir():
        shutil.copytree(work.source / "tests", directory, symlinks=True, dirs_exist_ok=True)
    script = directory / "test.sh"
    if os.path.lexists(script):
        script.rename(directory / "test.sh.task")
    parser = config.get("parser_name", PARSERS[0])
    if parser not in PARSERS:
        work.notes.append(f"the parser {parser} is not known: the exit status of run-tests.sh is the verdict")
        parser = "exit-status"
    if config.get("run_tests_in_same_shell"):
        work.notes.append("its tests ran in the agent's own shell; here they get a fresh one, in the workdir")
    script.write_text(_TEST_SCRIPT.read_text().replace("@PARSER@", parser))
    script.chmod(0o755)
