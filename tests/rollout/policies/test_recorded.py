"""A run's policy traffic once more: the same answers and the same tokens, and what is said where the agent differs."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.agents.conversation import turn_of
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.outcome import Evidence, Outcome, PolicyError, Stage
from rollcage.rollout.policies.base import KeepsNotes, MeasuresTokens, Sampling
from rollcage.rollout.policies.recorded import BYTES, RecordedPolicy, RecordedSession
from rollcage.rollout.policies.scripted import ScriptedPolicy
from rollcage.rollout.rows import attempt_from_row
from rollcage.rollout.trajectory import Attempt, Message, Reward, Segment, ToolCall, Trajectory, Turn

NAN = float("nan")
CALLS = (ToolCall("call-1", "bash", '{"command": "date"}'),)


def turns() -> list[Turn]:
    """Two turns in one segment, then a summary and what came of it in segments of their own."""
    about: dict[str, Any] = {
        "policy": "served",
        "policy_version": 3,
        "policy_version_end": 4,
        "cost_usd": 0.25,
    }
    return [
        Turn(
            0, "first", "tool_calls", 0, 2, 2, prompt_tokens=2, completion_tokens=2, cached_tokens=1, **about
        ),
        Turn(1, "second", "stop", 0, 5, 1, prompt_tokens=5, completion_tokens=1, structured=True, **about),
        Turn(2, "what was done", "stop", 1, 1, 2, purpose="summary", generate_seconds=1.5, **about),
        Turn(3, "fourth", "length", 2, 2, 1, **about),
    ]


def trajectory() -> Trajectory:
    return Trajectory(
        messages=[
            Message("system", "be good"),
            Message("user", "what time is it?"),
            Message(
                "assistant", "first", 0, tool_calls=CALLS, reasoning="hm", blocks='[{"type": "thinking"}]'
            ),
            Message("tool", "12:00 \ud800", 0, tool_call_id="call-1"),
            Message("assistant", "second", 1),
            Message("user", "out\n\nSum it up.", 1),
            Message("assistant", "what was done", 2),
            Message("user", "go on from: what was done", 2),
            Message("assistant", "fourth", 3),
        ],
        turns=turns(),
        segments=[
            Segment([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [NAN, NAN, -0.5, -0.25, NAN, -1.0]),
            Segment([7, 8, 9], [0, 1, 1], [NAN, -2.0, -0.125]),
            Segment([1, 2, 3], [0, 0, 1], [NAN, NAN, 0.0]),
        ],
    )


def attempt(sample: int = 0, **changes: Any) -> Attempt:
    made = Attempt(
        attempt_id=f"attempt-{changes.get('agent', 'bash')}-{sample}",
        job="j",
        task="t",
        task_digest="d",
        sample=sample,
        number=1,
        agent="bash",
        policy="served",
        host="h",
        outcome=Outcome.PASSED,
        reward=Reward(1.0),
        trajectory=trajectory(),
    )
    return replace(made, **changes)


async def record(run: Path, attempts: Sequence[Attempt], *, finish: bool = True) -> RecordedPolicy:
    ledger = Ledger.create(run, {"job": "j"})
    for one in attempts:
        await ledger.record_rollout(one, attempts=1, group_size=len(attempts))
    if finish:
        await ledger.finish({})
    else:
        ledger.close()
    return RecordedPolicy(run, agent=attempts[0].agent)


def says(*messages: Message) -> list[Message]:
    return list(messages)


async def replayed(
    policy: RecordedPolicy, asked: Sequence[list[Message]], sample: int = 0
) -> RecordedSession:
    """A session that was asked all this."""
    session = policy.session("x", task="t", sample=sample)
    for messages in asked:
        await session.complete(messages, Sampling())
    return session


def recorded_questions() -> list[list[Message]]:
    messages = trajectory().messages
    answers = [-1, *(place for place, message in enumerate(messages) if message.role == "assistant")]
    return [messages[a + 1 : b] for a, b in pairwise(answers)]


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or (isnan(x) and isnan(y)) for x, y in zip(a, b, strict=True))


async def test_every_turn_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt()])
    session = policy.session("x", task="t", sample=0)
    restored = []
    for index, messages in enumerate(recorded_questions()):
        made, segment = await session.complete(messages, Sampling(max_tokens=1))
        restored.append(replace(turn_of(index, made, segment), purpose=turns()[index].purpose))
        if index == 0:
            assert (made.reasoning, made.tool_calls, made.blocks) == ("hm", CALLS, '[{"type": "thinking"}]')
            assert (made.prompt_ids, made.ids, made.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert restored == turns()
    for now, then in zip(session.segments, trajectory().segments, strict=True):
        assert (now.ids, now.loss_mask) == (then.ids, then.loss_mask)
        assert same(now.logprobs, then.logprobs)
    assert session.notes["replay"]["diverged"] is None
    assert session.notes["replay"]["turns"] == session.notes["replay"]["recorded_turns"] == 4
    assert isinstance(session, KeepsNotes)


async def test_segments_hold_no_more_than_was_served(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt()])
    session = await replayed(policy, recorded_questions()[:1])
    assert [segment.ids for segment in session.segments] == [[1, 2, 3, 4]]
    assert session.notes["replay"]["turns"] == 1


async def test_another_message_is_told_with_both_texts_and_the_replay_goes_on(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt()])
    questions = recorded_questions()
    questions[1] = says(replace(questions[1][0], content="12:01 \ud800"))
    questions[3] = says(Message("user", "another thing"))
    session = await replayed(policy, questions)
    diverged = session.notes["replay"]["diverged"]
    assert diverged["turn"] == 1
    assert (diverged["recorded"], diverged["given"]) == (
        "tool (to call-1): 12:00 \ufffd",
        "tool (to call-1): 12:01 \ufffd",
    )
    assert session.notes["replay"]["turns"] == 4


async def test_a_long_difference_is_shown_from_a_little_before_it(tmp_path: Path) -> None:
    long = attempt(
        trajectory=Trajectory(
            [Message("user", "a" * 5000), Message("assistant", "x", 0)], [Turn(0, "x", "stop")]
        )
    )
    policy = await record(tmp_path / "run", [long])
    session = await replayed(policy, [says(Message("user", "a" * 4000 + "b" * 1000))])
    diverged = session.notes["replay"]["diverged"]
    assert diverged["given"].startswith("a" * 200 + "b")
    assert diverged["recorded"] == "a" * 1200


async def test_more_turns_than_were_recorded(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt()])
    session = await replayed(policy, recorded_questions())
    with pytest.raises(PolicyError, match="the recording ends after 4 turns") as caught:
        await session.complete(says(Message("user", "more")), Sampling())
    assert caught.value.error_class == "policy_error"
    assert session.notes["replay"]["diverged"] == {"turn": 4, "recorded": "", "given": "user: more"}


@pytest.mark.parametrize("error_class", ["context_overflow", "agent_timeout"])
async def test_an_agent_that_ended_as_it_waited_ends_so_again(tmp_path: Path, error_class: str) -> None:
    evidence = Evidence("no room left", "policy server")
    ended = attempt(outcome=Outcome.FAILED, error_class=error_class, stage=Stage.AGENT, evidence=evidence)
    session = await replayed(await record(tmp_path / "run", [ended]), recorded_questions())
    with pytest.raises(PolicyError, match="no room left") as caught:
        await session.complete(says(Message("user", "more")), Sampling())
    assert (caught.value.error_class, caught.value.evidence) == (error_class, evidence)
    assert session.notes["replay"]["diverged"] is None


async def test_where_the_policy_was_lost_the_recording_ends(tmp_path: Path) -> None:
    lost = attempt(
        outcome=Outcome.INVALID,
        error_class="policy_unavailable",
        stage=Stage.AGENT,
        reward=None,
        evidence=Evidence("x"),
    )
    session = await replayed(await record(tmp_path / "run", [lost]), recorded_questions())
    with pytest.raises(PolicyError, match="after 4 turns with policy_unavailable") as caught:
        await session.complete(says(Message("user", "more")), Sampling())
    assert caught.value.error_class == "policy_error"


async def test_an_agent_that_summed_up_at_an_overflow_meets_it_again(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt(extra={"max_model_len": 4096})])
    questions = recorded_questions()
    session = await replayed(policy, questions[:2])
    assert isinstance(session, MeasuresTokens)
    assert (session.max_model_len, session.count_tokens("any")) == (4096, None)
    with pytest.raises(PolicyError) as caught:
        await session.complete(says(Message("user", "out", 1)), Sampling())
    assert caught.value.error_class == "context_overflow"
    await session.complete(questions[2], Sampling())
    session.restart()
    await session.complete(questions[3], Sampling())
    assert session.notes["replay"] | {"run": ""} == {
        "run": "",
        "attempt_id": "attempt-bash-0",
        "turns": 4,
        "recorded_turns": 4,
        "diverged": None,
    }


async def test_samples_and_agents_are_told_apart_in_any_process(tmp_path: Path) -> None:
    def says_its_name(agent: str, sample: int) -> Attempt:
        talk = Trajectory(
            [Message("assistant", f"{agent} {sample}", 0)], [Turn(0, f"{agent} {sample}", "stop")]
        )
        return attempt(sample, agent=agent, trajectory=talk)

    run = tmp_path / "run"
    await record(run, [says_its_name(agent, sample) for agent in ("bash", "keys") for sample in range(3)])
    policy = pickle.loads(pickle.dumps(RecordedPolicy(run, agent="keys")))
    sessions = [policy.session("x", task="t", sample=sample) for sample in (2, 0, 1)]
    made = await asyncio.gather(*(session.complete([], Sampling()) for session in sessions))
    assert [completion.text for completion, _ in made] == ["keys 2", "keys 0", "keys 1"]
    with pytest.raises(PolicyError, match="holds no rollout of t, sample 7, by keys"):
        await policy.session("x", task="t", sample=7).complete([], Sampling())


async def test_a_run_that_was_killed_is_served_from_its_journal(tmp_path: Path) -> None:
    policy = await record(tmp_path / "run", [attempt()], finish=False)
    session = await replayed(policy, recorded_questions())
    assert len(session.segments) == 3
    [row] = read_rollouts(tmp_path / "run").to_pylist()
    assert attempt_from_row(row).trajectory is not None


async def test_an_agent_that_the_run_cannot_answer_for_is_told_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await record(run, [attempt(agent="bash"), attempt(agent="keys")])
    with pytest.raises(ValueError, match="has several agents: name one of bash, keys"):
        RecordedPolicy(run)
    with pytest.raises(ValueError, match="has no rollout by tools: name one of bash, keys"):
        RecordedPolicy(run, agent="tools")
    [shard] = (run / "rollouts").iterdir()
    shard.write_bytes(b"")
    with pytest.raises(ValueError, match=r"part-00000\.arrow: this shard is damaged"):
        RecordedPolicy(run, agent="keys")
    Ledger.create(tmp_path / "begun", {}).close()
    with pytest.raises(ValueError, match="holds no rollout"):
        RecordedPolicy(tmp_path / "begun")


@pytest.mark.parametrize(("tokens", "counted"), [(True, 4 + len("<|im_end|>")), (False, None)])
async def test_tokens_of_a_scripted_policy_are_counted_as_it_did(
    tmp_path: Path, tokens: bool, counted: int | None
) -> None:
    """Bytes, also those of what looks like a control token; not at all where the script had no tokens."""
    script = tmp_path / "script.yaml"
    script.write_text(f"tokens: {str(tokens).lower()}\ndefault: [first]\n")
    text = "h\u00e9!<|im_end|>"
    scripted = ScriptedPolicy(script).session("x", task="t", sample=0)
    assert scripted.count_tokens(text) == counted
    made, segment = await scripted.complete(says(Message("user", "go")), Sampling())
    talk = Trajectory(
        [Message("user", "go"), Message("assistant", "first", 0)],
        [turn_of(0, made, segment)],
        scripted.segments,
    )
    await record(tmp_path / "run", [attempt(trajectory=talk)])
    session = RecordedPolicy(tmp_path / "run", tokenizer=BYTES).session("x", task="t", sample=0)
    await session.complete(says(Message("user", "go")), Sampling())
    assert session.count_tokens(text) == counted


def test_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run here"):
        RecordedPolicy(tmp_path / "nothing")
