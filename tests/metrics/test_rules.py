"""Recording rules and alerts, by Prometheus' own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcage.metrics.queries import metrics_of, unknown

ROOT = Path(__file__).parents[2]
RULES = ROOT / "metrics" / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"


def rules(file: str) -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load((RULES / file).read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]


ALERTS = rules("alerts.yaml")
RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording.yaml")}
TESTS = yaml.safe_load((RULES / "tests.yaml").read_text("utf-8"))["tests"]


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    done = promtool("check", "rules", "recording.yaml", "alerts.yaml", cwd=RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_on_its_fault_and_not_without() -> None:
    done = promtool("test", "rules", "tests.yaml", cwd=RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_tests_both_ways_and_all_that_a_reader_needs(alert: dict[str, Any]) -> None:
    expected = [
        bool(case.get("exp_alerts"))
        for test in TESTS
        for case in test.get("alert_rule_test", ())
        if case["alertname"] == alert["alert"]
    ]
    assert {True, False} == set(expected)
    assert alert["for"]
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook_url"} <= set(alert["annotations"])


def test_alerts_that_always_fire_would_fail_their_tests(tmp_path: Path) -> None:
    shutil.copytree(RULES, tmp_path, dirs_exist_ok=True)
    text = (RULES / "alerts.yaml").read_text("utf-8")
    always, changed = re.subn(r"expr: (\|\n(?: {10}.*\n)+|.*\n)", "expr: vector(1)\n", text)
    assert changed == len(ALERTS)
    (tmp_path / "alerts.yaml").write_text(always)
    assert promtool("check", "rules", "alerts.yaml", cwd=tmp_path).returncode == 0
    said = promtool("test", "rules", "tests.yaml", cwd=tmp_path).stderr
    for alert in ALERTS:
        assert re.search(rf"name: {alert['alert']} is silent,?\s.*\n?.*alertname: {alert['alert']}", said), (
            said
        )


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert["alert"] for alert in ALERTS}
    for alert in ALERTS:
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"
        text = (ROOT / alert["annotations"]["runbook_url"]).read_text("utf-8")
        assert re.findall("^## (.*)$", text, re.M) == ["What it means", "How to look", "What to do"]


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_names_only_metrics_pages_and_commands_that_there_are(page: Path) -> None:
    from typer.main import get_command

    from rollcage.cluster.cli import app

    text = page.read_text("utf-8")
    assert not unknown(text, RECORDED)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (RUNBOOKS / link).is_file(), link
    for named in re.findall(r"`(docs/[^`]+)`", text):
        assert (ROOT / named).is_file(), named
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for command in re.findall(r"`rollcage ([a-z]+)", text):
        assert command in commands, command


def test_every_metric_of_a_rule_exists() -> None:
    for name, query in [*RECORDED.items(), *((alert["alert"], alert["expr"]) for alert in ALERTS)]:
        assert metrics_of(query) or 'up{job="rollcage"}' in query, name
        assert not unknown(query, RECORDED), name
    assert unknown("rate(rollcage_attempts[5m]) / a:rollcage_b:c", RECORDED) == {
        "rollcage_attempts",
        "a:rollcage_b:c",
    }


def test_every_recorded_value_was_computed_by_hand() -> None:
    tested = " ".join(case["expr"] for test in TESTS for case in test.get("promql_expr_test", ()))
    assert not [name for name in RECORDED if name not in tested]
    for name in RECORDED:
        assert re.fullmatch(r"[a-z_]+:rollcage_[a-z_]+:(rate|ratio|ratio_rate|rate)(\d+m)?", name)
