"""The agent that types into a terminal: in real sandboxes, driven by policies that answer what they see."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.agents.keys_parser import SCHEMA
from rollcage.rollout.agents.keys_terminal import limited
from rollcage.rollout.arrow import Location
from rollcage.rollout.outcome import Outcome, PolicyError
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.sandbox.keys import key
from rollcage.rollout.trajectory import Attempt, Message, Segment

WAIT = ""
DONE: dict[str, Any] = {"task_complete": True}


def said(*keys: str, seconds: float = 0.05, **fields: Any) -> str:
    """An answer that types these."""
    commands = [{"keystrokes": text, "duration": seconds} for text in keys]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, **fields})


@dataclass
class Watching:
    """A policy that gives each answer of its script once it has seen a text, or what a function looks for, and waits
    until then. At the end it says that the task is complete, and says it again."""

    script: Sequence[tuple[str | Callable[[str], bool], str]]
    name: str = "watching"
    seen: str = ""
    at: int = 0
    structures: list[Structure | None] = field(default_factory=list)
    waits: int = 0

    segments: Sequence[Segment] = ()

    def session(self, session_id: str, *, task: str, sample: int) -> Watching:
        return self

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        self.structures.append(structure)
        self.seen += new_messages[-1].content.rpartition("Current terminal state:\n")[2]
        text = said(**DONE)
        if self.at < len(self.script):
            until, answer = self.script[self.at]
            if until(self.seen) if callable(until) else until in self.seen:
                self.at, self.seen, self.waits, text = self.at + 1, "", 0, answer
            else:
                self.waits += 1
                assert self.waits < 200, f"{until!r} never came, but {self.seen}"
                text = said("", seconds=0.1)
        return Completion(text, "stop", policy=self.name, structured=structure is not None), None

    def restart(self) -> None:
        pass

    async def close(self) -> None:
        pass


def prompts(seen: str) -> bool:
    return seen.rstrip().endswith(("#", "$"))


def shown(attempt: Attempt) -> list[str]:
    """What the policy was told, message by message."""
    assert attempt.trajectory is not None
    return [message.content for message in attempt.trajectory.messages if message.role == "user"]


def typed(attempt: Attempt) -> list[tuple[str, str]]:
    """What was typed, and what came."""
    assert attempt.trajectory is not None
    commands = [command for turn in attempt.trajectory.turns for command in turn.commands]
    assert all(command.keys and command.exit_code is None for command in commands)
    return [(command.command, command.stdout) for command in commands if command.command]


@pytest.mark.docker
@pytest.mark.asyncio(loop_scope="module")
class TestInASandbox:
    async def test_a_file_is_edited_in_vim(self, rollouts: Any, tools_image: str) -> None:
        task = rollouts.task(dockerfile=f"FROM {tools_image}\nWORKDIR /app\n")
        policy = Watching([
            (prompts, said("vim -u DEFAULTS answer\n")),
            ('"answer" [New]', said("iab", "Left", "42", "Escape")),
            ("a42b", said(":%s/[ab]//g\n")),
            (lambda seen: "Current Terminal Screen:\n42\n~" in seen, said(":wq\n")),
            (prompts, said("seq 1 500 >f; less f\n")),
            ("\n39\n", said("NPage", "G")),
            ("\n500\n(END)", said("q", "python3\n")),
            ("license", said("for i in range(2):\n", "  print('it is', i * 21 + 21)\n", "\n")),
            ("\nit is 42\n>>>", said("C-d")),
        ])  # fmt: skip
        attempt = await rollouts.attempt(task, "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        assert policy.at == len(policy.script)

    async def test_a_password_is_typed_and_a_program_interrupted(self, rollouts: Any) -> None:
        policy = Watching([
            (prompts, said("passwd\n")),
            ("New password:", said("s3cret-x9\n")),
            ("Retype new password:", said("s3cret-x9\n")),
            ("updated successfully", said("x=42; echo g''o; sleep 1000\n")),
            ("\ngo\n", said("C-c")),
            ("^C", said("echo $x >answer\n")),
            (prompts, said("sh\n")),
            ("sh\n#", said("C-d")),
            ("root@", said("echo o''n\n")),
            ("\non\n", said()),
        ])  # fmt: skip
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        assert not any("s3cret" in text for text in shown(attempt))
        assert [keys for keys, _ in typed(attempt)][:3] == ["passwd\n", "s3cret-x9\n", "s3cret-x9\n"]
        (interrupted,) = (came for keys, came in typed(attempt) if keys == "C-c")
        assert "^C" in interrupted

    async def test_what_is_shown_is_what_is_new_from_the_cursors_line_on(self, rollouts: Any) -> None:
        policy = Watching([
            (prompts, said("PS1='> '; clear\n", seconds=0.3)),
            ("\n>", said("echo o''ne\n", seconds=1)),
            ("one", said("echo t''wo\n", seconds=1)),
            ("two", said()),
        ])  # fmt: skip
        first, *later = shown(await rollouts.attempt(rollouts.task(), "keys", policy=policy))
        assert "Task Description:\nWrite 42 to /app/answer.\n" in first
        screen = first.rpartition("Current terminal state:\nCurrent Terminal Screen:\n")[2]
        assert screen.split("\n")[0].endswith("/app#")
        assert screen.count("\n") <= 40
        assert any(text.startswith("Current Terminal Screen:\n>\n\n") for text in later)
        news = [text.rstrip("\n") for text in later if "> echo" in text]
        assert news == [
            "New Terminal Output:\n> echo o''ne\none\n>",
            "New Terminal Output:\n\n> echo t''wo\ntwo\n>",
        ]

    async def test_a_flood_is_shown_by_its_head_and_tail(self, rollouts: Any) -> None:
        flood = "seq 1 150000 >f; cat f; printf '\\377\\376ok\\n'; echo e''nd\n"
        policy = Watching([
            (prompts, said("PS1='> '\n", seconds=0.3)),
            ("\n>", said(flood, seconds=3)),
            ("\nend\n>", said("clear; echo w''ell\n", seconds=0.3)),
            ("well", said()),
        ])  # fmt: skip
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy)
        (text,) = (text for text in shown(attempt) if "interior bytes omitted" in text)
        assert len(text.encode()) < 10_200
        assert text.startswith("New Terminal Output:\n\n> seq 1 150000 >f;")
        assert "\n1\n2\n3\n" in text
        assert text.rstrip().endswith("\n150000\n\ufffd\ufffdok\nend\n>")
        omitted = int(text.partition("limited to 10000 bytes; ")[2].partition(" ")[0])
        assert 1_000_000 < omitted + len(text) < 1_100_000
        assert any(text.startswith("Current Terminal Screen:\nwell") for text in shown(attempt))

    async def test_a_shell_that_is_left_is_replaced_and_nothing_more_is_typed(self, rollouts: Any) -> None:
        policy = Watching([
            (prompts, said("cd /tmp\n", "exit 3\n", "rm -rf *\n", seconds=0.5)),
            ("[the last 1 of 3 commands were not typed]", said("echo 42 >answer\n")),
            (prompts, said("vi''m() { cat; }; vim\n")),
        ])  # fmt: skip
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        (note,) = (text for text in shown(attempt) if "was replaced because it ended with status 3" in text)
        assert "Current Terminal Screen:\n" in note
        assert ("rm -rf *\n", "") not in typed(attempt)

    async def test_a_shell_that_is_removed_is_the_agents_own_doing(self, rollouts: Any) -> None:
        gone = "rm -f /usr/bin/sh /usr/bin/bash /usr/bin/dash; exit\n"
        policy = Watching([(prompts, said("echo 42 >answer\n", gone, seconds=0.3)), (prompts, said())])
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, "agent_killed_sandbox")
        assert "no terminal for user" in attempt.evidence.message

    async def test_a_task_is_complete_when_it_is_said_twice_in_a_row(self, rollouts: Any) -> None:
        answers = [
            said(**DONE),
            said("true\n"),
            said("true\n", **DONE),
            "hm",
            said("echo 42 >answer\n", **DONE),
        ]
        policy = rollouts.policy(*({"text": text} for text in answers))
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        _, sure, seen, sure_again, error = shown(attempt)
        for text in (sure, sure_again):
            assert text.startswith("Current terminal state:\n")
            assert "Are you sure you want to mark the task as complete?" in text
            assert 'include "task_complete": true in your JSON response again' in text
        assert "Are you sure" not in seen
        assert error == (
            "Previous response had parsing errors:\n"
            "ERROR: No valid JSON found in response: it holds no JSON object\n\n"
            "Please fix these issues and provide a proper JSON response."
        )
        assert [turn.malformed for turn in attempt.trajectory.turns] == [False, False, False, True, False]

    async def test_warnings_are_told_and_malformed_answers_have_an_end(self, rollouts: Any) -> None:
        answers = [f"So: {said('echo 42 >answer', chr(10))}", "So: {", "So: {}"]
        policy = rollouts.policy(*({"text": text} for text in answers))
        options = {"max_malformed": 2}
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy, agent_options=options)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, "malformed_actions")
        _, warned, error = shown(attempt)
        assert warned.startswith(
            "Previous response had warnings:\nWARNINGS: - Extra text detected before JSON object\n"
            "- Command 1 should end with newline when followed by another command."
        )
        assert "\n\nNew Terminal Output:\n" in warned
        assert "WARNINGS: - Extra text detected before JSON object" in error

    async def test_half_an_answer_is_not_typed(self, rollouts: Any) -> None:
        policy = rollouts.policy({"text": said("rm -rf /app/x\n", "y" * 200)}, {"text": said(**DONE)})
        attempt = await rollouts.attempt(
            rollouts.task(), "keys", policy=policy, sampling=Sampling(max_tokens=150)
        )
        assert typed(attempt) == []
        assert "none of the actions that you just requested were performed" in shown(attempt)[1]
        assert "cut off after 150 tokens" in shown(attempt)[1]
        assert attempt.trajectory.turns[0].malformed

    async def test_later_steps_go_on_in_one_conversation(self, rollouts: Any) -> None:
        script = "#!/bin/sh\nif [ -e /app/done ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
        files = {f"steps/{name}/tests/test.sh": script for name in ("one", "two")}
        files |= {f"steps/{name}/instruction.md": f"Do {name}.\n" for name in ("one", "two")}
        root = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
        task = rollouts.task(root=root, files=files, test=None, solution=None)
        policy = Watching([
            (prompts, said("touch /app/done; sleep 1000 & vi() { cat; }; vi\n")),
            ("", said(**DONE)),
            ("", said(**DONE)),
            (prompts, said("ls /app\n")),
            ("done", said()),
        ])  # fmt: skip
        attempt = await rollouts.attempt(task, "keys", policy=policy)
        assert attempt.reward.steps == (("one", 1.0), ("two", 1.0))
        assert policy.at == len(policy.script)
        (second,) = (text for text in shown(attempt) if "Task Description:\nDo two.\n" in text)
        assert second.startswith("A next task follows")
        assert "Current terminal state:\nCurrent Terminal Screen:\n" in second

    async def test_the_xml_protocol_is_spoken_too(self, rollouts: Any) -> None:
        done = "<response><analysis>a</analysis><plan>p</plan><commands/><task_complete>true</task_complete></response>"
        keys = '<keystrokes duration="0.1">echo $((6 * 7)) >answer && echo "<&>"\n</keystrokes>'
        act = f"<response><analysis>a</analysis><plan>p</plan><commands>{keys}</commands></response>"
        policy = rollouts.policy(*({"text": text} for text in (act, "hm", done, done)))
        options = {"parser": "xml"}
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy, agent_options=options)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        first, _, error, sure = shown(attempt)
        assert "<response>\n<analysis>" in first
        assert error.endswith("Please fix these issues and provide a proper response.")
        assert sure.endswith("include <task_complete>true</task_complete> again.")

    async def test_a_shell_without_bash_will_do(self, rollouts: Any) -> None:
        task = rollouts.task(dockerfile=f"{rollouts.dockerfile}RUN rm -f /bin/bash /usr/bin/bash\n")
        policy = Watching([(prompts, said("echo 42 >answer\n")), (prompts, said())])
        attempt = await rollouts.attempt(task, "keys", policy=policy)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)

    async def test_a_run_is_replayed_key_by_key(self, rollouts: Any, tmp_path: Path) -> None:
        keys = said("read x; echo $x >answer\n", "4", "2\n", "echo o''k\n", seconds=0.2)
        script = [(prompts, keys), ("\nok\n", said())]
        task = rollouts.task()
        attempt = await rollouts.attempt(task, "keys", policy=Watching(script))
        Location.of(str(tmp_path / "run")).write_shard("rollouts", [rollouts_batch([(attempt, 1, 1)])])
        replay = {"path": str(tmp_path / "run")}
        again = await rollouts.attempt(task, "replay", agent_options=replay)
        assert (attempt.outcome, again.outcome) == (Outcome.PASSED, Outcome.PASSED)
        assert [keys for keys, _ in typed(again)] == [keys for keys, _ in typed(attempt)]
        assert typed(again)[0] == ("read x; echo $x >answer\n", "read x; echo $x >answer")
        calls = [
            {"arguments": {"keystrokes": keys, "duration": 0.2}, "function_name": "bash_command"}
            for keys, _ in typed(attempt)
        ]
        atif = {"steps": [{"step_id": 1, "source": "agent", "tool_calls": calls}]}
        (tmp_path / "trajectory.json").write_text(json.dumps(atif))
        replay = {"path": str(tmp_path / "trajectory.json")}
        again = await rollouts.attempt(task, "replay", agent_options=replay)
        assert (again.outcome, again.error_class) == (Outcome.PASSED, None)

    async def test_the_engine_is_asked_for_the_protocols_form(self, rollouts: Any) -> None:
        policy = Watching([])
        options = {"structured": True}
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy, agent_options=options)
        assert policy.structures == [Structure(json_schema=SCHEMA)] * 2
        assert all(turn.structured for turn in attempt.trajectory.turns)

    async def test_a_full_context_is_summed_up_and_the_screen_shown_again(self, rollouts: Any) -> None:
        class Full(Watching):
            def restart(self) -> None:
                self.name = "restarted"

            async def complete(self, new: list[Message], *rest: Any, **more: Any) -> Any:
                if self.at == 1 and self.name == "watching":
                    if "summary" in new[-1].content:
                        return Completion("I wrote 4.", "stop", policy="watching"), None
                    raise PolicyError("context_overflow", "it is full")
                return await super().complete(new, *rest, **more)

        policy = Full([(prompts, said("printf 4 >answer; echo f''our\n", seconds=0.5)),
                       ("\nfour\n", said("echo 2 >>answer\n"))])  # fmt: skip
        options = {"summarize": True}
        attempt = await rollouts.attempt(rollouts.task(), "keys", policy=policy, agent_options=options)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        assert [turn.purpose for turn in attempt.trajectory.turns if turn.purpose != "act"] == ["summary"]
        (again,) = (text for text in shown(attempt) if "I wrote 4." in text)
        assert "Write 42 to /app/answer." in again
        assert "I wrote 4.\n\nCurrent terminal state:\nCurrent Terminal Screen:\n" in again


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parser": "yaml"}, "parser must be 'json' or 'xml', not 'yaml'"),
        ({"parser": "xml", "structured": True}, "structured answers are JSON"),
        ({"max_wait_sec": 0}, "must be above 0"),
        ({"task_prompt": "Do {instruction}."}, r"task_prompt has no \{terminal_state\}"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_agent("keys", options)


def test_harbors_own_template_will_do(tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text('{{\n  "commands": [{{"keystrokes": ""}}]\n}}\n{instruction}\n{terminal_state}')
    agent: Any = load_agent("keys", {"task_prompt": str(template)})
    filled = agent.task_prompt.filled({"instruction": "{{x}}", "terminal_state": "$ "})
    assert filled == '{\n  "commands": [{"keystrokes": ""}]\n}\n{{x}}\n$ '


def test_output_is_cut_between_characters_and_says_by_how_much() -> None:
    text = "ä" * 100
    assert limited(text, 200) == text
    cut = limited(text, 101, omitted=7)
    assert cut == f"{'ä' * 25}\n[... output limited to 101 bytes; 107 interior bytes omitted ...]\n{'ä' * 25}"


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("enter", b"\r"), ("ESCAPE", b"\x1b"), ("c-c", b"\x03"), ("^C", b"\x03"), ("C-[", b"\x1b"), ("C-Space", b"\0"),
        ("C-?", b"\x7f"), ("M-x", b"\x1bx"), ("M-C-x", b"\x1b\x18"), ("C-M-x", b"\x1b\x18"), ("M-Enter", b"\x1b\r"),
        ("C-Left", b"\x1b[1;5D"), ("M-Up", b"\x1b[1;3A"), ("C-S-Up", b"\x1b[1;6A"), ("C-PPage", b"\x1b[5;5~"),
        ("S-F5", b"\x1b[15;2~"), ("C-F1", b"\x1b[1;5P"), ("q", b"q"), ("é", "é".encode()),
        ("S-x", None), ("C-é", None), ("C-foo", None), ("foo", None), ("C-c\n", None), ("", None),
    ],
)  # fmt: skip
def test_keys_are_called_as_in_tmux(name: str, sent: bytes | None) -> None:
    assert key(name) == sent
