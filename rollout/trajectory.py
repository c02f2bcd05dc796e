"""What happened in one attempt: turns, commands, exact tokens, phases, reward, outcome.

Plain data: it is pickled between processes and written to Arrow as it stands (`arrow.py`).

Invariants:

- Token ids are the ones that the engine saw and returned. Nothing is ever tokenized again.
- A `Segment` is a run of tokens with an unbroken prefix. A turn's prompt is `segment.ids[:prompt_len]`
  and its completion the `completion_len` ids behind it.
- `loss_mask` is 1 exactly on sampled tokens; `logprobs` is NaN exactly where the mask is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rollcage.rollout.outcome import Evidence, Outcome, Stage


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as a policy made it. `arguments` is the JSON text that it wrote, which need not be valid."""

    id: str
    name: str
    arguments: str


@dataclass
class Message:
    """One message of the conversation. `role` is system, user, assistant or tool."""

    role: str
    content: str
    turn: int | None = None
    """The turn that this message answers or (for an assistant) is; None before the first."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that it answers."""
    reasoning: str = ""
    """Of an assistant: what it thought, where the policy tells it from the content."""
    blocks: str = ""
    """Of an assistant: the answer as the server gave it, as JSON, where the server must get it back unchanged."""


@dataclass
class CommandRecord:
    """One command that an agent ran in the sandbox, and what came back.

    `stdout` and `stderr` are capped; `omitted_bytes` counts what was left out of both. `exit_code` is None
    where the command never ended by itself. `note` is what the agent was told beside the output (that the
    command was stopped, that the shell was replaced). `keys`: `command` was typed into a terminal, `stdout` is what
    came within `seconds`, and there is no exit code.
    """

    command: str
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    omitted_bytes: int = 0
    note: str = ""
    keys: bool = False


@dataclass
class Turn:
    """One answer of the policy and the commands it led to.

    `segment` is None where the policy gave no token ids; `prompt_len` and `completion_len` count ids and are then
    0, while `prompt_tokens` and `completion_tokens` are what the policy says it used. `queue_seconds` is the time
    that the request waited before the engine worked on it, retries included, `generate_seconds` the time of the
    work itself. The answer was begun by `policy_version` and ended by `policy_version_end`: another one where
    weights were replaced in between.
    """

    index: int
    text: str
    finish_reason: str
    segment: int | None = None
    prompt_len: int = 0
    completion_len: int = 0
    policy: str = ""
    policy_version: int = 0
    policy_version_end: int = 0
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    structured: bool = False
    """The engine was asked to hold the answer to a grammar or a schema."""
    purpose: str = "act"
    """`act`, or `summary`: the answer summed the conversation up for a new segment."""
    malformed: bool = False
    commands: list[CommandRecord] = field(default_factory=list)


@dataclass
class Segment:
    """A run of tokens with an unbroken prefix: parallel lists of one length."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Trajectory:
    """Everything between an agent and its policy in one attempt."""

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all turns, each turn's whole prompt counted."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def cost_usd(self) -> float | None:
        """What the answers cost; None where no turn has a price."""
        costs = [turn.cost_usd for turn in self.turns if turn.cost_usd is not None]
        return sum(costs) if costs else None


class Phase(StrEnum):
    """Where an attempt's wall time goes. Phases do not overlap; `QUEUE` is the wait for room on the host."""

    QUEUE = "queue"
    IMAGE = "image"
    START = "start"
    AGENT = "agent"
    VERIFY = "verify"
    TEARDOWN = "teardown"


@dataclass
class Reward:
    """What a verifier gave: `value` is the primary reward, `values` every key of reward.json.

    `test_ids`: names of the single tests that the verifier's report lists (ctrf or junit), passed or not.
    `output_tail`: the end of what the verifier printed.
    """

    value: float
    values: dict[str, float] = field(default_factory=dict)
    source: str = "reward.txt"
    output_tail: str = ""
    test_ids: tuple[str, ...] = ()
    steps: tuple[tuple[str, float], ...] = ()
    """Of a task of several steps: each step that ran and its reward."""
    skipped_steps: tuple[str, ...] = ()
    """Steps that were not run because an earlier one stayed below its `min_reward`."""


class RolloutKey(NamedTuple):
    """Names one rollout: what no two rollouts share."""

    job: str
    agent: str
    task: str
    sample: int
    draw: int = 0


@dataclass
class Attempt:
    """The one record in which every attempt ends.

    Times are Unix seconds; `phases` maps `Phase` to seconds. `infra_seconds` is the time inside the agent's
    phase that was lost to queues, retries and the host and was not charged to the agent.
    `error_class` is None for an attempt that simply passed or failed.
    """

    attempt_id: str
    job: str
    task: str
    task_digest: str
    sample: int
    number: int
    agent: str
    policy: str
    host: str
    outcome: Outcome
    error_class: str | None = None
    stage: Stage | None = None
    evidence: Evidence | None = None
    reward: Reward | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    infra_seconds: float = 0.0
    retry_after_sec: float | None = None
    trajectory: Trajectory | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What an agent or a user's own code wants kept; JSON values only."""
    draw: int = 0
    """Which draw of the task its group is: a batch job draws each task once, a stream as often as it likes."""

    @property
    def key(self) -> RolloutKey:
        """The rollout that this is an attempt at."""
        return RolloutKey(self.job, self.agent, self.task, self.sample, self.draw)

    @property
    def reward_valid(self) -> bool:
        """True where the attempt gave a reward that counts."""
        return self.outcome in (Outcome.PASSED, Outcome.FAILED)
