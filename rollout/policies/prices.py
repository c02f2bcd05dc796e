"""What answers cost: usage by kind of token, and public list prices.

The prices are those of https://platform.claude.com/docs/en/about-claude/pricing as of 2026-11-01, in US dollars for a
million tokens: standard speed and tier, no regional surcharge, cache entries that live five minutes. A job with other
terms, or a model that is not listed, needs prices of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CACHE_WRITE = 1.25
CACHE_READ = 0.1
"""Of the price of input, where a model has none of its own."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer or of several, each counted once: `input` leaves out what was written to the cache or read
    from it."""

    input: int = 0
    output: int = 0
    cache_write: int = 0
    cache_read: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cache_write + other.cache_write,
            self.cache_read + other.cache_read,
        )

    @property
    def prompt(self) -> int:
        """All tokens of the prompt, wherever they came from."""
        return self.input + self.cache_write + self.cache_read


@dataclass(frozen=True)
class Prices:
    """US dollars for a million tokens. A prompt of more than `long_from` tokens has the prices `long` for all of its
    tokens and its answer's."""

    input: float
    output: float
    cache_write: float | None = None
    cache_read: float | None = None
    long_from: int | None = None
    long: Prices | None = None

    def cost(self, usage: Usage) -> float:
        """US dollars of one answer."""
        if self.long is not None and self.long_from is not None and usage.prompt > self.long_from:
            return self.long.cost(usage)
        write = CACHE_WRITE * self.input if self.cache_write is None else self.cache_write
        read = CACHE_READ * self.input if self.cache_read is None else self.cache_read
        dollars = usage.input * self.input + usage.output * self.output
        return (dollars + usage.cache_write * write + usage.cache_read * read) / 1e6


_OPUS, _OLD_OPUS, _SONNET = Prices(5, 25), Prices(15, 75), Prices(3, 15)

LIST_PRICES = {
    "claude-fable-5-1": Prices(10, 50, cache_read=0.25),
    "claude-mythos-5-1": Prices(10, 50, cache_read=0.25),
    "claude-fable-5": Prices(10, 50),
    "claude-mythos-5": Prices(10, 50),
    "claude-opus-5-5": Prices(4, 20, cache_read=0.2),
    "claude-opus-5": _OPUS,
    "claude-opus-4-8": _OPUS,
    "claude-opus-4-7": _OPUS,
    "claude-opus-4-6": _OPUS,
    "claude-opus-4-5": _OPUS,
    "claude-opus-4-1": _OLD_OPUS,
    "claude-opus-4-0": _OLD_OPUS,
    "claude-opus-4": _OLD_OPUS,
    "claude-sonnet-5-5": Prices(2, 10, cache_read=0.1),
    "claude-sonnet-5": Prices(2, 10),
    "claude-sonnet-4-6": _SONNET,
    "claude-sonnet-4-5": _SONNET,
    "claude-sonnet-4-0": _SONNET,
    "claude-sonnet-4": _SONNET,
    "claude-haiku-5-5": Prices(0.1, 0.5, long_from=100_000, long=Prices(0.5, 2.5)),
    "claude-haiku-4-5": Prices(1, 5),
    "claude-3-5-haiku": Prices(0.8, 4),
}
"""By model. A name is followed by nothing but a date: the next version of a model has a price of its own."""

_DATED = re.compile(r"(.+?)(?:[-@](?:\d{8}|latest))?")


def known_prices(model: str) -> Prices | None:
    """The list prices of `model`, with or without the date in its name; None where they are not known."""
    named = _DATED.fullmatch(model.removeprefix("anthropic/"))
    return LIST_PRICES.get(named[1]) if named else None
