"""The two ways in which a command fails: what it was given, and what it needs.

InputError    a file or option is wrong; the message names it, the line and the remedy (exit status 1)
CouldNotRun   an engine, Ray or a model cannot be had (exit status 2)
"""

from __future__ import annotations


class InputError(Exception):
    """Something that the user gave cannot be used."""


class CouldNotRun(Exception):
    """Something that the job needs is not there."""

    @classmethod
    def because(cls, error: Exception) -> CouldNotRun:
        """Of what an engine, a host or a model said, with what to do."""
        return cls(f"{error}\n`rollcage doctor` looks at the engine and all else, and says what to do")
