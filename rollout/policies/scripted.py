"""Answers from a file, for tests, demos and simulation. `scripts.py` says what the file holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.engine import require_room
from rollcage.rollout.policies.scripts import Answer, read_scripts
from rollcage.rollout.tokens import ChatRenderer, RunningTokens
from rollcage.rollout.trajectory import Message, Segment, ToolCall


class ScriptedPolicy:
    """Serves sessions from the file `path`. Raises `ValueError` with file and line where it is not as it must
    be."""

    def __init__(self, path: Path | str, *, name: str = "scripted") -> None:
        self.name = name
        self._scripts = read_scripts(Path(path))
        self._renderer = ChatRenderer(ByteTokenizer()) if self._scripts.tokens else None

    def session(self, session_id: str, *, task: str, sample: int) -> ScriptedSession:
        """See `Policy`."""
        turns, most = self._scripts.turns(task, sample), self._scripts.max_model_len
        return ScriptedSession(self.name, turns, self._renderer, most)


class ScriptedSession:
    """One rollout's answers, in their order."""

    def __init__(
        self,
        policy: str,
        turns: Sequence[Answer],
        renderer: ChatRenderer | None,
        max_model_len: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        """See `MeasuresTokens`."""
        self._policy = policy
        self._turns = turns
        self._next = 0
        self._renderer = renderer
        self._tokens = RunningTokens(renderer) if renderer else None

    @property
    def segments(self) -> list[Segment]:
        return self._tokens.segments if self._tokens else []

    def count_tokens(self, text: str) -> int | None:
        """See `MeasuresTokens`."""
        if self._renderer is None:
            return None
        return len(self._renderer.encode(self._renderer.harmless(Message("tool", text))))

    def restart(self) -> None:
        """See `PolicySession`."""
        if self._tokens is not None:
            self._tokens.restart()

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. With tokens, an answer is cut at `max_tokens` as an engine would cut it; of one that is
        cut, nothing is told apart from the text. A prompt that overflows takes no answer from the script."""
        answer = self._turns[min(self._next, len(self._turns) - 1)]
        if self._tokens is None:
            await self._play(answer)
            return self._completion(answer), None
        prompt = self._tokens.prompt(new_messages, tools)
        most = sampling.max_tokens
        if self.max_model_len is not None:
            most = min(most, require_room(len(prompt.ids), self.max_model_len))
        await self._play(answer)
        whole = [*answer.whole.encode(), ByteTokenizer.END]
        ids = whole[:most]
        logprobs = [0.0] * len(ids)
        text = self._tokens.append(prompt, ids, logprobs)
        cut = Answer(text, answer.seconds, finish_reason="length")
        completion = self._completion(answer if len(ids) == len(whole) else cut)
        completion.prompt_ids, completion.ids, completion.logprobs = prompt.ids, ids, logprobs
        return completion, len(self.segments) - 1

    async def _play(self, answer: Answer) -> None:
        self._next += 1
        await asyncio.sleep(answer.seconds)
        if answer.error is not None:
            raise PolicyError(answer.error, answer.message or f"the script says {answer.error}")

    def _completion(self, answer: Answer) -> Completion:
        calls = enumerate(answer.tool_calls)
        return Completion(
            answer.text,
            answer.finish_reason,
            policy=self._policy,
            generate_seconds=answer.seconds,
            reasoning=answer.reasoning,
            tool_calls=tuple(
                ToolCall(f"call_{self._next}_{place}", name, arguments) for place, (name, arguments) in calls
            ),
        )

    async def close(self) -> None:
        """Nothing is kept."""


class ByteTokenizer:
    """Bytes as tokens (ids 0 to 255), two control tokens, ChatML's template: what `tokens.Tokenizer` asks for,
    with no model and no transformers behind it."""

    START, END = 256, 257
    added_tokens_decoder: Mapping[int, Any] = {
        START: SimpleNamespace(content="<|im_start|>", special=True),
        END: SimpleNamespace(content="<|im_end|>", special=True),
    }
    chat_template: Any = "<|im_start|>{role}\n{content}<|im_end|>\n"

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        turns = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._encode(text))

    def _encode(self, text: str) -> Iterator[int]:
        control = {token.content: number for number, token in self.added_tokens_decoder.items()}
        for number, part in enumerate(text.split("<|im_")):
            mark = next((mark for mark in control if number and f"<|im_{part}".startswith(mark)), "")
            if mark:
                yield control[mark]
            yield from (f"<|im_{part}"[len(mark) :] if number else part).encode()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        control = {} if skip_special_tokens else self.added_tokens_decoder
        parts = (
            bytes([number]) if number < 256 else control[number].content.encode() if control else b""
            for number in token_ids
        )
        return b"".join(parts).decode("utf-8", "replace")
