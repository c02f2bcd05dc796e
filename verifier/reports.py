"""Names of single tests out of the reports that verifiers leave: CTRF and JUnit, under their usual names.

They are a sign of life, not a verdict: whatever cannot be read gives no names, and never an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

REPORT_NAMES = ("ctrf.json", "ctrf-report.json", "junit.xml", "report.xml", "test-results.xml")
"""Looked for in /logs/verifier, in this order; the first that lists tests is taken."""

REPORT_BYTES = 4 << 20
"""A report of 5,000 tests with their output is about 2 MB."""

MAX_TESTS = 5000
_ID_CHARACTERS = 300


def test_ids(name: str, data: bytes) -> tuple[str, ...]:
    """The tests that the report called `name` lists, passed or not, in its order and each once."""
    if len(data) > REPORT_BYTES:
        return ()
    read = _ctrf if name.endswith(".json") else _junit
    unique = dict.fromkeys(found[:_ID_CHARACTERS] for found in read(data) if found)
    return tuple(unique)[:MAX_TESTS]


test_ids.__test__ = False  # type: ignore[attr-defined]


def _ctrf(data: bytes) -> Iterable[str]:
    try:
        report = json.loads(data)
    except (ValueError, RecursionError):
        return
    results = report.get("results") if isinstance(report, dict) else None
    tests = results.get("tests") if isinstance(results, dict) else None
    for test in tests if isinstance(tests, list) else []:
        if isinstance(test, dict) and isinstance(test.get("name"), str):
            yield test["name"]


def _junit(data: bytes) -> Iterator[str]:
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return
    for case in root.iter("testcase"):
        name = case.get("name", "")
        holder = case.get("classname", "")
        yield f"{holder}::{name}" if holder and name else name
