"""The two ways in which a command fails: what it was given, and what it needs.

InputError    a file or option is wrong; the message names it, the line and the remedy (exit status 1)
CouldNotRun   an engine, Ray or a model cannot be had (exit status 2)
"""

from __future__ import annotations

from typing import Any, Self


class JobError(Exception):
    """What both are. `setting`: the way to the job's setting that it is about, where it is about one; `run_job` puts
    its line before the message."""

    setting: tuple[Any, ...] = ()

    def about(self, *setting: Any) -> Self:
        """The same error, of this setting."""
        self.setting = setting
        return self


class InputError(JobError):
    """Something that the user gave cannot be used."""


class CouldNotRun(JobError):
    """Something that the job needs is not there."""

    @classmethod
    def because(cls, error: Exception) -> CouldNotRun:
        """Of what an engine, a host or a model said, with what to do."""
        return cls(f"{error}\n`rollcage doctor` looks at the engine and all else, and says what to do")
