from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def test_what_a_kind_lacks_is_a_case_of_this_suite(kinds: Mapping[str, Any]) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for kind in kinds.values():
        for case, reason in kind.lacks.items():
            assert f"def {case}(" in text, case
            assert reason
