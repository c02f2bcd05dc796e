"""What the groups of commands share: streams, options, exit statuses."""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from typing import Annotated, Any

import typer
from rich.console import Console

NO_TERMINAL = 10_000
"""Columns where nobody looks on: tables take what they need, and no text is broken."""

out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else NO_TERMINAL, emoji=False)
err = Console(stderr=True, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
DockerHost = Annotated[
    str | None,
    typer.Option("--docker-host", help="The engine's address; default: DOCKER_HOST, or the socket."),
]


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0
    BAD_INPUT = 1
    COULD_NOT_RUN = 2
    INCOMPLETE = 3
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """Print the result and nothing else; where standard output cannot take a character of it, as ASCII."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(getattr(out.file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, default=str)
    out.file.write(text + "\n")
    out.file.flush()
