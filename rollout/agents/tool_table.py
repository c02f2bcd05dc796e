"""The tools of the `tools` agent: one table of their schemas, and the reading of a policy's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rollcage.rollout.model_json import read_json
from rollcage.rollout.policies.base import Structure, Tool


def _schema(required: Sequence[str] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_PATH = {"type": "string", "description": "Absolute, or relative to the shell's current directory."}

BASH = Tool(
    "bash",
    "Run a command in the machine's one bash shell. Directory and variables last from one call to the next. Programs "
    "that wait for a keyboard get none.",
    _schema(
        ["command"],
        command={"type": "string", "description": "The command; it may have several lines."},
        timeout={
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Seconds after which it is stopped; there is a limit without it, too.",
        },
    ),
)
READ_FILE = Tool(
    "read_file",
    "Show a text file's lines, each behind its number and a tab, which are not part of it. Of a long file a part is "
    "shown.",
    _schema(
        ["path"],
        path=_PATH,
        start_line={"type": "integer", "minimum": 1, "description": "The first line to show; 1 by default."},
        end_line={
            "type": "integer",
            "minimum": 1,
            "description": "The last line to show; the file's by default.",
        },
    ),
)
WRITE_FILE = Tool(
    "write_file",
    "Write a text file, in the place of what is there. Missing directories are made.",
    _schema(
        ["path", "content"],
        path=_PATH,
        content={"type": "string", "description": "The whole file, with the newline at its end."},
    ),
)
EDIT = Tool(
    "edit",
    "Replace a text in a file. It must be there exactly as given, white space and all, and once, unless all "
    "occurrences are to be replaced.",
    _schema(
        ["path", "old_string", "new_string"],
        path=_PATH,
        old_string={
            "type": "string",
            "description": "What is to be replaced, with enough around it to be unique.",
        },
        new_string={"type": "string", "description": "What takes its place; empty to delete it."},
        replace_all={"type": "boolean", "description": "Replace every occurrence; false by default."},
    ),
)
SUBMIT = Tool("submit", "Say that the task is done. Nothing can be done after it.", _schema())

TOOLS = (BASH, READ_FILE, WRITE_FILE, EDIT)

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


class CallProblem(ValueError):
    """A call that cannot be run; the words are for the policy."""


@dataclass(frozen=True)
class Call:
    """A call that can be run: the tool's name, and arguments that fit its schema."""

    tool: str
    arguments: Mapping[str, Any]


def read_call(name: str, arguments: str, tools: Sequence[Tool]) -> Call:
    """The call of one of `tools` with `arguments`, a JSON text. Arguments that are null are as good as left out.
    Raises `CallProblem` that says what is wrong with it."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise CallProblem(f"there is no tool {name!r}; there are {_listed(tool.name for tool in tools)}")
    try:
        values = read_json(arguments or "{}")
    except ValueError as error:
        raise CallProblem(f"the arguments of {name} are no JSON: {error}") from error
    if not isinstance(values, dict):
        raise CallProblem(f"the arguments of {name} are no JSON object")
    values = {key: value for key, value in values.items() if value is not None}
    known: Mapping[str, Mapping[str, Any]] = tool.parameters["properties"]
    for key in tool.parameters["required"]:
        if key not in values:
            raise CallProblem(f"the call of {name} has no {key!r}, which it needs")
    for key, value in values.items():
        if key not in known:
            raise CallProblem(f"{name} has no argument {key!r}; it has {_listed(known) or 'none'}")
        values[key] = _checked(f"{key!r} of {name}", value, known[key])
    return Call(name, values)


def read_structured(answer: str, tools: Sequence[Tool]) -> Call:
    """The call that an answer is which was to be held to `call_structure`. A policy whose engine does not hold it may
    put the object in a fence. Raises `CallProblem`."""
    text = answer.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").strip()
    try:
        value = read_json(text)
    except ValueError as error:
        raise CallProblem(f"it is no JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("tool"), str):
        raise CallProblem('it is no JSON object with a "tool"')
    if unknown := set(value) - {"tool", "arguments"}:
        raise CallProblem(f'it has a {min(unknown)!r} beside "tool" and "arguments"')
    return read_call(value["tool"], json.dumps(value.get("arguments", {})), tools)


def call_structure(tools: Sequence[Tool]) -> Structure:
    """The form of an answer that is one call: `{"tool": ..., "arguments": {...}}`."""
    calls = [
        {
            "type": "object",
            "properties": {"tool": {"const": tool.name}, "arguments": dict(tool.parameters)},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return Structure(json_schema={"anyOf": calls})


def described(tools: Sequence[Tool]) -> str:
    """The table as a prompt shows it to a policy that takes no tools: a line of JSON for each."""
    return "\n".join(
        json.dumps({"tool": tool.name, "description": tool.description, "arguments": tool.parameters})
        for tool in tools
    )


def _checked(what: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind = str(schema["type"])
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise CallProblem(f"{what} must be a JSON {kind}")
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise CallProblem(f"{what} holds a NUL or half a surrogate pair, which no shell takes")
    if isinstance(value, int | float):
        if value < schema.get("minimum", value):
            raise CallProblem(f"{what} must be at least {schema['minimum']}")
        if "exclusiveMinimum" in schema and not schema["exclusiveMinimum"] < value < inf:
            raise CallProblem(f"{what} must be above {schema['exclusiveMinimum']} and finite")
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
