"""Saved states: what is in their labels, and what keeps them from being taken for something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollcage.rollout.sandbox.base import Change
from rollcage.rollout.sandbox.changes import since
from rollcage.rollout.sandbox.image_gc import Forest, Stored, oldest_first
from rollcage.rollout.sandbox.states import environment_digest, pack_changes, unpack_changes
from rollcage.rollout.task import Environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    return Environment(tmp_path, memory_mb=64, env={"A": "1"})


def test_the_environments_digest_is_of_what_a_sandbox_is_made_of(
    environment: Environment, tmp_path: Path
) -> None:
    digest = environment_digest(environment)
    assert environment_digest(replace(environment, build_timeout_sec=1.0)) == digest
    assert environment_digest(replace(environment, env={"A": "2"})) != digest
    assert environment_digest(replace(environment, network_mode="no-network")) != digest
    (tmp_path / "new").touch()
    assert environment_digest(environment) != digest


def test_changes_come_out_of_a_label_as_they_went_in() -> None:
    changes = [
        Change("/app/h\u00e9llo w\u00f6rld", "added"),
        Change("/bin/cat", "modified"),
        Change("/etc/x", "deleted"),
    ]
    assert unpack_changes(pack_changes(changes)) == changes
    assert unpack_changes("") == []
    many = [Change(f"/usr/lib/node_modules/package-{n % 900}/file-{n}.js", "added") for n in range(50_000)]
    assert len(pack_changes(many)) < 1 << 20


@pytest.mark.parametrize(
    ("earlier", "later", "together"),
    [
        ("added", "modified", "added"),
        ("added", "deleted", None),
        ("modified", "deleted", "deleted"),
        ("deleted", "added", "modified"),
        ("modified", "modified", "modified"),
    ],
)
def test_what_changed_twice_is_one_change_of_the_first_image(
    earlier: str, later: str, together: str | None
) -> None:
    found = since(
        [Change("/f", earlier), Change("/g", "added")], [Change("/f", later), Change("/h", "added")]
    )  # type: ignore[arg-type]
    assert {change.path: change.kind for change in found} == {"/g": "added", "/h": "added"} | (
        {"/f": together} if together else {}
    )


def test_the_collector_of_images_takes_no_state_and_nothing_that_one_stands_on() -> None:
    images = [
        Stored("base", "", 100, ("rollcage/env:a",), ours=True),
        Stored("state", "base", 110, ("rollcage/state:attempt-1",)),
        Stored("other", "", 100, ("rollcage/env:b",), ours=True),
    ]
    chosen = oldest_first(Forest.of(images, ()), lambda _: 0.0, 10**9, before=1.0)
    assert [image.id for image in chosen] == ["other"]
