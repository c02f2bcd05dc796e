"""Faults are injected into real engines; a row of the table is recorded by the test that injected it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; these helpers are this folder's alone

import private_dockerd
from fault_table import TABLE
from private_dockerd import PrivateEngine

RECORD = Path(__file__).parents[2] / "rollout/faults.json"

Record = Callable[[str, str], None]

_given: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-fault-table",
        action="store_true",
        help="write what each fault was given to rollout/faults.json (docs/outcomes.md is made of it); what is not run "
        "stays as it was",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-fault-table", False):
        before = (
            {row["key"]: row["given"] for row in json.loads(RECORD.read_text())} if RECORD.exists() else {}
        )
        rows = [
            {
                "key": key,
                "fault": row.fault,
                "how": row.how,
                "expected": row.expected,
                "given": _given.get(key, before.get(key, "")),
                "not_injected": row.not_injected,
            }
            for key, row in TABLE.items()
        ]
        RECORD.write_text(json.dumps(rows, indent=1) + "\n")


@pytest.fixture(scope="session")
def record() -> Record:
    """Say what a row of the table was given: it must be what is expected."""

    def record(key: str, given: str) -> None:
        _given[key] = given
        assert given == TABLE[key].expected, f"{key}: {TABLE[key].fault}"

    return record


@pytest.fixture(scope="session")
def private_engine() -> Iterator[Callable[..., PrivateEngine]]:
    """Start private engines; they are ended after the last test."""
    why = private_dockerd.missing()
    if why:
        pytest.skip(why)
    made: list[PrivateEngine] = []

    def start(**settings: object) -> PrivateEngine:
        made.append(PrivateEngine(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def engine(private_engine: Callable[..., PrivateEngine]) -> PrivateEngine:
    """One for all faults that leave it well."""
    return private_engine()
