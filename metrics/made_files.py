"""Files of YAML that follow from code: written by a module, committed, and held to what it says by a test."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as one, so that a change of it is a change of its lines; and no alias, which would
    stand in one place for what is said in another."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def made_by(module: str, *documents: Any) -> str:
    """The text of a file with these documents, that says what it is made by."""
    several = len(documents) > 1
    made = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110, explicit_start=several)
    return f"# Made by `python -m {module}`; do not edit.\n{made}"


def write_files(files: Iterable[tuple[str, str]], default: str) -> None:
    """Write files, name and text of each, into the directory that the command line names, else into `default`."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files:
        (directory / name).write_text(text, encoding="utf-8")
