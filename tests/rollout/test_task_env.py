"""Variables that a task asks of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.rollout.outcome import TaskError
from rollcage.rollout.task import (
    Environment,
    Task,
    load_task,
    missing_env,
    redactor,
    referenced_env,
    resolve_env,
)


@pytest.mark.parametrize(
    ("value", "environ", "resolved"),
    [
        ("plain", {}, "plain"),
        ("${V}", {"V": "x"}, "x"),
        ("${V}", {"V": ""}, ""),
        ("${V:-d}", {}, "d"),
        ("${V:-d}", {"V": "x"}, "x"),
        ("${V:-d}", {"V": ""}, ""),
        ("${V:-}", {}, ""),
        ("${V:-a:-b}", {}, "a:-b"),
        ("http://${V}/", {"V": "x"}, "http://${V}/"),
        ("$V", {"V": "x"}, "$V"),
    ],
)
def test_a_reference_is_the_whole_of_a_value(value: str, environ: dict[str, str], resolved: str) -> None:
    assert resolve_env({"K": value}, environ) == {"K": resolved}


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(TaskError, match="not set: A, B"):
        resolve_env({"X": "${B}", "Y": "${A}", "Z": "${C:-1}"}, {})


TOML = """
[environment.env]
A = "${HOST_A}"
SET = "${HOST_SET}"
[verifier.env]
KEY = "${ANTHROPIC_API_KEY}"
DEFAULT = "${NOT_SET:-x}"
[verifier.environment]
docker_image = "x"
[verifier.environment.env]
OWN = "${HOST_OWN}"
[solution.env]
S = "${HOST_S}"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_all_that_is_missing_is_named_with_its_place(tmp_path: Path) -> None:
    files = {"task.toml": TOML, "instruction.md": "x", "environment/Dockerfile": "FROM x"}
    task = load_task(write(tmp_path, files))
    assert missing_env(task, {"HOST_SET": ""}) == [
        ("HOST_A", "[environment].env.A"),
        ("ANTHROPIC_API_KEY", "[verifier].env.KEY"),
        ("HOST_OWN", "[verifier.environment].env.OWN"),
        ("HOST_S", "[solution].env.S"),
    ]
    assert ("HOST_S", "[solution].env.S") not in missing_env(task, {}, solution=False)
    everything = dict.fromkeys(("HOST_A", "HOST_SET", "ANTHROPIC_API_KEY", "HOST_OWN", "HOST_S"), "x")
    assert missing_env(task, everything) == []


def test_a_steps_verifier_is_looked_at_too(tmp_path: Path) -> None:
    toml = "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n[steps.verifier.env]\nX = '${HOST_X}'\n"
    files = {"task.toml": toml, "environment/Dockerfile": "FROM x", "tests/test.sh": ""}
    steps = {"steps/a/instruction.md": "x", "steps/b/instruction.md": "x"}
    task = load_task(write(tmp_path, {**files, **steps}))
    assert missing_env(task, {}) == [("HOST_X", "[steps.b.verifier].env.X")]


def test_a_host_is_given_the_variables_that_a_task_names_and_no_other(tmp_path: Path) -> None:
    task = Task(
        "t",
        tmp_path,
        "",
        Environment(None, "image", env={"A": "${KEY}", "B": "plain", "C": "${MODE:-fast}"}),
        (),
        solution_env={"D": "${TOKEN}"},
    )
    assert referenced_env(task) == {"KEY", "MODE", "TOKEN"}


def test_a_hosts_values_are_taken_out_of_texts_that_are_kept(tmp_path: Path) -> None:
    task = Task(
        "t", tmp_path, "", Environment(None, "image", env={"A": "${KEY}", "B": "${LONG}", "C": "${PORT}"}), ()
    )
    environ = {"KEY": "s3cret-key", "LONG": "s3cret-key-longer", "PORT": "8080", "OTHER": "not-named-here"}
    redact = redactor(task, environ)
    assert (
        redact("a s3cret-key, s3cret-key-longer: 8080 not-named-here")
        == "a ${KEY}, ${LONG}: 8080 not-named-here"
    )
    assert redact("ret-key is what is left of it, ey is not") == "${KEY} is what is left of it, ey is not"
    assert redactor(task, {"KEY": ""})("as it is") == "as it is"
    assert redact("S3CRET-KEY-longer, s3Cret-Key") == "${LONG}, ${KEY}"
    assert redact("CRET-KEY is cut") == "${KEY} is cut"
