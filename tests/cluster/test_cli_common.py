"""What commands print, on terminals of every kind."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper

import pytest
from rich.console import Console

from rollcage.cluster import cli_common


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_json_whatever_standard_output_can_take(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr(cli_common, "out", Console(file=stream))
    value = {"t\u00e4sk": "\U0001f600", "half": "\ud800"}
    cli_common.print_json(value)
    assert isinstance(stream.buffer, BytesIO)
    assert json.loads(stream.buffer.getvalue().decode(encoding)) == value


def test_a_word_between_colons_stays_what_it_is() -> None:
    for console in (cli_common.out, cli_common.err):
        assert str(console.render_str("rollcage/x:bug:y", markup=False)) == "rollcage/x:bug:y"
