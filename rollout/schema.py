"""The Arrow schemas of a run, version 3: every field with its type, its meaning, its unit and when it is null.

`ATTEMPTS` has a row for each attempt, without the trajectory; `ROLLOUTS` a row for each ended rollout: its last
attempt, with the trajectory. Both are built from the field tables below, and so are the tables of
`docs/arrow.md` (`python -m rollcage.rollout.schema docs/arrow.md` writes them), so that the three can't differ.

Invariants: no field has the null type; text is `large_string`, so that no column overflows at 2 GiB; nested
fields are the same in every shard, whatever the shard holds; only fields with a null rule can be null.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rollcage.rollout.outcome import TABLE, Domain, Outcome, Stage
from rollcage.rollout.trajectory import Phase

SCHEMA_VERSION = 3
VERSION_KEY = b"rollcage.schema_version"

TEXT = pa.large_string()
TIME = pa.timestamp("us", tz="UTC")
WORD = pa.dictionary(pa.int8(), pa.string())
"""A word of a closed vocabulary; see `VOCABULARY`."""
NAME = pa.dictionary(pa.int16(), pa.string())
"""A name that a job has few of; the dictionary is the file's own."""

VOCABULARY: dict[str, tuple[str, ...]] = {
    "outcome": tuple(Outcome),
    "error_class": tuple(row.name for row in TABLE),
    "domain": tuple(Domain),
    "stage": tuple(Stage),
}
"""The values of the `WORD` columns in the order of their codes: the same in every file."""


class SchemaVersionError(ValueError):
    """A file was written with a schema that this version of rollcage does not know."""


@dataclass(frozen=True)
class Field:
    """One field. `null` says when it is null; an empty `null` means never. `type` of a struct or of a list of
    structs is made of `children`."""

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    null: str = ""
    children: tuple[Field, ...] = ()

    def arrow(self) -> pa.Field:
        """This field as pyarrow has it."""
        return pa.field(self.name, self.type, nullable=bool(self.null))


def _struct(children: Iterable[Field]) -> pa.DataType:
    return pa.struct([child.arrow() for child in children])


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", item, nullable=False))


def _record(name: str, meaning: str, children: tuple[Field, ...], null: str) -> Field:
    return Field(name, _struct(children), meaning, null=null, children=children)


def _records(name: str, meaning: str, children: tuple[Field, ...]) -> Field:
    return Field(name, _list(_struct(children)), meaning, children=children)


_NO_ERROR = "the attempt simply passed or failed"
_NO_REWARD = "the verifier gave no reward"

EVIDENCE = (
    Field("message", TEXT, "what was said about the failure"),
    Field("said_by", TEXT, "who said it: engine, builder, registry, container state, policy server, ..."),
    Field("status", pa.int32(), "HTTP status", null="there is none"),
    Field("exit_code", pa.int64(), "exit status of our container or of the verifier", null="there is none"),
    Field("oom_killed", pa.bool_(), "the container's state says that memory ran out", null="nobody asked"),
    Field("seconds", pa.float64(), "how long the failed call took", "s", "not measured"),
    Field("log_tail", TEXT, "the end of a log"),
    Field("also", _list(TEXT), "later faults of the same attempt"),
)

NAMED_REWARD = (
    Field("name", TEXT, "key in `reward.json`, or name of the step"),
    Field("value", pa.float64(), "the reward"),
)

_SAMPLE_FIELDS = (
    Field("job", TEXT, "name of the job"),
    Field("agent", NAME, "name of the agent"),
    Field("task", TEXT, "name of the task"),
    Field("task_digest", TEXT, "sha256 of the task's files, hex"),
    Field(
        "draw", pa.int32(), "which draw of the task this group is, from 0; a batch job draws each task once"
    ),
    Field("sample", pa.int32(), "which sample of its group, from 0"),
)

_ATTEMPT_FIELDS = (
    Field("attempt_id", TEXT, "name of the attempt, unique; empty for a rollout that no attempt decided"),
    Field("number", pa.int32(), "which attempt at this rollout"),
    Field("policy", TEXT, "name of the policy; empty for agents without one"),
    Field("host", TEXT, "name of the host; empty where no host was reached"),
    Field("outcome", WORD, "`passed`, `failed`, `invalid` or `cancelled`"),
    Field("error_class", WORD, "how the attempt ended, a name of the outcome table", null=_NO_ERROR),
    Field("domain", WORD, "whose failure that was", null=_NO_ERROR),
    Field("stage", WORD, "what the attempt was doing then", null=_NO_ERROR),
    _record("evidence", "what was seen when it failed, at most 4 KiB", EVIDENCE, "nothing failed"),
    Field("reward", pa.float64(), "the primary reward", null=_NO_REWARD),
    _records("reward_values", "every key of `reward.json`", NAMED_REWARD),
    Field("reward_source", TEXT, "the file that the reward was read from", null=_NO_REWARD),
    _records("reward_steps", "of a task of several steps: each step that ran", NAMED_REWARD),
    Field("skipped_steps", _list(TEXT), "steps not run because an earlier one stayed below its `min_reward`"),
    Field("test_ids", _list(TEXT), "single tests that the verifier's report lists, passed or not"),
    Field("verifier_output", TEXT, "the end of what the verifier printed"),
    Field("started_at", TIME, "start of the attempt", "UTC", "not known"),
    Field("ended_at", TIME, "end of the attempt", "UTC", "not known"),
    _record("phases", "where the wall time went; phases do not overlap", tuple(
        Field(phase.value, pa.float64(), f"time in the phase {phase.value}", "s", "phase not reached")
        for phase in Phase
    ), ""),
    Field("infra_seconds", pa.float64(), "time in the agent's phase that was lost to infra, not charged", "s"),
    Field("retry_after_sec", pa.float64(), "wait that the other side asked for", "s", "it did not"),
    Field("turn_count", pa.int32(), "turns of the policy", "turns"),
    Field("malformed_turns", pa.int32(), "turns that held no action that could be read", "turns"),
    Field("command_count", pa.int32(), "commands run in the sandbox by the agent", "commands"),
    Field("prompt_tokens", pa.int64(), "prompt tokens over all turns, each turn's whole prompt", "tokens"),
    Field("completion_tokens", pa.int64(), "sampled tokens", "tokens"),
    Field("cost_usd", pa.float64(), "what the policy's answers cost, by its prices", "USD", "it has none"),
    Field("extra", TEXT, "what an agent or a user's own code wants kept: a JSON object"),
)  # fmt: skip

TOOL_CALL = (
    Field("id", TEXT, "names the call"),
    Field("name", TEXT, "of the tool"),
    Field("arguments", TEXT, "JSON as the policy wrote it; it need not be valid"),
)

MESSAGE = (
    Field("role", TEXT, "system, user, assistant or tool"),
    Field("content", TEXT, "the text"),
    Field("turn", pa.int32(), "the turn that it answers or is", null="before the first turn"),
    _records("tool_calls", "of an assistant: the tools that it called", TOOL_CALL),
    Field("tool_call_id", TEXT, "of a tool: the call that it answers", null="of every other role"),
    Field("reasoning", TEXT, "of an assistant: what it thought, where the policy tells it from the content"),
    Field(
        "blocks", TEXT, "of an assistant: the answer as the server gave it (JSON), where it must get it back"
    ),
)

COMMAND = (
    Field("command", TEXT, "as the agent gave it"),
    Field(
        "exit_code", pa.int64(), "exit status", null="it never ended by itself, or was typed into a terminal"
    ),
    Field("stdout", TEXT, "standard output, head and tail"),
    Field("stderr", TEXT, "standard error, head and tail"),
    Field("seconds", pa.float64(), "wall time", "s"),
    Field("timed_out", pa.bool_(), "it was stopped at its timeout"),
    Field("omitted_bytes", pa.int64(), "left out of both outputs", "bytes"),
    Field("note", TEXT, "what the agent was told beside the output"),
    Field("keys", pa.bool_(), "it was typed into a terminal, and `stdout` came within `seconds`"),
)

TURN = (
    Field("index", pa.int32(), "from 0"),
    Field("text", TEXT, "the policy's answer"),
    Field("finish_reason", TEXT, "`stop` or `length`"),
    Field("segment", pa.int32(), "index of the segment that holds its tokens",
          null="the policy gave no token ids"),
    Field("prompt_len", pa.int32(), "`ids[:prompt_len]` of the segment is this turn's prompt", "tokens"),
    Field("completion_len", pa.int32(), "the ids behind the prompt that were sampled", "tokens"),
    Field("policy", TEXT, "name of the policy"),
    Field("policy_version", pa.int64(), "version of the weights that began it"),
    Field("policy_version_end", pa.int64(), "version of the weights that ended it"),
    Field("queue_seconds", pa.float64(), "wait before the engine worked on it", "s"),
    Field("generate_seconds", pa.float64(), "the engine's own time", "s"),
    Field("prompt_tokens", pa.int64(), "of the prompt, as the engine counted them", "tokens"),
    Field("completion_tokens", pa.int64(), "of the answer, as the engine counted them", "tokens"),
    Field("cached_tokens", pa.int64(), "of the prompt, those whose state the engine had", "tokens"),
    Field("cost_usd", pa.float64(), "what the answer cost, by the policy's prices", "USD", "it has none"),
    Field("structured", pa.bool_(), "the engine held it to a grammar or a schema"),
    Field("purpose", TEXT, "`act`, or `summary`: it summed the conversation up for a new segment"),
    Field("malformed", pa.bool_(), "it held no action that could be read"),
    _records("commands", "the commands it led to", COMMAND),
)  # fmt: skip

SEGMENT = (
    Field("ids", _list(pa.int32()), "token ids, exactly as the engine saw and returned them"),
    Field("loss_mask", _list(pa.int8()), "1 exactly on sampled tokens; as long as `ids`"),
    Field("logprobs", _list(pa.float32()), "of the sampled tokens, NaN where the mask is 0; as long as `ids`",
          "nat"),
)  # fmt: skip

_ROLLOUT_FIELDS = (
    Field("attempts", pa.int32(), "attempts that the rollout took; 0 where it ended before its first"),
    Field("group_size", pa.int32(), "samples that the job wanted of this task when the rollout ended"),
    _records("messages", "the conversation", MESSAGE),
    _records("turns", "the policy's answers and what they did", TURN),
    _records("segments", "runs of tokens with an unbroken prefix", SEGMENT),
)

FIELDS: dict[str, tuple[Field, ...]] = {
    "attempts": _SAMPLE_FIELDS + _ATTEMPT_FIELDS,
    "rollouts": _SAMPLE_FIELDS + _ATTEMPT_FIELDS + _ROLLOUT_FIELDS,
}


def _schema(fields: tuple[Field, ...]) -> pa.Schema:
    return pa.schema(
        [field.arrow() for field in fields], metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()}
    )


ATTEMPTS = _schema(FIELDS["attempts"])
ROLLOUTS = _schema(FIELDS["rollouts"])
SCHEMAS: dict[str, pa.Schema] = {"attempts": ATTEMPTS, "rollouts": ROLLOUTS}
KEY = ("job", "agent", "task", "draw", "sample")
"""The columns that name a rollout."""


def check_version(schema: pa.Schema, file: object) -> None:
    """Raise `SchemaVersionError` unless `schema`, read from `file`, is of a version that is known here."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode("utf-8", "replace")
    if found != str(SCHEMA_VERSION):
        raise SchemaVersionError(
            f"{file}: schema version {found}; this rollcage reads version {SCHEMA_VERSION}. "
            "Read it with the rollcage that wrote it, or a newer one."
        )


def tables() -> dict[str, str]:
    """The tables of `docs/arrow.md`, by the name of their place in it."""
    return {
        "key": _table(_SAMPLE_FIELDS),
        "attempt": _table(_ATTEMPT_FIELDS),
        "rollout": _table(_ROLLOUT_FIELDS),
        "vocabulary": "\n".join(
            ["| column | values, in the order of their codes |", "|---|---|"]
            + [f"| `{name}` | {', '.join(f'`{v}`' for v in values)} |" for name, values in VOCABULARY.items()]
        ),
    }


def update_page(page: str) -> str:
    """`page` with each part between `<!-- table: NAME -->` and `<!-- end -->` written anew."""
    current = tables()
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{current[match[2]]}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def _table(fields: tuple[Field, ...]) -> str:
    lines = ["| field | type | unit | null when | meaning |", "|---|---|---|---|---|"]
    for path, field in _walk(fields):
        null = field.null or "never"
        lines.append(f"| `{path}` | {_type_name(field)} | {field.unit} | {null} | {field.meaning} |")
    return "\n".join(lines)


def _walk(fields: tuple[Field, ...], prefix: str = "") -> Iterator[tuple[str, Field]]:
    for field in fields:
        yield f"{prefix}{field.name}", field
        item = "[]" if pa.types.is_list(field.type) else ""
        yield from _walk(field.children, f"{prefix}{field.name}{item}.")


def _type_name(field: Field) -> str:
    if field.children:
        return "list of structs" if pa.types.is_list(field.type) else "struct"
    if pa.types.is_dictionary(field.type):
        return f"dictionary&lt;{field.type.index_type}, {field.type.value_type}&gt;"
    if pa.types.is_list(field.type):
        return f"list&lt;{field.type.value_type}&gt;"
    return str(field.type)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(update_page(Path(name).read_text()))
