"""Conversations that outgrow the context, summed up and gone on with, and outputs cut to what a policy may read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.agents.bash import BashAgent
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.agents.observation import OutputCap, shorten, token_counter
from rollcage.rollout.agents.summaries import HANDOVER, NOT_RUN, STUB, Summaries
from rollcage.rollout.agents.tools import ToolsAgent
from rollcage.rollout.outcome import AgentStopped, PolicyError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.task import Step
from rollcage.rollout.trajectory import Message

PROMPTS = {"system_prompt": "Be brief.", "summary_prompt": "Sum up."}


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def sh(command: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "bash", "arguments": {"command": command}}]}


async def test_past_its_part_of_the_context_a_conversation_is_summed_up_and_goes_on(
    make_context: Any,
) -> None:
    turns = [block("seq 100"), block("seq 40"), "Counted to 100.", block("echo on"), block("submit")]
    context = make_context(turns, tokens=True, max_model_len=1000)
    await BashAgent(summarize=True, summarize_at=0.5, **PROMPTS).run(context)
    trajectory = context.trajectory
    assert [turn.purpose for turn in trajectory.turns] == ["act", "act", "summary", "act", "act"]
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 0, 1, 1]
    asked, summary, system, task = trajectory.messages[5:9]
    assert asked.content.endswith("\n40\n</stdout>\n\nSum up.")
    assert summary.content == "Counted to 100."
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (task.role, task.content) == ("user", f"Do it.\n\n{HANDOVER}\n\nCounted to 100.")
    first, second = context.session.segments
    assert bytes(number for number in second.ids if number < 256).startswith(
        b"system\nBe brief.\nuser\nDo it."
    )
    assert all(len(segment.ids) <= 1000 for segment in (first, second))


async def test_what_no_longer_fits_is_cut_for_the_summary(make_context: Any) -> None:
    turns = [block("seq 1000"), "Counted.", block("submit")]
    context = make_context(turns, tokens=True, max_model_len=1000)
    await BashAgent(summarize=True, max_output_tokens=None, **PROMPTS).run(context)
    asked = context.trajectory.messages[3].content
    assert "tokens left out" in asked
    assert "</stdout>\n\nSum up." in asked
    assert [turn.purpose for turn in context.trajectory.turns] == ["act", "summary", "act"]


async def test_an_answer_leaves_room_for_the_summary(make_context: Any) -> None:
    turns = [block("true"), "word " * 200, "Nothing yet.", block("submit")]
    context = make_context(turns, tokens=True, max_model_len=600)
    await BashAgent(summarize=True, **PROMPTS).run(context)
    cut, summary = context.trajectory.turns[1:3]
    assert (cut.finish_reason, summary.purpose, summary.text) == ("length", "summary", "Nothing yet.")


async def test_without_summaries_an_overflow_ends_the_agent(make_context: Any) -> None:
    context = make_context([block("seq 400"), block("submit")], tokens=True, max_model_len=1000)
    with pytest.raises(PolicyError) as stopped:
        await BashAgent(**PROMPTS).run(context)
    assert stopped.value.error_class == "context_overflow"
    assert len(context.trajectory.turns) == 1


async def test_where_the_length_is_not_known_the_servers_refusal_asks_for_the_summary(
    make_context: Any,
) -> None:
    overflow = {"error": "context_overflow"}
    context = make_context([sh("seq 9"), overflow, "Counted.", sh("echo on"), "done"])
    await ToolsAgent(summarize=True, **PROMPTS).run(context)
    said = [(message.role, message.content) for message in context.trajectory.messages]
    assert said[3:8] == [
        ("tool", STUB),
        ("user", "Sum up."),
        ("assistant", "Counted."),
        ("system", "Be brief."),
        ("user", f"Do it.\n\n{HANDOVER}\n\nCounted."),
    ]
    assert context.trajectory.turns[0].commands[0].stdout == "1\n2\n3\n4\n5\n6\n7\n8\n9\n"


@pytest.mark.parametrize("after", [[], ["Summed up."]])
async def test_a_summary_that_overflows_itself_ends_the_agent(make_context: Any, after: list[str]) -> None:
    overflow = {"error": "context_overflow"}
    context = make_context([sh("true"), overflow, *after, overflow])
    with pytest.raises(PolicyError) as stopped:
        await ToolsAgent(summarize=True, **PROMPTS).run(context)
    assert stopped.value.error_class == "context_overflow"
    assert len(context.trajectory.turns) == 1 + len(after)


async def test_a_first_prompt_that_does_not_fit_is_not_summed_up(make_context: Any) -> None:
    context = make_context(["x"], tokens=True, max_model_len=20)
    with pytest.raises(PolicyError) as stopped:
        await BashAgent(summarize=True, **PROMPTS).run(context)
    assert stopped.value.error_class == "context_overflow"
    assert context.trajectory.turns == []


async def test_steps_go_on_in_one_session_with_a_summary_between_them(make_context: Any) -> None:
    agent = ToolsAgent(summarize=True, summarize_at=0.15, done="submit", **PROMPTS)
    submit = {"tool_calls": [{"name": "submit", "arguments": {}}]}
    context = make_context(
        [sh("cd /; x=1"), submit, sh("seq 200"), "Counted.", sh("echo $x; pwd"), submit],
        tokens=True,
        max_model_len=6000,
    )
    await agent.run(context)
    context.step = Step("second", "Now this.", tests=Path(), solution=None)
    await agent.run(context)
    assert [turn.purpose for turn in context.trajectory.turns] == ["act"] * 3 + ["summary"] + ["act"] * 2
    assert [turn.segment for turn in context.trajectory.turns] == [0, 0, 0, 0, 1, 1]
    roles = [message.role for message in context.trajectory.messages]
    assert roles[:8] == ["system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
    assert roles[8:] == ["tool", "user", "assistant", "system", "user", "assistant", "tool", "assistant"]
    assert context.trajectory.messages[12].content == f"Now this.\n\n{HANDOVER}\n\nCounted."
    assert context.trajectory.turns[4].commands[0].stdout == "1\n/\n"


@pytest.mark.parametrize(
    ("again", "handed_over"),
    [
        (["Counted."], "Counted."),
        ([sh("seq 8")], '(no words, but these calls, which were not run)\nbash {"command": "seq 8"}'),
        (
            [{"error": "context_overflow"}],
            '(no words, but these calls, which were not run)\nbash {"command": "seq 7"}',
        ),
    ],
)
async def test_a_summary_that_comes_as_a_call_is_asked_for_once_more_and_never_lost(
    make_context: Any, again: list[Any], handed_over: str
) -> None:
    overflow = {"error": "context_overflow"}
    context = make_context([sh("echo one"), overflow, sh("seq 7"), *again, sh("echo two"), "done"])
    await ToolsAgent(summarize=True, **PROMPTS).run(context)
    trajectory = context.trajectory
    said = [(message.role, message.content) for message in trajectory.messages]
    assert ("user", f"Do it.\n\n{HANDOVER}\n\n{handed_over}") in said
    assert said.count(("tool", NOT_RUN)) == ("error" not in again[0])
    assert [command.command for turn in trajectory.turns for command in turn.commands] == [
        "echo one",
        "echo two",
    ]
    assert {turn.purpose for turn in trajectory.turns[1:-2]} == {"summary"}


async def test_a_step_after_a_summary_that_was_refused_begins_anew(make_context: Any) -> None:
    turns = [block("seq 100"), {"text": "No.", "finish_reason": "refusal"}, block("submit")]
    context = make_context(turns, tokens=True, max_model_len=500)
    agent = BashAgent(summarize=True, **PROMPTS)
    with pytest.raises(AgentStopped, match="refused"):
        await agent.run(context)
    context.step = Step("second", "Now this.", tests=Path(), solution=None)
    await agent.run(context)
    assert [message.role for message in context.trajectory.messages[-3:]] == ["system", "user", "assistant"]
    assert context.trajectory.turns[-1].segment == 1


async def test_what_an_agent_adds_stands_behind_the_summary_and_turns_are_not_counted(
    make_context: Any,
) -> None:
    async def screen() -> str:
        return "The screen:\n$"

    context = make_context(["one", {"error": "context_overflow"}, "Summed up.", "two"])
    talk = Conversation(
        context, Limits(turns=2), Summaries([Message("user", "Do it.")], "Sum up.", also=screen)
    )
    await talk.ask([Message("user", "Do it.")])
    _, made = await talk.ask([Message("user", "more")])
    assert made.text == "two"
    assert context.trajectory.messages[-2].content == f"Do it.\n\n{HANDOVER}\n\nSummed up.\n\nThe screen:\n$"
    with pytest.raises(AgentStopped, match="turn_limit"):
        await talk.ask([Message("user", "more")])


async def test_summaries_spend_the_agents_tokens(make_context: Any) -> None:
    context = make_context([block("seq 100"), "x" * 500], tokens=True, max_model_len=800)
    with pytest.raises(AgentStopped) as stopped:
        await BashAgent(summarize=True, summarize_at=0.3, max_tokens=60, **PROMPTS).run(context)
    assert stopped.value.error_class == "token_limit"
    assert context.trajectory.completion_tokens == 60


def test_a_part_of_the_context_is_a_part() -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        BashAgent(summarize_at=1.0)


def words(text: str) -> int:
    return len(text.split())


@given(st.lists(st.text(alphabet="ab \n", max_size=12), max_size=60), st.integers(2, 40))
def test_a_text_is_cut_to_head_and_tail_and_what_is_left_out_is_counted(parts: list[str], most: int) -> None:
    text = "\n".join(parts)
    cut = shorten(text, most, words)
    if words(text) <= most:
        assert cut == text
        return
    head, _, tail = cut.partition("\n[... ")
    number, _, tail = tail.partition(" tokens left out ...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(number) >= 1


def test_tokens_are_the_policys_own_or_else_counted_by_bytes(make_context: Any) -> None:
    assert token_counter(make_context(["x"], tokens=True).session)("añb") == 4
    assert token_counter(make_context(["x"]).session)("añb") == 1
    assert token_counter(None)("") == 0


def test_one_output_that_is_short_leaves_the_other_its_tokens() -> None:
    cap = OutputCap(20, lambda text: len(text.split()))
    long = "\n".join(f"w{number}" for number in range(100))
    stdout, stderr = cap.cut_both(long, "one two")
    assert stderr == "one two"
    assert words(stdout) == 18 + words("[... 82 tokens left out ...]")
    both = cap.cut_both(long, long)
    assert [words(text) - words("[... 90 tokens left out ...]") for text in both] == [10, 10]


async def test_a_job_that_draws_few_tokens_still_gets_its_summary(make_context: Any) -> None:
    context = make_context(
        [block("seq 150"), "Counted to 150.", block("submit")],
        tokens=True,
        max_model_len=600,
        sampling=Sampling(max_tokens=40),
    )
    await BashAgent(summarize=True, **PROMPTS).run(context)
    assert [turn.text for turn in context.trajectory.turns][1:] == ["Counted to 150.", block("submit")]
