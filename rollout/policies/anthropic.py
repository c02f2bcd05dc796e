"""Claude, or any server that speaks Anthropic's Messages API, as a policy. It gives text and usage, no token ids.

What the API makes different from other policies:

- What the model thought goes back to it unchanged, signatures and redacted blocks too, also between calls of tools.
  Newer models show their thinking only where `thinking` asks for it (`{type: adaptive, display: summarized}`).
- A refusal is an answer: `finish_reason` is `refusal`, the text is empty or what there was before it. The refused
  messages stay in the conversation, and Claude is likely to refuse again while they do.
- Temperature, top_p and top_k exist for older models only, and in the API's version 2023-06-01 only. They are sent,
  with that version, where they are set to anything but 1, 1 and -1; a model that knows none refuses the request.
- Answers are streamed, so that long ones meet no proxy's timeout. A stream that breaks or reports an error is no
  answer: what came of it is dropped, and the turn is tried again as a whole. What it had counted until then is in no
  turn's cost, but is paid out of the budget.
- A JSON schema is asked for as the API's output format. A server that refuses such a request is asked without, from
  then on; grammars are never asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.anthropic_client import Endpoint, ask_once, connect
from rollcage.rollout.policies.anthropic_wire import FINISH, PAUSED, Answer, Block, History, request
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.budget import Budget
from rollcage.rollout.policies.prices import Prices, Usage, known_prices
from rollcage.rollout.policies.retry import Gate, retried
from rollcage.rollout.trajectory import Message, Segment

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

SAMPLING_VERSION = "2023-06-01"
"""The last version of the API that takes sampling parameters: later ones refuse them, at their defaults too."""

MOST_PAUSES = 10
"""How often one answer may pause and be sent back to go on."""


@dataclass
class _Line:
    """What the sessions in one event loop share."""

    client: AsyncAnthropic
    gate: Gate
    watch: asyncio.Task[None] | None
    """Calls the waits at the gate off when the budget is spent."""


class AnthropicPolicy:
    """Serves sessions from one endpoint. Can be pickled; each process, and each event loop in it, makes a client of its
    own when it first asks something.

    `thinking` is the API's own. Answers cost what `prices` says (None: the list price, where the model has a known
    one), and are paid out of `budget`. Raises `ValueError` for a budget without prices.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        name: str = "anthropic",
        thinking: Mapping[str, Any] | None = None,
        cache: bool = True,
        prices: Prices | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.thinking = thinking
        self.cache = cache
        self.prices = prices or known_prices(endpoint.model)
        self.budget = budget
        self.takes_structure = True
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()
        if budget is not None and self.prices is None:
            raise ValueError(
                f"a budget cannot be counted for {endpoint.model}: its prices are not known; set `prices`"
            )

    def session(self, session_id: str, *, task: str, sample: int) -> AnthropicSession:
        """See `Policy`."""
        return AnthropicSession(self, session_id)

    def with_budget(self, budget: Budget) -> AnthropicPolicy:
        """See `Budgeted`."""
        return AnthropicPolicy(
            self.endpoint,
            name=self.name,
            thinking=self.thinking,
            cache=self.cache,
            prices=self.prices,
            budget=budget,
        )

    async def close(self) -> None:
        """Close this event loop's connections. They are made anew where they are needed."""
        if line := self._lines.pop(asyncio.get_running_loop(), None):
            if line.watch is not None:
                line.watch.cancel()
            await line.client.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lines"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lines=WeakKeyDictionary())

    @property
    def line(self) -> _Line:
        """What this event loop's sessions share."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            gate = Gate(self.endpoint.max_connections)
            watch = None if self.budget is None else loop.create_task(_call_off_when_spent(gate, self.budget))
            self._lines[loop] = _Line(connect(self.endpoint), gate, watch)
        return self._lines[loop]


class AnthropicSession:
    """One rollout's conversation."""

    def __init__(self, policy: AnthropicPolicy, session_id: str) -> None:
        self._policy = policy
        self._id = session_id
        self._history = History()

    @property
    def segments(self) -> list[Segment]:
        """Empty: the API gives no tokens."""
        return []

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. Raises `Cancelled` too, where the policy's budget is spent."""
        history = self._history.extended(new_messages)
        schema = _output_schema(structure)
        if schema is not None and self._policy.takes_structure:
            try:
                return await self._turn(history, sampling, tools, schema)
            except PolicyError as fault:
                if fault.error_class != "policy_refused" or fault.evidence.status != 400:
                    raise
            made = await self._turn(history, sampling, tools, None)
            self._policy.takes_structure = False
            return made
        return await self._turn(history, sampling, tools, None)

    def restart(self) -> None:
        """See `PolicySession`."""
        self._history = History()

    async def close(self) -> None:
        """Nothing to let go of: the API keeps no conversation."""

    async def _turn(
        self, history: History, sampling: Sampling, tools: Sequence[Tool], schema: Mapping[str, Any] | None
    ) -> tuple[Completion, None]:
        policy, line = self._policy, self._policy.line
        settings = _settings(policy, sampling, schema)
        blocks: list[Block] = []
        answers: list[Answer] = []
        waited = seconds = 0.0
        while not answers or (answers[-1].stop_reason == PAUSED and len(answers) <= MOST_PAUSES):
            begins = not answers
            body = {**settings, **request(history.answered(blocks), tools, cache=policy.cache)}

            async def ask(body: dict[str, Any] = body, begins: bool = begins) -> Answer:
                if begins and policy.budget is not None:
                    await policy.budget.admit()
                answer = Answer()
                try:
                    return await ask_once(line.client, policy.endpoint, body, answer)
                finally:
                    await self._charge(answer.usage)

            got = await retried(ask, line.gate, within_sec=policy.endpoint.retry_sec)
            answers.append(got.value)
            blocks += got.value.finished
            waited, seconds = waited + got.waited, seconds + got.seconds
        self._history = history.answered(blocks)
        return replace(
            _completion(answers, blocks),
            policy=policy.name,
            queue_seconds=waited,
            generate_seconds=seconds,
            cost_usd=None if policy.prices is None else sum(policy.prices.cost(a.usage) for a in answers),
            structured=schema is not None,
        ), None

    async def _charge(self, usage: Usage) -> None:
        budget, prices = self._policy.budget, self._policy.prices
        if budget is not None and prices is not None and usage != Usage():
            await budget.charge(prices.cost(usage))


async def _call_off_when_spent(gate: Gate, budget: Budget) -> None:
    gate.call_off(await budget.until_spent())


def _settings(
    policy: AnthropicPolicy, sampling: Sampling, schema: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What `messages.create` takes beside the conversation. Raises `PolicyError` (`token_limit`) where the tokens that
    are left do not hold the thinking that was asked for."""
    body: dict[str, Any] = {**policy.endpoint.extra_body, **sampling.extra}
    headers: dict[str, str] = {}
    defaults = Sampling()
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(sampling, name)) != getattr(defaults, name):
            body[name] = value
            headers["anthropic-version"] = SAMPLING_VERSION
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if policy.thinking is not None:
        budget = policy.thinking.get("budget_tokens") or 0
        if budget >= sampling.max_tokens:
            said = f"{sampling.max_tokens} tokens are left, no more than the {budget} for thinking"
            raise PolicyError("token_limit", said)
        body["thinking"] = dict(policy.thinking)
    if schema is not None:
        asked = {"type": "json_schema", "schema": schema}
        body["output_config"] = {**body.get("output_config", {}), "format": asked}
    return {
        "model": policy.endpoint.model,
        "max_tokens": sampling.max_tokens,
        "stream": True,
        "extra_body": body,
        "extra_headers": headers,
    }


def _output_schema(structure: Structure | None) -> dict[str, Any] | None:
    """The schema in the form that the API takes: what it has no rule for becomes part of a description. None where
    there is no schema, or one that cannot be put so."""
    if structure is None or structure.json_schema is None:
        return None
    from anthropic import transform_schema

    try:
        return transform_schema(dict(structure.json_schema))
    except ValueError:
        return None


def _completion(answers: Sequence[Answer], blocks: Sequence[Block]) -> Completion:
    """One answer, of all parts that it came in."""
    usage = sum((answer.usage for answer in answers), Usage())
    return Completion(
        text="".join(answer.text for answer in answers),
        finish_reason=FINISH.get(answers[-1].stop_reason or "", "length"),
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        cached_tokens=usage.cache_read,
        reasoning="\n\n".join(filter(None, (answer.reasoning for answer in answers))),
        tool_calls=tuple(call for answer in answers for call in answer.tool_calls),
        blocks=json.dumps(blocks, ensure_ascii=False, separators=(",", ":")),
    )
