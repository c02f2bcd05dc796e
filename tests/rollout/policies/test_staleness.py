"""A rollout whose policy's weights move on under it ends where it may not go on with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollcage.rollout.outcome import Stale
from rollcage.rollout.policies.base import Completion, Sampling
from rollcage.rollout.policies.engine import Generation, TokenPolicy, TokenSession
from rollcage.rollout.policies.scripted import ByteTokenizer
from rollcage.rollout.trajectory import Message


class Engine:
    """Answers with the weights of `version`, and ends the answer with those of `version_end`."""

    tokenizer = ByteTokenizer()
    max_model_len = 4096

    def __init__(self) -> None:
        self.version = 3
        self.version_end: int | None = None
        self.asked = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        self.asked += 1
        ids = [*b"ok", ByteTokenizer.END]
        return Generation(
            ids, [0.0] * 3, "stop", 0.0, 0.0, version=self.version, version_end=self.version_end
        )

    async def release(self, session_id: str) -> None:
        """Nothing is kept."""


class TellingEngine(Engine):
    async def current_version(self) -> int:
        return self.version


def session(engine: Engine, max_staleness: int | None) -> TokenSession:
    return TokenPolicy(engine, name="p", max_staleness=max_staleness).session("s", task="t", sample=0)


async def turn(one: TokenSession) -> Completion:
    made, _ = await one.complete([Message("user", "Go on.")], Sampling())
    return made


async def test_a_rollout_may_be_as_stale_as_the_job_says() -> None:
    engine = Engine()
    one = session(engine, 2)
    for version in (3, 4, 5):
        engine.version = version
        assert (await turn(one)).version == version
    engine.version = 6
    before = list(one.segments[0].ids)
    with pytest.raises(
        Stale, match="began with version 3 of policy p, which is at version 6 now: more than max_stal"
    ):
        await turn(one)
    assert one.segments[0].ids == before, "the answer that came too late is not appended"
    assert (await turn(session(engine, 0))).version == 6, "begun again, it is fresh"


async def test_where_the_engine_tells_its_version_no_turn_is_spent() -> None:
    engine = TellingEngine()
    one = session(engine, 0)
    await turn(one)
    one.restart()
    engine.version = 4
    with pytest.raises(Stale):
        await turn(one)
    assert engine.asked == 1


async def test_an_answer_that_newer_weights_ended_counts_as_theirs() -> None:
    engine = Engine()
    engine.version_end = 4
    with pytest.raises(Stale):
        await turn(session(engine, 0))
    assert (await turn(session(engine, 1))).version_end == 4


async def test_without_a_limit_a_rollout_goes_on_with_whatever_there_is() -> None:
    engine = TellingEngine()
    one = session(engine, None)
    for version in (3, 30, 300):
        engine.version = version
        assert (await turn(one)).version == version
