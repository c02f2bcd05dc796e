"""vLLM's own parsers of tool calls and reasoning, on answers whose tokens are all there.

As vLLM's chat server uses them: the parsers see a request of its chat API, say of it whether they need the text with
its special tokens, and get the text without the token that ended it. What a parser would add to hold the engine to
its format is left out: an answer is held to what an agent asks for, and to nothing else.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rollcage.rollout.policies.base import Tool
from rollcage.rollout.policies.engine import Parsed
from rollcage.rollout.trajectory import ToolCall

FAILURES = (
    ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError, SyntaxError,
    MemoryError, TimeoutError,
)  # fmt: skip
"""What Python raises over a text that the author of a parser has not thought of: the model wrote it, so it is an
answer without calls. MemoryError and SyntaxError are `ast.parse`'s, TimeoutError is of vLLM's regular expressions."""

SESSIONS = 10_000
"""Conversations whose ids of tool calls are remembered, the latest. Some 100 bytes for each call."""


def require_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ValueError`, with the names that there are, for a parser that vLLM does not have."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name, kind, known in (
        (tool_parser, "tool", ToolParserManager.list_registered()),
        (reasoning_parser, "reasoning", ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            raise ValueError(f"vLLM has no {kind} parser {name!r}; it has {', '.join(known)}")


class AnswerParser:
    """Takes answers apart. `template_kwargs` are the chat template's: some parsers go by `enable_thinking`.

    Raises `ValueError` where the parsers do not fit the model's tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_config: Any,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        from vllm.parser import ParserManager

        self._tokenizer = tokenizer
        self._model_config = model_config
        self._template_kwargs = dict(template_kwargs)
        self._seen: OrderedDict[str, set[str]] = OrderedDict()
        try:
            self._parser = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                model_name=model_config.model,
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ValueError(f"vLLM's parsers cannot be used with this model: {error}") from error
        self._with_tools = tool_parser is not None

    def reasoning(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """What vLLM's engine has to know to leave the thinking of a structured answer free."""
        parser = self._make(())
        if parser.reasoning_parser is None:
            return {}
        return {
            "reasoning_ended": parser.is_reasoning_end(list(prompt_ids)),
            "reasoning_parser_kwargs": {"chat_template_kwargs": self._template_kwargs},
        }

    def parse(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        *,
        ended: bool,
        tools: Sequence[Tool],
        session_id: str,
    ) -> Parsed:
        """`ended`: the last id is the token that ended the answer. An answer that a parser fails on, or in which it
        finds nothing, is its text as it is."""
        said = list(ids[:-1] if ended else ids)
        plain = Parsed(self._tokenizer.decode(said, skip_special_tokens=True))
        try:
            parser = self._make(tools)
            request = parser.adjust_request(self._request(tools))
            parser.set_prompt_token_ids(list(prompt_ids))
            text = self._tokenizer.decode(said, skip_special_tokens=request.skip_special_tokens)
            reasoning, content, calls = parser.parse(
                text,
                request,
                enable_auto_tools=self._with_tools,
                model_output_token_ids=list(ids),
            )
        except FAILURES:
            return plain
        if not reasoning and not calls:
            return plain
        return Parsed(
            text=content or "",
            reasoning=reasoning or "",
            tool_calls=tuple(
                ToolCall(self._unique(call.id, session_id), call.name, call.arguments) for call in calls or ()
            ),
        )

    def forget(self, session_id: str) -> None:
        """The conversation is over."""
        self._seen.pop(session_id, None)

    def _make(self, tools: Sequence[Tool]) -> Any:
        """Parsers have state: each answer is given its own."""
        assert self._parser is not None, "made with at least one parser's name"
        return self._parser(
            self._tokenizer,
            self._request(tools).tools,
            chat_template_kwargs=self._template_kwargs,
            model_config=self._model_config,
        )

    def _request(self, tools: Sequence[Tool]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        functions = [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in tools
        ]
        return ChatCompletionRequest(
            messages=[],
            tools=[{"type": "function", "function": function} for function in functions] or None,
            tool_choice="auto" if functions else "none",
            chat_template_kwargs=self._template_kwargs,
        )

    def _unique(self, given: str | None, session_id: str) -> str:
        """An id that no call of the conversation has had. A parser draws it, or takes the one that the model wrote:
        that is kept where it is new, because the template shows it to the model again."""
        seen = self._seen.setdefault(session_id, set())
        self._seen.move_to_end(session_id)
        if len(self._seen) > SESSIONS:
            self._seen.popitem(last=False)
        if not given or given in seen:
            given = f"{given or 'call'}-{uuid.uuid4().hex[:12]}"
        seen.add(given)
        return given
