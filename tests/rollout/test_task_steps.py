"""Tasks of several steps, and verifiers with a sandbox of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.rollout.task import check_task, load_task

ENVIRONMENT = {"environment/Dockerfile": "FROM debian:bookworm-slim\n"}
SINGLE = {**ENVIRONMENT, "instruction.md": "Do it.\n", "tests/test.sh": "exit\n"}
STEPS = {
    **ENVIRONMENT,
    "tests/test.sh": "exit\n",
    "solution/solve.sh": "exit\n",
    "steps/build/instruction.md": "# canary\nBuild.\n",
    "steps/build/tests/test_build.py": "",
    "steps/build/workdir/setup.sh": "exit\n",
    "steps/ship/instruction.md": "Ship.\n",
    "steps/ship/solution/solve.sh": "exit\n",
}
STEPS_TOML = """
multi_step_reward_strategy = "final"
[agent]
timeout_sec = 100
user = "dev"
[verifier]
timeout_sec = 50
env = {A = "1", B = "2"}
[[steps]]
name = "build"
min_reward = {reward = 0.5, speed = 1}
artifacts = ["/app/build"]
[steps.agent]
timeout_sec = 10
[steps.verifier]
user = "root"
env = {B = "3"}
[steps.healthcheck]
command = "true"
[[steps]]
name = "ship"
min_reward = 1
"""


def write(root: Path, files: dict[str, str], toml: str) -> Path:
    for path, content in {**files, "task.toml": toml}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


def test_steps_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    root = write(tmp_path, STEPS, STEPS_TOML)
    task = load_task(root)
    build, ship = task.steps
    assert task.multi_step_reward_strategy == "final"
    assert (build.name, build.instruction) == ("build", "Build.\n")
    assert (build.agent_timeout_sec, ship.agent_timeout_sec) == (10.0, 100.0)
    assert (build.agent_user, ship.agent_user) == ("dev", "dev")
    assert (build.verifier.user, ship.verifier.user) == ("root", None)
    assert (build.verifier.timeout_sec, ship.verifier.timeout_sec) == (50.0, 50.0)
    assert (build.verifier.env, ship.verifier.env) == ({"A": "1", "B": "3"}, {"A": "1", "B": "2"})
    assert (build.min_reward, ship.min_reward) == ({"reward": 0.5, "speed": 1.0}, 1.0)
    assert build.healthcheck is not None
    assert ship.healthcheck is None
    assert [artifact.source for artifact in build.artifacts] == ["/app/build"]
    assert (build.workdir, ship.workdir) == (root / "steps/build/workdir", None)


def test_a_steps_tests_go_over_the_ones_that_all_share(tmp_path: Path) -> None:
    root = write(tmp_path, STEPS, STEPS_TOML)
    build, ship = load_task(root).steps
    assert (build.shared_tests, build.tests) == (root / "tests", root / "steps/build/tests")
    assert (ship.shared_tests, ship.tests) == (None, root / "tests")
    assert (build.solution, ship.solution) == (root / "solution", root / "steps/ship/solution")


def test_a_step_without_any_test_script_is_named(tmp_path: Path) -> None:
    files = {path: text for path, text in STEPS.items() if path != "tests/test.sh"}
    _, problems = check_task(write(tmp_path, files, STEPS_TOML))
    assert {problem.file for problem in problems} == {str(tmp_path / "tests/test.sh")}


def test_two_steps_of_the_same_name_are_named(tmp_path: Path) -> None:
    toml = "[[steps]]\nname = 'build'\n[[steps]]\nname = 'build'\n"
    [problem] = check_task(write(tmp_path, STEPS, toml))[1]
    assert (problem.line, problem.message) == (4, "steps[1].name is there twice")


@pytest.mark.parametrize("mode", ['environment_mode = "separate"', "[verifier.environment]\ncpus = 2"])
def test_a_separate_verifier_runs_in_its_own_image(tmp_path: Path, mode: str) -> None:
    files = {**SINGLE, "tests/Dockerfile": "FROM debian:bookworm-slim\n"}
    del files["tests/test.sh"]
    verifier = load_task(write(tmp_path, files, f"[verifier]\n{mode}\n")).steps[0].verifier
    assert verifier.environment is not None
    assert verifier.environment.context == tmp_path / "tests"
    assert verifier.tests_in_image


def test_a_separate_verifier_can_have_an_image_by_name(tmp_path: Path) -> None:
    toml = '[verifier.environment]\ndocker_image = "python:3.13"\nmemory_mb = 512\n'
    verifier = load_task(write(tmp_path, SINGLE, toml)).steps[0].verifier
    assert verifier.environment is not None
    assert (verifier.environment.docker_image, verifier.environment.context) == ("python:3.13", None)
    assert verifier.environment.memory_mb == 512
    assert verifier.tests_in_image


def test_a_separate_verifier_without_an_image_gets_the_tasks_once_more(tmp_path: Path) -> None:
    toml = '[environment]\nmemory_mb = 256\n[verifier]\nenvironment_mode = "separate"\n'
    verifier = load_task(write(tmp_path, SINGLE, toml)).steps[0].verifier
    assert verifier.environment is not None
    assert verifier.environment.context == tmp_path / "environment"
    assert verifier.environment.memory_mb == 256
    assert not verifier.tests_in_image


def test_a_dockerfile_in_the_tests_of_a_shared_verifier_is_only_a_file(tmp_path: Path) -> None:
    files = {**SINGLE, "tests/Dockerfile": "FROM debian:bookworm-slim\n"}
    assert load_task(write(tmp_path, files, "")).steps[0].verifier.environment is None


def test_a_step_can_have_its_verifier_apart_or_not(tmp_path: Path) -> None:
    toml = """
[verifier.environment]
docker_image = "shared:1"
[[steps]]
name = "build"
[steps.verifier]
environment_mode = "shared"
[[steps]]
name = "ship"
[steps.verifier.environment]
docker_image = "own:1"
"""
    build, ship = load_task(write(tmp_path, STEPS, toml)).steps
    assert build.verifier.environment is None
    assert ship.verifier.environment is not None
    assert ship.verifier.environment.docker_image == "own:1"


def test_one_mode_for_agent_and_verifier_is_the_sandboxs(tmp_path: Path) -> None:
    toml = '[agent]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "no-network"\n'
    assert load_task(write(tmp_path, SINGLE, toml)).environment.network_mode == "no-network"


LISTED = 'network_mode = "allowlist"\nallowed_hosts = ["PyPI.org.", "*.debian.org", "198.51.100.0/24"]\n'


def test_an_allowlist_is_read_in_its_one_form(tmp_path: Path) -> None:
    environment = load_task(write(tmp_path, SINGLE, f"[environment]\n{LISTED}")).environment
    assert environment.network_mode == "allowlist"
    assert environment.allowed_hosts == ("*.debian.org", "198.51.100.0/24", "pypi.org")


def test_agent_and_verifier_in_one_sandbox_must_have_one_allowlist(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "same", SINGLE, f"[agent]\n{LISTED}[verifier]\n{LISTED.lower()}"))
    assert (task.environment.network_mode, len(task.environment.allowed_hosts)) == ("allowlist", 3)
    other = LISTED.replace("PyPI.org.", "example.org")
    [problem] = check_task(write(tmp_path / "other", SINGLE, f"[agent]\n{LISTED}[verifier]\n{other}"))[1]
    assert problem.error_class == "unsupported"
    assert "different modes or hosts" in problem.message


def test_a_separate_verifier_has_an_allowlist_of_its_own(tmp_path: Path) -> None:
    toml = f'[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "separate"\n{LISTED}'
    task = load_task(write(tmp_path, SINGLE, toml))
    own = task.steps[0].verifier.environment
    assert own is not None
    assert (own.network_mode, len(own.allowed_hosts)) == ("allowlist", 3)
    assert (task.environment.network_mode, task.environment.allowed_hosts) == ("no-network", ())
    assert task.network_modes == {"allowlist", "no-network"}


def test_a_separate_verifier_has_a_network_of_its_own(tmp_path: Path) -> None:
    toml = '[agent]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "separate"\n'
    task = load_task(write(tmp_path, SINGLE, toml))
    assert task.environment.network_mode == "no-network"
    assert task.steps[0].verifier.environment is not None
    assert task.steps[0].verifier.environment.network_mode == "public"


def test_a_step_with_a_conversation_to_go_on_with_is_unsupported(tmp_path: Path) -> None:
    files = {**STEPS, "steps/ship/trajectory.json": "{}"}
    [problem] = check_task(write(tmp_path, files, STEPS_TOML))[1]
    assert problem.error_class == "unsupported"
