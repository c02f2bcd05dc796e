"""From a job's configuration to its plan: what is left out, what is refused, and how rollouts differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.cluster.config import load_job
from rollcage.cluster.decisions import Assignment
from rollcage.cluster.errors import InputError
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import host_spec, make_plan
from rollcage.rollout.task import task_digest

Plan = Callable[..., JobPlan]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of a job over the tasks below the test's directory, which is also where the user stands."""
    monkeypatch.chdir(tmp_path)

    def make(*tasks: str, environ: dict[str, str] | None = None, **options: Any) -> JobPlan:
        settings = {"tasks": list(tasks) or ["tasks"], "agents": ["nop"], "samples": 2, **options}
        return make_plan(load_job(None, (), settings), environ or {})

    return make


def names(plan: JobPlan) -> list[str]:
    return [key.name for key in plan.task_keys()]


def test_every_task_by_every_agent_in_samples(write_task: Any, plan: Plan) -> None:
    for name in ("one", "two", "three"):
        write_task(f"tasks/{name}")
    made = plan(agents=["nop", {"name": "oracle", "samples": 5}])
    keys = list(made.rollouts())
    assert len(keys) == len(set(keys)) == 3 * (2 + 5)
    assert [(key.task, key.agent, key.sample) for key in keys][:7] == [
        ("one", "nop", 0), ("one", "nop", 1), *(("one", "oracle", sample) for sample in range(5)),
    ]  # fmt: skip
    assert {key.job for key in keys} == {made.job}


def test_two_jobs_of_one_name_are_two_jobs(write_task: Any, plan: Plan) -> None:
    write_task("tasks/one")
    assert plan(name="demo").job != plan(name="demo").job


# Variables that are not set


def test_all_missing_variables_of_all_tasks_are_in_one_message(write_task: Any, plan: Plan) -> None:
    """CASES 36."""
    for number in range(3):
        write_task(f"tasks/fine{number}")
    write_task("tasks/a", toml='[environment.env]\nKEY = "${ANTHROPIC_API_KEY}"\nX = "${X_SET:-default}"\n')
    write_task("tasks/b", toml='[verifier.env]\nJUDGE = "${JUDGE_KEY}"\nMODEL = "${JUDGE_MODEL}"\n')
    write_task("tasks/c", toml='[environment.env]\nTOKEN = "${TOKEN}"\nHOME = "${HOME_SET}"\n')
    with pytest.raises(InputError) as error:
        plan(environ={"HOME_SET": "/root"})
    lines = str(error.value).splitlines()
    assert lines[0].startswith("3 of 6 tasks need variables that are not set")
    assert "--skip-unready" in lines[0]
    assert sorted(line.strip() for line in lines[1:]) == [
        "a: ANTHROPIC_API_KEY ([environment].env.KEY)",
        "b: JUDGE_KEY ([verifier].env.JUDGE)",
        "b: JUDGE_MODEL ([verifier].env.MODEL)",
        "c: TOKEN ([environment].env.TOKEN)",
    ]


def test_a_variable_twice_on_a_line_is_named_once(write_task: Any, plan: Plan) -> None:
    """CASES 36."""
    file = write_task("tasks/a") / "environment/docker-compose.yaml"
    file.write_text("services:\n  main: {environment: {A: '${TOKEN}', B: 'x${TOKEN}'}}\n")
    with pytest.raises(InputError) as error:
        plan()
    assert str(error.value).splitlines()[1:] == [f"  a: TOKEN ({file}:2)"]


def test_with_skip_unready_the_other_tasks_run(write_task: Any, plan: Plan) -> None:
    write_task("tasks/fine")
    write_task("tasks/needy", toml='[environment.env]\nKEY = "${ANTHROPIC_API_KEY}"\n')
    assert names(plan(skip_unready=True)) == ["fine"]
    assert names(plan(environ={"ANTHROPIC_API_KEY": "k"})) == ["fine", "needy"]


def test_where_every_task_is_unready_there_is_nothing_to_run(write_task: Any, plan: Plan) -> None:
    write_task("tasks/needy", toml='[environment.env]\nKEY = "${KEY}"\n')
    with pytest.raises(InputError, match="no task is left to run"):
        plan(skip_unready=True)


def test_a_solutions_variables_are_needed_by_the_oracle_alone(write_task: Any, plan: Plan) -> None:
    write_task("tasks/one", toml='[solution.env]\nKEY = "${KEY}"\n')
    assert names(plan(agents=["nop"])) == ["one"]
    with pytest.raises(InputError, match=r"one: KEY \(\[solution\]\.env\.KEY\)"):
        plan(agents=["nop", "oracle"])


# Broken tasks


def test_a_broken_task_is_planned_beside_the_others(write_task: Any, plan: Plan) -> None:
    """CASES 26."""
    for number in range(5):
        write_task(f"tasks/fine{number}")
    bad = write_task("tasks/bad", toml="[environment\n")
    made = plan()
    assert names(made) == [*(f"fine{number}" for number in range(5)), "bad"]
    [broken] = made.broken
    assert (broken.error_class, broken.key) == ("task_malformed", ("bad", task_digest(bad)))
    assert "task.toml:2:" in broken.evidence.message
    assert sum(key.task == "bad" for key in made.rollouts()) == 2


def test_an_unsupported_task_is_called_so(write_task: Any, plan: Plan) -> None:
    root = write_task("tasks/compose")
    (root / "environment/docker-compose.yaml").write_text(
        "services: {main: {}, db: {image: x, privileged: true}}\n"
    )
    [broken] = plan().broken
    assert broken.error_class == "unsupported"


# Names


def test_tasks_of_one_name_are_called_by_their_path(write_task: Any, plan: Plan) -> None:
    write_task("x/same")
    write_task("y/same", dockerfile="FROM debian:bookworm-slim\nRUN true\n")
    write_task("y/other")
    assert sorted(names(plan("x", "y"))) == ["other", "x/same", "y/same"]


def test_copies_of_a_task_are_tasks_of_their_own(write_task: Any, plan: Plan) -> None:
    write_task("x/first")
    write_task("x/second")
    made = plan("x")
    assert names(made) == ["first", "second"]
    assert len({key.digest for key in made.task_keys()}) == 1
    assert len(set(made.rollouts())) == 4


def test_broken_tasks_of_one_name_are_told_apart_too(write_task: Any, plan: Plan) -> None:
    write_task("x/same")
    write_task("y/same", toml="[environment\n")
    write_task("z/same", toml="[environment\n")
    made = plan("x", "y", "z")
    assert names(made) == ["same", "y/same", "z/same"]
    assert len({(key.task, key.agent, key.sample) for key in made.rollouts()}) == 6


# Seeds


def seeds(plan: JobPlan) -> dict[tuple[str, str, int], int | None]:
    return {
        (key.agent, key.task, key.sample): plan.attempt(
            Assignment(key, number, "host", f"id-{number}")
        ).sampling.seed
        for key in plan.rollouts()
        for number in (1, 2)
    }


def scripted(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "answers.yaml").write_text('default: ["done"]\n')
    agents = [{"name": "bash", "label": label} for label in ("a", "b")]
    return {"agents": agents, "policy": "answers.yaml"}


def test_every_rollout_draws_with_a_seed_of_its_own_and_the_same_in_every_run(
    write_task: Any, plan: Plan, tmp_path: Path
) -> None:
    write_task("tasks/one")
    write_task("tasks/two")  # a copy
    job = scripted(tmp_path) | {"samples": 8}
    first, again, other = (seeds(plan(**job, seed=seed)) for seed in (7, 7, 8))
    assert len(set(first.values())) == len(first) == 2 * 2 * 8
    assert first == again
    assert not set(first.values()) & set(other.values())
    assert all(seed is not None and 0 <= seed < 2**31 for seed in first.values())


def test_a_fixed_sampling_seed_gives_every_rollout_its_own_too(
    write_task: Any, plan: Plan, tmp_path: Path
) -> None:
    write_task("tasks/one")
    write_task("tasks/two")
    job = scripted(tmp_path) | {"samples": 8}
    policy = {"kind": "scripted", "file": "answers.yaml", "sampling": {"seed": 5}}
    given = job | {"policy": "fixed", "policies": {"fixed": policy}}
    fixed, another_job = (seeds(plan(**given, seed=seed)) for seed in (7, 8))
    assert len(set(fixed.values())) == len(fixed) == 2 * 2 * 8
    assert fixed == another_job
    assert not set(fixed.values()) & set(seeds(plan(**job, seed=7)).values())


def test_a_retry_draws_as_the_first_attempt_did(write_task: Any, plan: Plan, tmp_path: Path) -> None:
    write_task("tasks/one")
    made = plan(**scripted(tmp_path))
    key = next(made.rollouts())
    first, second = (made.attempt(Assignment(key, number, "host", f"id-{number}")) for number in (1, 2))
    assert first.sampling == second.sampling
    assert (first.number, second.number, first.attempt_id, second.attempt_id) == (1, 2, "id-1", "id-2")


def test_an_agent_is_told_what_the_job_says(write_task: Any, plan: Plan, tmp_path: Path) -> None:
    write_task("tasks/one")
    made = plan(
        **scripted(tmp_path),
        agent_timeout_sec=9.0,
        agent_timeout_multiplier=2.0,
        pass_threshold=0.5,
        max_quarantined_tasks=3,
    )
    spec = made.attempt(Assignment(next(made.rollouts()), 1, "host", "id-1"))
    assert (spec.agent, spec.agent_label, spec.sample, spec.task.name) == ("bash", "a", 0, "one")
    assert (spec.agent_timeout_sec, spec.agent_timeout_multiplier, spec.pass_threshold) == (9.0, 2.0, 0.5)
    assert made.max_quarantined_tasks == 3
    assert made.agent("b").policy == "answers"


def test_a_host_is_made_with_the_jobs_sandbox_settings_and_the_variables_that_tasks_name(
    write_task: Any, tmp_path: Path
) -> None:
    task = write_task("tasks/one")
    with (task / "task.toml").open("a") as toml:
        toml.write('\n[solution.env]\nTOKEN = "${ASKED_FOR}"\n')
    overrides = ["sandbox.pids=99", "sandbox.network.cidr=10.9.0.0/16", "sandbox.memory_mb=512"]
    overrides += ["sandbox.image_disk_gb=1.5", "sandbox.ca_bundle=/ca.pem", "sandbox.proxies.http=http://p:1"]
    config = load_job(None, overrides, {"tasks": [str(tmp_path / "tasks")], "agents": ["nop"]})
    environ = {"ASKED_FOR": "value", "SECRET": "of nobody's concern"}
    plan = make_plan(config, environ)
    spec = host_spec(config, plan, {}, environ)
    assert (spec.job, spec.sandbox.pids, spec.sandbox.network_cidr) == (plan.job, 99, "10.9.0.0/16")
    assert (spec.sandbox.memory_mb, spec.sandbox.environ) == (512, {"ASKED_FOR": "value"})
    assert (spec.sandbox.image_disk_gb, spec.sandbox.ca_bundle) == (1.5, "/ca.pem")
    assert spec.sandbox.proxies.variables()["http_proxy"] == "http://p:1"
    assert spec.sandbox.network_modes == {task.environment.network_mode for task in plan.tasks.values()}
