"""What a policy is told of a command, within a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollcage.rollout.policies.base import MeasuresTokens, PolicySession
from rollcage.rollout.sandbox.base import CommandResult

MAX_OUTPUT_TOKENS = 2_500
"""Of one command's output: about the 10 KB that terminus-2 shows, which models are trained with."""

BYTES_PER_TOKEN = 4
"""Where the policy has no tokenizer. English and code have 3 to 5 in the tokenizers of today's models."""


def token_counter(session: PolicySession | None) -> Callable[[str], int]:
    """Counts as the session's policy does, or else by bytes."""

    def count(text: str) -> int:
        tokens = session.count_tokens(text) if isinstance(session, MeasuresTokens) else None
        return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN) if tokens is None else tokens

    return count


def check_caps(command_timeout_sec: float, output_bytes: int, max_output_tokens: int | None) -> None:
    """Raises `ValueError` where an agent's option leaves nothing of a command."""
    if output_bytes < 1 or not command_timeout_sec > 0:  # not a number is above nothing
        raise ValueError("output_bytes and command_timeout_sec must be above 0")
    if max_output_tokens is not None and max_output_tokens < 1:
        raise ValueError("max_output_tokens must be above 0 (null: no limit)")


@dataclass(frozen=True)
class OutputCap:
    """Cuts texts to `tokens`, counted by `count` (None: nothing is cut)."""

    tokens: int | None
    count: Callable[[str], int]

    def cut(self, text: str) -> str:
        """Head and tail of a text, whole lines where they fit; a line between them says what is left out."""
        return text if self.tokens is None else shorten(text, self.tokens, self.count)

    def cut_both(self, stdout: str, stderr: str) -> tuple[str, str]:
        """Both of a command's outputs within `tokens` together. One that needs less than half leaves the other
        the rest."""
        if self.tokens is None:
            return stdout, stderr
        half = self.tokens // 2
        used = [min(self.count(text), half) if text else 0 for text in (stdout, stderr)]
        return (
            shorten(stdout, self.tokens - used[1], self.count),
            shorten(stderr, self.tokens - used[0], self.count),
        )


def observation(result: CommandResult, cap: OutputCap) -> str:
    """What the policy is told of a command."""
    status = "none" if result.exit_code is None else str(result.exit_code)
    stdout, stderr = cap.cut_both(_text(result.stdout), _text(result.stderr))
    lines = [f"<exit_code>{status}</exit_code>", *_section("stdout", stdout), *_section("stderr", stderr)]
    if result.omitted_bytes:
        lines.append(f"[{result.omitted_bytes} bytes of output were left out]")
    if result.note:
        lines.append(result.note)
    return "\n".join(lines)


def shorten(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The text in about `tokens`: as many from its head as from its tail."""
    if len(text.encode("utf-8", "replace")) <= tokens or (total := count(text)) <= tokens:
        return text
    lines = text.splitlines(keepends=True)
    head = _first(lines, tokens - tokens // 2, count)
    tail = _first(reversed(lines[len(head) :]), tokens // 2, count)[::-1]
    if not head or not tail:  # lines too long to keep a whole one: cut by characters
        each = max(1, len(text) * tokens // total // 2)
        head, tail = [text[:each]], [text[-each:]]
    shown = count("".join(head)) + count("".join(tail))
    left_out = f"[... {max(1, total - shown)} tokens left out ...]"
    return "\n".join(("".join(head).rstrip("\n"), left_out, "".join(tail)))


def _first(lines: Iterable[str], tokens: int, count: Callable[[str], int]) -> list[str]:
    """As many lines as fit."""
    kept: list[str] = []
    for line in lines:
        tokens -= max(1, count(line))
        if tokens < 0:
            break
        kept.append(line)
    return kept


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace").rstrip("\n")


def _section(name: str, text: str) -> list[str]:
    return [f"<{name}>", text, f"</{name}>"] if text else []
