"""The table in docs/outcomes.md is that of this folder, and every row of it is injected by a test of this folder."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from fault_table import TABLE, Row

from rollcage.rollout.outcome_page import recorded_faults


def test_the_rows_that_were_written_are_those_of_the_table() -> None:
    rows = {
        row["key"]: Row(**{name: row[name] for name in asdict(TABLE[row["key"]])})
        for row in recorded_faults()
    }
    assert rows == TABLE, "pytest tests/faults --write-fault-table, then write docs/outcomes.md anew"


def test_every_row_has_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    words = set(re.findall(r'"(\w+)"', tests)) | set(re.findall(r'"(\w+)"', _registry()))
    assert {key for key, row in TABLE.items() if not row.not_injected} <= words


def _registry() -> str:
    return (Path(__file__).parent / "registry.py").read_text()
