"""What is wrong with a task's Dockerfile is told without an engine: all of it, with file, line and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.rollout.sandbox.lint import dockerfile_problems
from rollcage.rollout.sandbox.modes import Chmod
from rollcage.rollout.sandbox.words import WordError, expand


def found(tmp_path: Path, text: str, target: str | None = None) -> list[tuple[int | None, str, str]]:
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "there").write_text("")
    problems = dockerfile_problems(tmp_path, target=target)
    assert all(problem.file == str(tmp_path / "Dockerfile") and problem.remedy for problem in problems)
    return [(problem.line, problem.error_class, problem.message) for problem in problems]


def test_every_missing_source_is_named(tmp_path: Path) -> None:
    text = "FROM a\nCOPY there nope /\nRUN true\nADD gone*/x /x\nCOPY gone.txt \\\n  also /y/\n"
    assert found(tmp_path, text) == [
        (2, "image_build", "COPY source nope is not in the build context"),
        (5, "image_build", "COPY source gone.txt is not in the build context"),
    ]


def test_the_first_thing_that_is_no_dockerfile_is_named(tmp_path: Path) -> None:
    ((line, error_class, message),) = found(tmp_path, "FROM a\nRUN <<EOF\necho\n")
    assert (line, error_class) == (2, "dockerfile_parse")
    assert "never closed" in message


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("ARG V\nFROM python:${V}-slim\n", None, ""),
        ("ARG V\nFROM python:${V}\n", 2, "python:"),
        ("FROM a\nARG V=1\nFROM python:${V}\n", 3, "python:"),
        ("ARG V=1\nFROM python:${V}\n", None, ""),
        ("FROM a AS build\nFROM b\nCOPY --from=biuld /x /\n", 3, "biuld"),
        ("FROM a AS build\nFROM b\nCOPY --from=nginx /x /\n", None, ""),
        ("FROM a\nCOPY --from=2 /x /\n", 2, "no earlier stage"),
        ("FROM a\nRUN --mount=from=late,target=/x true\nFROM b AS late\nCOPY --from=0 /x /\n", 2, "late"),
        ("FROM a\nRUN --mount=type=secret,id=x true\n", 2, "secret"),
        ("FROM a\nRUN --mount=type=cache,target=/x true\n", None, ""),
        ("FROM a\nCOPY ${HOME_OF_BASE}/x /\n", None, ""),
        ("FROM a\nARG D=nope\nCOPY ${D} /\n", 3, "not in"),
        ("FROM a AS x\nCOPY nope /\nFROM b\n", None, ""),
        ("", None, ""),
    ],
)
def test_what_the_builder_would_trip_over(tmp_path: Path, text: str, line: int | None, word: str) -> None:
    problems = found(tmp_path, text)
    assert [problem[0] for problem in problems] == ([] if line is None else [line])
    assert all(word in problem[2] for problem in problems)


def test_a_target_is_looked_up(tmp_path: Path) -> None:
    text = "FROM a AS one\nFROM b AS two\nCOPY nope /\n"
    assert found(tmp_path, text, "one") == found(tmp_path, text, "0") == []
    assert found(tmp_path, text, "two")[0][0] == 3
    assert "no stage 'three'" in found(tmp_path, text, "three")[0][2]


def test_no_dockerfile_is_for_others_to_tell(tmp_path: Path) -> None:
    assert dockerfile_problems(tmp_path) == []


def test_no_engine_is_needed() -> None:
    code = "import sys, rollcage.rollout.sandbox.lint\nassert 'docker' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("letters", "before", "after", "folder"),
    [
        ("755", 0o640, 0o755, 0o755),
        ("1777", 0o640, 0o1777, 0o1777),
        ("u+x", 0o640, 0o740, 0o740),
        ("+x", 0o640, 0o751, 0o751),
        ("a=rX", 0o640, 0o444, 0o555),
        ("a=rX", 0o750, 0o555, 0o555),
        ("go-rwx,u=rw", 0o777, 0o600, 0o600),
        ("g=u,o=", 0o754, 0o770, 0o770),
        ("u+s,+t", 0o755, 0o5755, 0o5755),
        ("u-w+x", 0o640, 0o540, 0o540),
    ],
)
def test_modes_in_letters_are_those_of_chmod(letters: str, before: int, after: int, folder: int) -> None:
    mode = Chmod.parse(letters)
    assert (mode.of(before, is_folder=False), mode.of(before, is_folder=True)) == (after, folder)


@pytest.mark.parametrize("text", ["", "8", "17777", "u", "x", "u+z", "u+r;g", "rwxr-xr-x"])
def test_a_mode_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        Chmod.parse(text)


def doubling(lines: int) -> str:
    return "FROM a\nENV A0=aaaaaaaaaa\n" + "".join(f"ENV A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, lines))


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (doubling(24), 19, "more than 1 MiB"),
        ("FROM a\nENV B=" + "${X:-" * 3000 + "}" * 3000 + "\n", 2, "nested"),
    ],
    ids=["doubling", "nested"],
)
def test_variables_cannot_take_the_machine_along(tmp_path: Path, text: str, line: int, word: str) -> None:
    ((found_line, error_class, message),) = found(tmp_path, text)
    assert (found_line, error_class) == (line, "dockerfile_parse")
    assert word in message


def test_a_pattern_is_put_to_short_values_only() -> None:
    with pytest.raises(WordError, match="more than 10000 characters"):
        expand("${A#a*b}", {"A": "a" * 20_000})
