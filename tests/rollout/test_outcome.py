"""The outcome table is the design's, and evidence stays small and readable."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.outcome import (
    BY_NAME,
    EVIDENCE_BYTES,
    TABLE,
    AgentStopped,
    Cancelled,
    Domain,
    Evidence,
    PolicyError,
    Quarantine,
    RolloutError,
    SandboxError,
    Stale,
    TaskError,
    VerifierError,
    backoff,
)
from rollcage.rollout.outcome_page import page, recorded_faults

DESIGN = {
    "agent": "agent_timeout turn_limit token_limit context_overflow malformed_actions agent_oom agent_killed_sandbox",
    "task": "task_malformed dockerfile_parse image_build base_image_missing container_config healthcheck unsupported",
    "verifier": "reward_missing reward_malformed reward_tampered verifier_timeout verifier_crash",
    "infra": "network_pool network_setup image_pull build_infra disk_full container_start container_lost "
    "docker_unavailable docker_timeout host_lost host_oom policy_unavailable policy_timeout policy_error "
    "policy_refused rate_limited",
    "service": "internal_error cancelled stale",
}


def test_the_table_has_the_classes_of_the_design_and_no_other() -> None:
    table: dict[str, list[str]] = {}
    for row in TABLE:
        table.setdefault(row.domain.value, []).append(row.name)
    assert table == {domain: names.split() for domain, names in DESIGN.items()}


def test_only_an_agents_own_failure_gives_a_reward_and_only_infra_and_stale_have_more_than_one_retry() -> (
    None
):
    for row in TABLE:
        assert row.reward_valid == (row.domain is Domain.AGENT)
        match row.domain:
            case Domain.AGENT:
                assert (row.retries, row.quarantine) == (0, Quarantine.NEVER)
            case Domain.TASK:
                assert (row.retries, row.quarantine) == (0, Quarantine.AT_ONCE)
            case Domain.VERIFIER:
                never = row.name == "reward_tampered"  # the agent's own doing
                assert row.retries == 1
                assert row.quarantine is (Quarantine.NEVER if never else Quarantine.AFTER_RETRIES)
            case Domain.INFRA:
                refused = row.name == "policy_refused"  # and would be again
                assert row.retries == 0 if refused else row.retries >= 2
                assert (row.backoff_sec > 0) != refused
                assert row.quarantine is Quarantine.NEVER
            case Domain.SERVICE:
                assert row.retries == {"internal_error": 1, "stale": 8, "cancelled": 0}[row.name]


def test_the_page_is_current() -> None:
    written = Path(__file__).resolve().parents[2] / "docs" / "outcomes.md"
    assert written.read_text() == page()


def test_every_fault_that_was_injected_was_given_the_class_that_is_expected() -> None:
    rows = recorded_faults()
    assert [row for row in rows if not row["not_injected"] and row["given"] != row["expected"]] == []
    assert all(row["given"] == "" for row in rows if row["not_injected"])
    known = {row["expected"] for row in rows}
    assert set(BY_NAME) <= known, "each class is in the table"
    assert known - set(BY_NAME) <= {"passed", "failed", "nothing left"}


def test_waits_double_and_stay_below_a_minute() -> None:
    assert [backoff("network_pool", retry) for retry in (1, 2, 3, 10)] == [2, 4, 8, 60]


def test_an_error_carries_a_class_of_its_own_boundary_only() -> None:
    with pytest.raises(ValueError, match="VerifierError cannot carry the error class 'network_pool'"):
        VerifierError("network_pool", "no")
    with pytest.raises(ValueError, match="cannot carry the error class 'nonsense'"):
        RolloutError("nonsense", "no")


@pytest.mark.parametrize(
    "error",
    [
        SandboxError("docker_timeout", "late", Evidence("late", "engine", status=500), retry_after_sec=3.0),
        PolicyError("rate_limited", "slow down"),
        AgentStopped("turn_limit", "30 turns"),
        TaskError("healthcheck", "never well"),
        Stale("stale", "too old"),
        Cancelled(),
    ],
)
def test_an_error_crosses_a_process_whole(error: RolloutError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.error_class, copy.message, copy.evidence, copy.retry_after_sec) == (
        error.error_class,
        error.message,
        error.evidence,
        error.retry_after_sec,
    )


@given(
    message=st.text(st.characters(codec=None), max_size=3000),
    log=st.text(st.characters(codec=None), max_size=20_000),
    also=st.lists(st.text(max_size=2000), max_size=8),
)
def test_evidence_is_capped_and_readable_whatever_was_said(message: str, log: str, also: list[str]) -> None:
    capped = Evidence(message, "engine", log_tail=log, also=tuple(also)).capped()
    assert capped.size() <= EVIDENCE_BYTES
    (capped.message + capped.log_tail + "".join(capped.also)).encode("utf-8")


def test_capping_keeps_the_end_of_the_log_and_the_head_of_the_message() -> None:
    capped = Evidence("first " + "m" * 100, "builder", log_tail="x" * 10_000 + "last").capped()
    assert capped.message.startswith("first m")
    assert capped.log_tail.endswith("last")
    assert set(BY_NAME) == {row.name for row in TABLE}
