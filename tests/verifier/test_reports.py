"""Test names out of CTRF and JUnit reports; broken reports give none and break nothing."""

from __future__ import annotations

import json

import pytest

from rollcage.verifier import reports


def test_names_of_a_ctrf_report() -> None:
    tests = [
        {"name": "test_a", "status": "passed"},
        {"name": "test_b", "status": "failed"},
        {"name": "test_a"},
    ]
    data = json.dumps({"results": {"tool": {"name": "pytest"}, "tests": tests}}).encode()
    assert reports.test_ids("ctrf.json", data) == ("test_a", "test_b")


def test_names_of_a_junit_report() -> None:
    data = b"""<?xml version="1.0"?><testsuites><testsuite name="pytest">
      <testcase classname="test_outputs" name="test_a"/><testcase name="test_b"><failure/></testcase>
    </testsuite></testsuites>"""
    assert reports.test_ids("junit.xml", data) == ("test_outputs::test_a", "test_b")


def test_names_are_bounded() -> None:
    tests = [{"name": f"{n}" + "x" * 10_000} for n in range(100)]
    found = reports.test_ids("ctrf.json", json.dumps({"results": {"tests": tests}}).encode())
    assert len(found) == 100
    assert max(map(len, found)) == 300
    many = [{"name": f"test_{n}"} for n in range(reports.MAX_TESTS + 10)]
    assert (
        len(reports.test_ids("ctrf.json", json.dumps({"results": {"tests": many}}).encode()))
        == reports.MAX_TESTS
    )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ctrf.json", b""),
        ("ctrf.json", b"{"),
        ("ctrf.json", b"[" * 500_000),
        ("ctrf.json", b'{"results": []}'),
        ("ctrf.json", b'{"results": {"tests": {"name": "x"}}}'),
        ("ctrf.json", b'{"results": {"tests": [1, {"name": 2}, {"name": ""}]}}'),
        ("junit.xml", b"not xml"),
        ("junit.xml", b'<!DOCTYPE x [<!ENTITY a "aaaa">]><testcase name="&a;"/>'),
        ("junit.xml", b" " * (reports.REPORT_BYTES + 1)),
    ],
)
def test_a_report_that_cannot_be_read_gives_no_names(name: str, data: bytes) -> None:
    assert reports.test_ids(name, data) == ()
