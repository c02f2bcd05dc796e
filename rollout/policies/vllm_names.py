"""The names that the installed vLLM knows, read from its source: importing it takes many seconds, and what is
misspelled is to be told before anything is started.

Where there is no vLLM here, or its source has another form than is known, there are no names (None): nothing is
refused then before vLLM itself refuses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def engine_arguments() -> frozenset[str] | None:
    """The fields of vLLM's `AsyncEngineArgs`."""
    classes = {
        node.name: node for node in _statements("engine/arg_utils.py") if isinstance(node, ast.ClassDef)
    }
    if not {"EngineArgs", "AsyncEngineArgs"} <= classes.keys():
        return None
    return frozenset(
        field.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@cache
def tool_parsers() -> frozenset[str] | None:
    """As `--tool-call-parser` of vLLM's server takes them."""
    return _registered("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")


@cache
def reasoning_parsers() -> frozenset[str] | None:
    """As `--reasoning-parser` takes them."""
    return _registered("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")


def _registered(file: str, table: str) -> frozenset[str] | None:
    for node in _statements(file):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == table for target in targets):
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                return frozenset(key for key in keys if isinstance(key, str))
    return None


def _statements(file: str) -> Iterator[ast.stmt]:
    """Of a module of vLLM's; none where it is not there."""
    spec = find_spec("vllm")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(root, file)
        if path.is_file():
            yield from ast.parse(path.read_text(encoding="utf-8")).body
