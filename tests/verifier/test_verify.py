"""What a user would say of a verifier that does its work: rewards read, tests run as asked, failures named."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollcage.rollout.outcome import SandboxError, TaskError, VerifierError
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.task import Artifact, Task
from rollcage.rollout.trajectory import Reward
from rollcage.verifier.verify import TestsVerifier

pytestmark = pytest.mark.docker

REWARD = "/logs/verifier/reward.txt"
MakeTask = Callable[..., Task]


async def verify(sandbox: Sandbox, task: Task, verifier: TestsVerifier | None = None) -> Reward:
    return await (verifier or TestsVerifier()).verify(sandbox, task, task.steps[0])


async def refused(sandbox: Sandbox, task: Task, error_class: str) -> VerifierError:
    with pytest.raises(VerifierError) as caught:
        await verify(sandbox, task)
    assert caught.value.error_class == error_class, caught.value
    return caught.value


async def agent(sandbox: Sandbox, command: str) -> None:
    """Let the agent do something as root."""
    result = await (await sandbox.shell("root")).run(command, timeout=30)
    assert result.exit_code == 0, result.text


async def test_the_tests_see_the_agents_work_and_their_reward_counts(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    await agent(sandbox, "echo hello >/app/greeting")
    task = make_task(
        f'pwd; cat /tests/expected\n[ "$(cat greeting)" = "$(cat /tests/expected)" ] && echo 1 >{REWARD}\n',
        files={"expected": "hello\n"},
    )
    reward = await verify(sandbox, task)
    assert (reward.value, reward.source) == (1.0, "reward.txt")
    assert reward.output_tail == "/app\nhello\n"
    assert await sandbox.read("/logs/verifier/test-stdout.txt") == b"/app\nhello\n"


async def test_the_exit_code_of_the_tests_is_ignored(sandbox: Sandbox, make_task: MakeTask) -> None:
    error = await refused(sandbox, make_task("echo all passed; exit 0"), "reward_missing")
    assert error.evidence.exit_code == 0
    assert error.evidence.log_tail == "all passed\n"
    assert (await verify(sandbox, make_task(f"echo 1.0 >{REWARD}; exit 1"))).value == 1.0


async def test_reward_json_wins_and_test_ids_are_kept(sandbox: Sandbox, make_task: MakeTask) -> None:
    script = """cd /logs/verifier; echo 0 >reward.txt; echo '{"tests": 1, "style": 0.5}' >reward.json
    echo '{"results": {"tests": [{"name": "test_a", "status": "passed"}]}}' >ctrf.json"""
    reward = await verify(sandbox, make_task(script), TestsVerifier(reward_key="style"))
    assert (reward.value, reward.source) == (0.5, "reward.json")
    assert reward.values == {"tests": 1.0, "style": 0.5}
    assert reward.test_ids == ("test_a",)


@pytest.mark.parametrize(
    "script",
    [
        f"ln -s /etc/hostname {REWARD}",
        f"mkdir {REWARD}",
        f"mkfifo {REWARD}",
        f"truncate -s 2G {REWARD}",
        f"echo 1 >{REWARD}; mkdir /logs/verifier/reward.json",
        f"echo True >{REWARD}",
    ],
)
async def test_a_reward_that_is_no_small_file_with_a_number_is_malformed(
    sandbox: Sandbox, make_task: MakeTask, script: str
) -> None:
    error = await refused(sandbox, make_task(script), "reward_malformed")
    assert "reward." in str(error)


@pytest.mark.parametrize("shebang", [b"#!/bin/bash", b"#!/usr/bin/env bash", b""])
async def test_a_script_with_windows_line_ends_runs(
    sandbox: Sandbox, make_task: MakeTask, shebang: bytes
) -> None:
    script = shebang + f"\r\nfor i in 1; do\r\n  echo 1 >{REWARD}\r\ndone\r\n".encode()
    assert (await verify(sandbox, make_task(script))).value == 1.0


async def test_a_script_without_a_shebang_runs_as_a_shell_script(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    assert (await verify(sandbox, make_task(f"echo 1 >{REWARD}\n", shebang=""))).value == 1.0


async def test_an_interpreter_that_the_image_does_not_have_is_named(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    error = await refused(sandbox, make_task("echo 1\n", shebang="#!/usr/bin/zsh\n"), "verifier_crash")
    assert "#!/usr/bin/zsh" in str(error)
    assert error.evidence.exit_code in (126, 127)


async def test_a_script_that_is_not_there_is_a_crash(sandbox: Sandbox, make_task: MakeTask) -> None:
    await refused(sandbox, make_task(None, files={"test_outputs.py": ""}), "verifier_crash")


async def test_a_script_that_is_killed_is_a_crash(sandbox: Sandbox, make_task: MakeTask) -> None:
    error = await refused(sandbox, make_task("kill -9 $$"), "verifier_crash")
    assert "signal 9" in str(error)


async def test_an_agent_that_deleted_the_system_has_killed_its_sandbox(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    shell = await sandbox.shell("root")
    await shell.run("rm -rf /usr /bin /lib /lib64 /etc /app 2>/dev/null", timeout=30)
    with pytest.raises(SandboxError) as caught:
        await verify(sandbox, make_task())
    assert caught.value.error_class == "agent_killed_sandbox"


async def test_files_that_harborignore_names_are_not_sent(sandbox: Sandbox, make_task: MakeTask) -> None:
    files = {"sub/secret.key": "x", "sub/kept": "x", ".harborignore": "*.key\n"}
    reward = await verify(
        sandbox, make_task(f"cd /tests; find . -type f | sort; echo 1 >{REWARD}", files=files)
    )
    assert reward.output_tail == "./sub/kept\n./test.sh\n"


async def test_shared_tests_go_below_the_steps_own(sandbox: Sandbox, make_task: MakeTask) -> None:
    shared = make_task("echo shared", files={"helper": "shared", "both": "shared"}).steps[0].tests
    task = make_task(f"cat /tests/helper /tests/both; echo 1 >{REWARD}", files={"both": "own"})
    task = replace(task, steps=(replace(task.steps[0], shared_tests=shared),))
    assert (await verify(sandbox, task)).output_tail == "sharedown"


async def test_the_verifier_gets_its_env_with_variables_of_the_host(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    env = {"PLAIN": "it's $HOME", "KEY": "${TOKEN}", "MODEL": "${MODEL:-small}"}
    task = make_task(f'printf "%s|" "$PLAIN" "$KEY" "$MODEL"; echo 1 >{REWARD}', env=env)
    reward = await verify(sandbox, task, TestsVerifier(environ={"TOKEN": "t0"}))
    assert reward.output_tail == "it's $HOME|t0|small|"
    with pytest.raises(TaskError, match="TOKEN"):
        await verify(sandbox, task)


async def test_the_verifier_runs_as_the_tasks_user(sandbox: Sandbox, make_task: MakeTask) -> None:
    task = make_task(f"id -un; echo $HOME; ls /tests; echo 1 >{REWARD}", user="tester")
    os.chmod(task.steps[0].tests / "test.sh", 0o600)
    assert (await verify(sandbox, task)).output_tail == "tester\n/home/tester\ntest.sh\n"


async def test_only_the_end_of_a_long_output_is_kept(sandbox: Sandbox, make_task: MakeTask) -> None:
    reward = await verify(sandbox, make_task(f"seq 1 200000; echo the end; echo 1 >{REWARD}"))
    assert len(reward.output_tail) == 4096
    assert reward.output_tail.endswith("200000\nthe end\n")


async def test_a_daemon_that_holds_the_scripts_pipe_ends_by_the_timeout(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    script = f"(echo started; setsid sleep 1000 &) 2>&1 | tee /logs/verifier/log; echo 1 >{REWARD}"
    error = await refused(sandbox, make_task(script, timeout_sec=2.0), "verifier_timeout")
    assert error.evidence.log_tail == "started\n"
    assert b"sleep\x001000" not in await processes(sandbox)


async def test_a_daemon_that_the_script_leaves_does_not_hold_us_and_cannot_change_the_reward(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    script = f"echo 1 >{REWARD}; setsid sh -c 'sleep 1000; echo 0 >{REWARD}' & exit 0"
    assert (await verify(sandbox, make_task(script, timeout_sec=30.0))).value == 1.0
    assert b"sleep\x001000" not in await processes(sandbox)


async def test_what_a_step_was_graded_with_is_gone_before_the_next(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    task = make_task(f"echo 0.5 >{REWARD}", files={"answers": "42"})
    first = task.steps[0]
    second = replace(make_task("true").steps[0], name="second")
    task = replace(task, steps=(first, second))
    verifier = TestsVerifier()
    reward = await verifier.verify(sandbox, task, first)
    assert verifier.passed_floor(replace(first, min_reward=0.5), reward)
    assert not verifier.passed_floor(replace(first, min_reward=0.75), reward)
    await agent(sandbox, '[ -z "$(ls -A /tests /logs/verifier | grep -v :)" ]')
    with pytest.raises(VerifierError, match="reward_missing"):
        await verifier.verify(sandbox, task, second)
    assert verifier.combine(task, [(first, reward)]).skipped_steps == ("second",)


async def test_a_separate_verifier_gets_the_artifacts_and_nothing_else(
    make_sandbox: Callable[..., Awaitable[Sandbox]], make_task: MakeTask, tmp_path: Path
) -> None:
    agents, verifiers = await make_sandbox(), await make_sandbox()
    await agent(
        agents,
        "mkdir -p /logs/artifacts /data/out /tests; echo a >/logs/artifacts/a; echo b >/data/out/b;"
        " echo skip >/data/out/x.log; cp /bin/true /data/out/setuid; chmod 4755 /data/out/setuid;"
        " echo secret >/app/left; echo planted >/tests/x",
    )
    script = f"""cat /logs/artifacts/a /data/out/b /data/collected; ls /data/out /tests; stat -c %a /data/out/setuid
    [ -e /app/left ] || echo 1 >{REWARD}"""
    task = make_task(script, collect=({"command": "echo c >/data/collected", "timeout_sec": 10},))
    task = replace(task, artifacts=artifacts("/data/out", "/data/collected", "/no/such"))
    reward = await TestsVerifier().verify_separate(agents, verifiers, task, task.steps[0])
    assert reward.output_tail.split() == [
        "a",
        "b",
        "c",
        "/data/out:",
        "b",
        "setuid",
        "/tests:",
        "test.sh",
        "755",
    ]
    assert reward.value == 1.0


async def test_a_verifier_image_may_bring_its_own_tests(
    make_sandbox: Callable[..., Awaitable[Sandbox]], make_task: MakeTask
) -> None:
    agents, verifiers = await make_sandbox(), await make_sandbox()
    await verifiers.write({"/tests/test.sh": f"#!/bin/sh\necho 0.25 >{REWARD}\n".encode()}, mode=0o755)
    task = make_task("echo the local script is not sent", tests_in_image=True)
    assert (await TestsVerifier().verify_separate(agents, verifiers, task, task.steps[0])).value == 0.25


def artifacts(*sources: str) -> tuple[Artifact, ...]:
    return tuple(Artifact(source, exclude=("*.log",)) for source in sources)


async def processes(sandbox: Sandbox) -> bytes:
    result = await (await sandbox.shell("root")).run("cat /proc/[0-9]*/cmdline", timeout=10)
    return result.stdout


async def test_a_service_of_the_agent_is_stopped_unless_its_task_keeps_processes(
    make_sandbox: Callable[..., Awaitable[Sandbox]], make_task: MakeTask
) -> None:
    """The service answers on a pipe; its tests hang for as long as they may where nobody does."""
    service = "mkfifo /tmp/alive; (while :; do echo here >/tmp/alive; done) & sleep 0.1"
    test = f"if IFS= read -r -t 3 line <>/tmp/alive; then echo 1; else echo 0; fi >{REWARD}\n"
    task = make_task("#!/bin/bash\n" + test)
    for verifier, value in ((TestsVerifier(), 0.0), (TestsVerifier(keep_processes=("t*", task.name)), 1.0)):
        sandbox = await make_sandbox()
        await agent(sandbox, service)
        assert (await verify(sandbox, task, verifier)).value == value


async def test_a_kept_service_cannot_hold_up_the_agents_own_shell(
    make_sandbox: Callable[..., Awaitable[Sandbox]], make_task: MakeTask
) -> None:
    """An agent's command in hand is ended with its shell, also where its services are kept."""
    sandbox = await make_sandbox()
    shell = await sandbox.shell("root")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await shell.run("echo $$ >/tmp/pid; sleep 600")
    test = f'if [ -d "/proc/$(cat /tmp/pid)" ]; then echo 0; else echo 1; fi >{REWARD}\n'
    task = make_task(test)
    assert (await verify(sandbox, task, TestsVerifier(keep_processes=("*",)))).value == 1.0


async def test_a_verifiers_user_that_does_not_exist_is_not_the_agents_fault(
    sandbox: Sandbox, make_task: MakeTask
) -> None:
    task = make_task(f"echo 1 >{REWARD}", user="nobody-of-that-name")
    error = await refused(sandbox, task, "verifier_crash")
    assert "nobody-of-that-name" in error.message


async def test_a_collect_commands_user_whom_the_agent_removed_does_not_condemn_the_task(
    make_sandbox: Callable[..., Awaitable[Sandbox]], make_task: MakeTask
) -> None:
    agents, verifiers = await make_sandbox(), await make_sandbox()
    hook = {"command": "true", "timeout_sec": 10, "user": "nobody-of-that-name"}
    task = make_task(f"echo 1 >{REWARD}", collect=(hook,))
    with pytest.raises(VerifierError) as caught:
        await TestsVerifier().verify_separate(agents, verifiers, task, task.steps[0])
    assert caught.value.error_class == "verifier_crash"
    assert "nobody-of-that-name" in caught.value.message
