"""What a container changed of its image, by the engine's list and by the overlay's upper directory."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from rollcage.rollout.sandbox import changes as module
from rollcage.rollout.sandbox.changes import Change, changes, restore
from rollcage.rollout.sandbox.engine import Engine

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"
HACKS = """
cp /bin/true /tmp/t && mv /tmp/t /usr/bin/bash; rm /usr/bin/grep; ln -sf /tmp/x /usr/bin/sed; echo x >>/etc/profile
mkdir -p /new/deep; echo x >/new/deep/file; mkfifo /new/fifo; ln -s /new /link
rm -rf /etc/skel; mkdir /etc/skel; echo x >/etc/skel/.mine; rm -rf /usr/share/base-files
rm -rf /etc/cron.daily; ln -s /new /etc/cron.daily
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def container(engine: Engine) -> Iterator[str]:
    config = engine.api.create_host_config(pids_limit=64, network_mode="none")
    labels = {"rollcage.host": "test-changes"}
    command = ["sh", "-c", HACKS + "touch /done; exec sleep 300"]
    made = engine.api.create_container(
        IMAGE, command, host_config=config, labels=labels, name=f"test-{uuid4().hex}"
    )
    engine.api.start(made["Id"])
    run = engine.api.exec_create(made["Id"], ["sh", "-c", "until [ -e /done ]; do sleep 0.05; done"])
    engine.api.exec_start(run["Id"])
    yield made["Id"]
    engine.api.remove_container(made["Id"], force=True, v=True)


EXPECTED = {
    Change("/usr/bin/bash", "modified"),
    Change("/usr/bin/grep", "deleted"),
    Change("/usr/bin/sed", "modified"),
    Change("/etc/profile", "modified"),
    Change("/new/deep/file", "added"),
    Change("/new/fifo", "added"),
    Change("/link", "added"),
    Change("/etc/skel/.mine", "added"),
    Change("/etc/skel/.bashrc", "deleted"),
    Change("/usr/share/base-files", "deleted"),
}


@pytest.mark.parametrize("local", [True, False])
async def test_every_change_is_listed_with_its_kind(
    engine: Engine, container: str, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    if not local:
        monkeypatch.setattr(module, "_readable", lambda _directory: False)
    found = await changes(engine, container)
    assert set(found) >= EXPECTED
    unchanged = {"/usr/bin/cat", "/etc/passwd", "/usr/bin", "/etc", "/usr"}
    assert not unchanged & {change.path for change in found}
    assert any(change.path.startswith("/etc/cron.daily") and change.kind != "added" for change in found)


async def test_the_images_files_are_put_back(engine: Engine, container: str) -> None:
    paths = [
        "/usr/bin/bash",
        "/usr/bin/grep",
        "/usr/bin/sed",
        "/usr/share/base-files",
        "/etc/cron.daily",
        "/no/such",
    ]
    await restore(engine, container, IMAGE, [*paths, "/no/such"])
    left = {change.path for change in await changes(engine, container) if change.kind == "deleted"}
    assert left.isdisjoint(paths)
    check = "echo genuine | grep genuine | sed s/genuine/real/; bash -c 'echo ${BASH_VERSION:+yes}'"
    run = engine.api.exec_create(container, ["sh", "-c", check])
    assert engine.api.exec_start(run["Id"]).split() == [b"real", b"yes"]
    assert engine.api.exec_inspect(run["Id"])["ExitCode"] == 0


async def test_nothing_is_left_of_the_container_that_files_were_taken_from(
    engine: Engine, container: str
) -> None:
    await restore(engine, container, IMAGE, ["/usr/bin/bash"])
    labelled = engine.api.containers(all=True, filters={"label": "rollcage.host=test-changes"})
    assert [found["Id"] for found in labelled] == [container]
