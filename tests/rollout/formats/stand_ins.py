"""Stand-ins for modules that a package imports and that a check does not need (an engine, a trainer's own workers)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, ClassVar

import typing_extensions


class StandIn(types.ModuleType):
    """Has every name; each is a class that can be made, called, subscripted and derived from."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__init__": lambda self, *_, **__: None,
            "__call__": lambda self, *given, **__: given[0] if given else None,
            "__class_getitem__": classmethod(lambda cls, _: cls),
        }
        return type(name, (), members)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of these names, and all below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def use(names: Sequence[str]) -> None:
    """Let these modules be stand-ins, in this process from now on."""
    # pydantic takes no other before Python 3.12, which some packages were written for.
    typing.TypedDict = typing_extensions.TypedDict
    sys.meta_path.insert(0, Finder(names))
