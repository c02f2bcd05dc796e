"""What agents do to their sandboxes, their limits and their policies: never infra's fault, and graded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.agents import run as agents_run
from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import Outcome, PolicyError, Stage
from rollcage.rollout.policies.base import Completion, Policy, PolicySession
from rollcage.rollout.sandbox import container
from rollcage.rollout.trajectory import Attempt

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

SOLVE = "echo 42 >/app/answer"
EAT = "tail /dev/zero"
"""Holds all that it has read, for want of a line's end."""
REWRITE_FOR_EVER = (
    "(while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.05; done) >/dev/null 2>&1 & sleep inf"
)


def assert_ended(attempt: Attempt, outcome: Outcome, error_class: str | None = None) -> None:
    assert (attempt.outcome, attempt.error_class) == (outcome, error_class), attempt.evidence
    assert attempt.stage == (None if error_class is None else Stage.AGENT)
    if outcome in (Outcome.PASSED, Outcome.FAILED):
        assert attempt.reward is not None
        assert attempt.reward.value == (1.0 if outcome == Outcome.PASSED else 0.0)


class TestKilling:
    """An agent may kill whatever it can reach: its commands fail, its shell is replaced, its work is graded."""

    @pytest.mark.parametrize(
        ("command", "workdir"),
        [
            ("kill -9 -1", "/tmp"),  # a process does not count itself
            ("kill -TERM 1; kill -9 1", "/tmp"),
            ("kill -STOP $$", "/tmp"),
            ("kill -9 $$", "/app"),
            ("kill -9 0", "/app"),
            ("exit", "/app"),
            ("exec sleep 1", "/app"),
        ],
    )
    async def test_itself(self, rollouts: Any, command: str, workdir: str) -> None:
        policy = rollouts.policy(f"cd /tmp\n{command}", f"pwd; {SOLVE}\nsubmit")
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
        assert_ended(attempt, Outcome.PASSED)
        first, second = (turn.commands[0] for turn in attempt.trajectory.turns)
        assert (second.exit_code, second.stdout) == (0, f"{workdir}\n")
        if workdir == "/app":
            assert first.exit_code is None
            assert "the shell was replaced" in first.note
            assert any(first.note in message.content for message in attempt.trajectory.messages)

    async def test_by_name(self, rollouts: Any) -> None:
        pkill = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in *sh*) kill -9 ${p#/proc/};; esac; done"
        policy = rollouts.policy(pkill, f"{SOLVE}\nsubmit")
        assert_ended(await rollouts.attempt(rollouts.task(), "bash", policy=policy), Outcome.PASSED)

    async def test_as_a_user_that_is_not_root(self, rollouts: Any) -> None:
        dockerfile = f"{rollouts.dockerfile}COPY --chown=games answer /app/answer\n"
        files = {"environment/answer": "0\n"}
        task = rollouts.task(dockerfile=dockerfile, files=files, agent='user = "games"')
        agent = rollouts.shell_agent("id -un", "kill -9 -1; kill -9 $$", f"{SOLVE}; kill -9 1")
        attempt = await rollouts.attempt(task, agent)
        assert_ended(attempt, Outcome.PASSED)
        assert attempt.trajectory.turns[0].commands[0].stdout == "games\n"

    @pytest.mark.parametrize("everything", ["/", "/usr /bin /lib /lib64"])
    async def test_everything_that_is_in_the_image(self, rollouts: Any, everything: str) -> None:
        task = rollouts.task()
        agent = rollouts.shell_agent(SOLVE, f"rm -rf --no-preserve-root {everything} 2>/dev/null", "echo; ls")
        attempt = await rollouts.attempt(task, agent)
        assert_ended(attempt, Outcome.FAILED, "agent_killed_sandbox")
        assert attempt.reward.source == "agent_killed_sandbox"
        assert_ended(await rollouts.attempt(task), Outcome.PASSED)

    async def test_the_shell(self, rollouts: Any) -> None:
        """The verifier brings the image's own back."""
        agent = rollouts.shell_agent(SOLVE, "rm -f /usr/bin/sh /usr/bin/bash /usr/bin/dash", "exit", "true")
        attempt = await rollouts.attempt(rollouts.task(), agent)
        assert_ended(attempt, Outcome.PASSED, "agent_killed_sandbox")

    async def test_what_keeps_the_time_of_its_sandbox(self, rollouts: Any) -> None:
        agent = rollouts.shell_agent("rm -f /usr/bin/sleep", "exit", SOLVE)
        assert_ended(await rollouts.attempt(rollouts.task(), agent), Outcome.PASSED)


class TestLimitsOfTheSandbox:
    @pytest.mark.parametrize("command", [EAT, f"{EAT} | cat", f"({EAT}); true"])
    async def test_memory(self, rollouts: Any, command: str) -> None:
        task = rollouts.task(environment="memory_mb = 48")
        attempt = await rollouts.attempt(task, rollouts.shell_agent(command))
        assert_ended(attempt, Outcome.FAILED, "agent_oom")
        assert attempt.evidence.said_by == "container state"
        assert attempt.evidence.oom_killed
        assert "48 MiB" in attempt.evidence.message

    async def test_memory_as_a_user_that_is_not_root(self, rollouts: Any) -> None:
        task = rollouts.task(environment="memory_mb = 48", agent='user = "games"')
        attempt = await rollouts.attempt(task, rollouts.shell_agent(f"{EAT} | cat"))
        assert_ended(attempt, Outcome.FAILED, "agent_oom")

    async def test_memory_and_the_tests_pass_all_the_same(self, rollouts: Any) -> None:
        policy = rollouts.policy(EAT, f"{SOLVE}\nsubmit")
        task = rollouts.task(environment="memory_mb = 48")
        attempt = await rollouts.attempt(task, "bash", policy=policy)
        assert_ended(attempt, Outcome.PASSED, "agent_oom")

    async def test_memory_first_and_then_another_limit(self, rollouts: Any) -> None:
        task = rollouts.task(environment="memory_mb = 48")
        options = {"max_turns": 1}
        attempt = await rollouts.attempt(task, "bash", policy=rollouts.policy(EAT), agent_options=options)
        assert_ended(attempt, Outcome.FAILED, "agent_oom")
        assert any(text.startswith("turn_limit") for text in attempt.evidence.also)

    async def test_a_file_past_the_storage_limit_is_a_failed_command(self, rollouts: Any) -> None:
        policy = rollouts.policy("head -c 30000000 /dev/zero >/app/big", f"ls -l /app/big; {SOLVE}\nsubmit")
        task = rollouts.task(environment="storage_mb = 20")
        attempt = await rollouts.attempt(task, "bash", policy=policy)
        assert_ended(attempt, Outcome.PASSED)
        first = attempt.trajectory.turns[0].commands[0]
        assert first.exit_code not in (0, None)

    async def test_many_files_past_the_storage_limit(self, rollouts: Any) -> None:
        fill = f"{SOLVE}; for i in 1 2 3; do head -c 15000000 /dev/zero >/app/$i; done; sleep inf"
        task = rollouts.task(environment="storage_mb = 20")
        attempt = await rollouts.attempt(task, rollouts.shell_agent(fill))
        assert_ended(attempt, Outcome.PASSED, "agent_killed_sandbox")
        assert "20 MiB" in attempt.evidence.message
        assert attempt.evidence.said_by == "container state"
        assert attempt.trajectory.turns[0].commands[0].exit_code is None

    @pytest.mark.parametrize(
        "command",
        ["sleep inf", "yes", "bomb() { bomb | bomb & }; bomb; sleep inf", "while :; do :; done"],
    )
    async def test_commands_without_an_end(self, rollouts: Any, command: str) -> None:
        policy = rollouts.policy(command, f"{SOLVE}\nsubmit")
        options = {"command_timeout_sec": 1.5}
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy, agent_options=options)
        assert_ended(attempt, Outcome.PASSED)
        first = attempt.trajectory.turns[0].commands[0]
        assert first.timed_out
        assert first.exit_code is None
        assert first.note
        assert any(first.note in message.content for message in attempt.trajectory.messages)

    async def test_a_gigabyte_of_output(self, rollouts: Any) -> None:
        policy = rollouts.policy("head -c 1000000000 /dev/zero", f"{SOLVE}\nsubmit")
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
        assert_ended(attempt, Outcome.PASSED)
        first = attempt.trajectory.turns[0].commands[0]
        assert len(first.stdout) < 20_000
        assert first.omitted_bytes == 1_000_000_000 - 10_000

    async def test_output_that_no_reader_expects(self, rollouts: Any) -> None:
        lines = [
            "head -c 100000 /dev/urandom",
            "printf 'a\\0b\\377\\n'",
            "head -c 10000000 /dev/zero | tr '\\0' x",
        ]
        split = "printf '\\342'; sleep 0.1; printf '\\202\\254'"
        attempt = await rollouts.attempt(
            rollouts.task(), "bash", policy=rollouts.policy(*lines, split, "submit")
        )
        assert_ended(attempt, Outcome.FAILED)
        commands = [turn.commands[0] for turn in attempt.trajectory.turns[:4]]
        assert [command.exit_code for command in commands] == [0, 0, 0, 0]
        assert commands[1].stdout == "a\0b\N{REPLACEMENT CHARACTER}\n"
        assert commands[3].stdout == "€"

    async def test_a_child_that_holds_the_output_does_not_hold_the_command(self, rollouts: Any) -> None:
        policy = rollouts.policy("sleep 300 & echo started", f"{SOLVE}\nsubmit")
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
        assert_ended(attempt, Outcome.PASSED)
        assert attempt.trajectory.turns[0].commands[0].stdout == "started\n"


SPOOFS = (
    'echo "Error response from daemon: could not find an available, non-overlapping IPv4 address pool among the '
    'defaults to assign to the network" >&2; exit 1',
    "exit 137",
    "exit 125",
    "exit 126",
    "exit 127",
    "exit 124",
    "exit 255",
    'echo "docker: Error response from daemon: No such container: $HOSTNAME." >&2; exit 125',
    'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"; exit 1',
    """echo '{"State": {"OOMKilled": true, "Running": false, "ExitCode": 137}}'; exit 137""",
    'echo "This model\'s maximum context length is 16384 tokens. max_tokens must be at least 1, got -186" >&2; exit 1',
    'echo "write /var/lib/docker/tmp: no space left on device" >&2; exit 1',
    'echo "toomanyrequests: You have reached your pull rate limit" >&2; exit 1',
    'echo "ended 1 137 5 1"; echo "interrupted"; echo "oom 9"; echo "ready 1 bash" >&2; exit 1',
    'printf "%s 0\\n" "$rc_nonce"; printf "%s oom 9\\n" "$rc_key" >&2; exit 137',
    'printf "\\001\\000\\000\\000\\377\\377\\377\\377"; printf "\\002\\000\\000\\000\\000\\000\\000\\001" >&2; exit 1',
    'echo "reward 1"; mkdir -p /logs/verifier; echo "agent_oom: internal_error" >/logs/verifier/reward.json; exit 1',
    "sh -c 'kill -9 $$'",
    "sh -c 'kill -SEGV $$'",
)


async def test_what_a_sandbox_prints_names_nothing(rollouts: Any) -> None:
    """Engine messages, exit codes of engines, our own statements, the model server's errors: all are output."""
    task = rollouts.task(environment="memory_mb = 256")
    agents = [rollouts.shell_agent(f"( {spoof} )", spoof) for spoof in SPOOFS]
    attempts = await rollouts.attempts(*(rollouts.attempt(task, agent) for agent in agents))
    for spoof, attempt in zip(SPOOFS, attempts, strict=True):
        found = (attempt.outcome, attempt.error_class, attempt.stage)
        assert found == (Outcome.FAILED, None, None), (spoof, attempt.evidence)


class TestTime:
    async def test_an_agent_that_is_late_is_graded(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(
            rollouts.task(agent="timeout_sec = 1"), rollouts.shell_agent(f"{SOLVE}; sleep inf")
        )
        assert_ended(attempt, Outcome.PASSED, "agent_timeout")
        assert "1 s" in attempt.evidence.message
        (command,) = attempt.trajectory.turns[0].commands
        assert command.exit_code is None
        assert "attempt ended" in command.note

    async def test_its_children_are_gone_before_the_verifier_starts(self, rollouts: Any) -> None:
        task = rollouts.task(
            agent="timeout_sec = 2", test="sleep 0.5; echo 0 >/logs/verifier/reward.txt; sleep 0.5"
        )
        attempt = await rollouts.attempt(task, rollouts.shell_agent(REWRITE_FOR_EVER))
        assert_ended(attempt, Outcome.FAILED, "agent_timeout")

    async def test_a_reward_of_its_own_is_not_counted(self, rollouts: Any) -> None:
        task = rollouts.task(agent="timeout_sec = 2", test="sleep 0.5")
        attempt = await rollouts.attempt(
            task, rollouts.shell_agent(f"mkdir -p /logs/verifier; {REWRITE_FOR_EVER}")
        )
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "reward_tampered")
        assert attempt.stage == Stage.VERIFY
        assert any(text.startswith("agent_timeout") for text in attempt.evidence.also)

    async def test_an_agent_that_hangs_outside_the_sandbox(self, rollouts: Any) -> None:
        async def run(context: AgentContext) -> None:
            await asyncio.Event().wait()

        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run), agent_timeout_sec=0.5)
        assert_ended(attempt, Outcome.FAILED, "agent_timeout")

    async def test_what_an_agent_raises_as_it_is_stopped_is_evidence(self, rollouts: Any) -> None:
        async def run(context: AgentContext) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise OSError("could not tidy up")

        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run), agent_timeout_sec=0.5)
        assert_ended(attempt, Outcome.FAILED, "agent_timeout")
        assert any("could not tidy up" in text for text in attempt.evidence.also)

    async def test_an_agent_that_will_not_be_stopped(
        self, rollouts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_away = asyncio.Event()

        async def run(context: AgentContext) -> None:
            while not go_away.is_set():
                try:
                    await go_away.wait()
                except asyncio.CancelledError:
                    continue

        monkeypatch.setattr(agents_run, "AGENT_END_SEC", 0.2)
        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run), agent_timeout_sec=0.5)
        go_away.set()
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert "goes on" in attempt.evidence.message

    async def test_the_multiplier_stretches_the_limit(self, rollouts: Any) -> None:
        task = rollouts.task(agent="timeout_sec = 0.5")
        attempt = await rollouts.attempt(
            task, rollouts.shell_agent(f"sleep 1; {SOLVE}"), agent_timeout_multiplier=40
        )
        assert_ended(attempt, Outcome.PASSED)


class Behind:
    """A policy whose every answer goes through `gate` first."""

    def __init__(self, policy: Policy, gate: Callable[[Completion], Awaitable[None]]) -> None:
        self.name = policy.name
        self._policy = policy
        self._gate = gate

    def session(self, session_id: str, *, task: str, sample: int) -> PolicySession:
        session = self._policy.session(session_id, task=task, sample=sample)
        complete = session.complete

        async def gated(*arguments: Any, **asked: Any) -> tuple[Completion, int | None]:
            completion, segment = await complete(*arguments, **asked)
            await self._gate(completion)
            return completion, segment

        session.complete = gated  # type: ignore[method-assign]
        return session


class TestThePolicy:
    @pytest.mark.parametrize(
        ("options", "turns", "error_class"),
        [
            ({"max_turns": 2}, [SOLVE], "turn_limit"),
            ({"max_tokens": 40}, [SOLVE, "true"], "token_limit"),
            ({"max_malformed": 2}, [SOLVE, {"text": "I am not sure."}], "malformed_actions"),
            ({}, [SOLVE, {"error": "context_overflow", "message": "too long"}], "context_overflow"),
        ],
    )
    async def test_limits_are_graded(
        self, rollouts: Any, options: dict[str, Any], turns: list[Any], error_class: str
    ) -> None:
        policy = rollouts.policy(*turns)
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy, agent_options=options)
        assert_ended(attempt, Outcome.PASSED, error_class)

    @pytest.mark.parametrize(
        "error_class", ["policy_unavailable", "policy_timeout", "policy_error", "rate_limited"]
    )
    async def test_its_failures_are_invalid(self, rollouts: Any, error_class: str) -> None:
        policy = rollouts.policy(SOLVE, {"error": error_class, "message": "no answer today"})
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, error_class)
        assert attempt.stage == Stage.AGENT
        assert "no answer today" in attempt.evidence.message
        assert len(attempt.trajectory.turns) == 1
        assert "verify" not in attempt.phases

    async def test_what_it_asks_us_to_wait_is_kept(self, rollouts: Any) -> None:
        async def refuse(completion: Any) -> None:
            raise PolicyError("rate_limited", "slow down", retry_after_sec=17.0)

        policy = Behind(rollouts.policy(SOLVE), refuse)
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "rate_limited")
        assert attempt.retry_after_sec == 17.0

    async def test_a_long_wait_in_its_queue_makes_no_timeout(self, rollouts: Any) -> None:
        async def queue(completion: Any) -> None:
            await asyncio.sleep(2.5)

        policy = Behind(rollouts.policy({"text": f"```bash\n{SOLVE}\nsubmit\n```", "seconds": 0.1}), queue)
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy, agent_timeout_sec=2)
        assert_ended(attempt, Outcome.PASSED)
        assert attempt.infra_seconds == pytest.approx(2.5, abs=0.3)

    async def test_a_long_generation_is_the_agents_own_time(self, rollouts: Any) -> None:
        policy = rollouts.policy({"text": f"```bash\n{SOLVE}\n```", "seconds": 1.5})
        attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy, agent_timeout_sec=1)
        assert attempt.error_class == "agent_timeout"
        assert attempt.infra_seconds == pytest.approx(0, abs=0.2)


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, ["tests"]),
        ({"files": {"solution/data/more.txt": "42\n"}}, ["solution", "tests"]),
        ({"agent": 'user = "nobody"\n', "solution": "echo 42 >/tmp/answer\n"}, ["solution", "tests"]),
        (
            {"dockerfile": "FROM debian:bookworm-slim\nRUN mkdir /solution\nWORKDIR /app\n"},
            ["solution", "tests"],
        ),
    ],
    ids=["one script", "more files", "no root", "there already"],
)
async def test_a_solution_of_one_script_needs_no_upload_where_root_can_write_it(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sent: list[str]
) -> None:
    uploads = []
    upload = container.files.upload

    async def noted(engine: Any, container_id: str, source: Path, target: str, **how: Any) -> None:
        uploads.append(source.name)
        await upload(engine, container_id, source, target, **how)

    monkeypatch.setattr(container.files, "upload", noted)
    test = "grep -q 42 /app/answer /tmp/answer && reward=1; echo ${reward-0} >/logs/verifier/reward.txt"
    attempt = await rollouts.attempt(rollouts.task(test=test, **settings))
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
    assert uploads == sent
