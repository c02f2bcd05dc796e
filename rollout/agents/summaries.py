"""Summing a conversation up before it outgrows the context, so that it can go on in a new segment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rollcage.rollout.agents.observation import shorten
from rollcage.rollout.trajectory import Message, ToolCall

SUMMARIZE_AT = 0.75

ROOM_TOKENS = 2_048
"""Kept free for the summary where the context is long: terminus-2 frees 4,000 for the request and its answer."""

MESSAGE_TOKENS = 16
"""What a template puts around one message, at most, in the templates of today's models."""

STUB = "[left out: there is no room for it]"

NOT_RUN = "[not run: a summary in words is asked for]"

HANDOVER = "What was done before on this task, as summed up by the one who did it:"


@dataclass(frozen=True)
class Summaries:
    """How an agent's conversation is summed up and taken up again.

    `opening`: the messages that a conversation about the step begins with, the task's the last; the summary is
    added to that one, for templates take no two messages of one role in a row. `request` asks for the summary.
    `at`: the part of the context's length from which on it is asked for, where that length is known; where it is
    not, once the next prompt does not fit. `also` gives what else the new conversation must begin with (a screen, say).
    """

    opening: Sequence[Message]
    request: str
    at: float = SUMMARIZE_AT
    also: Callable[[], Awaitable[str]] | None = None

    def __post_init__(self) -> None:
        check_summarize_at(self.at)

    def answer_tokens(self, max_model_len: int) -> int:
        """Tokens that the summary may have, at least."""
        return min(ROOM_TOKENS, int(max_model_len * (1 - self.at) / 4))

    def room(self, max_model_len: int, count: Callable[[str], int]) -> int:
        """Tokens to keep free, so that the summary can be asked for and answered: never all that is left when it
        is time for it."""
        asked = count(self.request) + count(STUB) + 2 * MESSAGE_TOKENS
        return min(asked + self.answer_tokens(max_model_len), int(max_model_len * (1 - self.at) * 3 / 4))

    async def reopening(self, summary: str, calls: Sequence[ToolCall] = ()) -> list[Message]:
        """The messages that the new conversation begins with. `calls` are shown where they are all that was said."""
        wanted = "\n".join(f"{call.name} {call.arguments}" for call in calls)
        instead = (
            f"(no words, but these calls, which were not run)\n{wanted}" if calls else "(nothing was said)"
        )
        parts = [HANDOVER, summary.strip() or instead]
        if self.also is not None:
            parts.append(await self.also())
        task = self.opening[-1]
        content = "\n\n".join((task.content, *parts))
        return [*self.opening[:-1], replace(task, content=content)]


def check_summarize_at(at: float) -> None:
    """Raises `ValueError` where this is no part of a context."""
    if not 0 < at < 1:
        raise ValueError("summarize_at is a part of the context's length: above 0 and below 1")


def asking(
    request: str, unseen: Sequence[Message], room: int | None, count: Callable[[str], int]
) -> list[Message]:
    """The messages that ask for a summary: what the policy has not seen yet, cut to `room` tokens (None: left out as
    good as whole), and the request. A tool's answer stays one: no call may be left without."""
    kept = [replace(message, content=_fitted(message, unseen, room, count)) for message in unseen]
    if kept and kept[-1].role == "user":
        return [*kept[:-1], replace(kept[-1], content=f"{kept[-1].content}\n\n{request}")]
    return [*kept, Message("user", request, kept[-1].turn if kept else None)]


def _fitted(
    message: Message, unseen: Sequence[Message], room: int | None, count: Callable[[str], int]
) -> str:
    each = 0 if room is None else room // len(unseen)
    shown = shorten(message.content, each, count) if each > count(STUB) else STUB
    return shown if len(shown) < len(message.content) else message.content
