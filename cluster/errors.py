"""The two ways in which a command fails: what it was given, and what it needs.

InputError    a file or option is wrong; the message names it, the line and the remedy (exit status 1)
CouldNotRun   an engine, Ray or a model cannot be had (exit status 2)
"""


class InputError(Exception):
    """Something that the user gave cannot be used."""


class CouldNotRun(Exception):
    """Something that the job needs is not there."""
