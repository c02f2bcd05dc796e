from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.files import _unpack

MakeSandbox = Any


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub" / "deep").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o700)
    (top / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (top / "run.sh").chmod(0o755)
    (top / "sub" / "data.bin").write_bytes(bytes(range(256)) * 50_000)
    (top / "sub" / "deep" / "ünïcode name").write_text("x")
    (top / "sub" / "secret").write_text("s")
    (top / "sub" / "secret").chmod(0o600)
    (top / "link").symlink_to("sub/secret")
    (top / "out").symlink_to("/etc/passwd")
    (top / "notes.log").write_text("log")
    (top / "sub" / "deep" / "more.log").write_text("log")
    return top


@pytest.mark.docker
async def test_a_tree_goes_in_with_modes_and_links_and_belongs_to_root(
    sandbox: DockerSandbox, tree: Path
) -> None:
    os.chown(tree / "run.sh", 1234, 1234)
    await sandbox.upload(tree, "/opt/new/tree", exclude=["*.log", "!notes.log", "/empty/"])
    shell = await sandbox.shell()
    listed = await shell.run("cd /opt/new/tree && find . | sort && stat -c '%a %u:%g %n' run.sh sub/secret")
    assert listed.stdout.decode().splitlines() == [
        ".", "./link", "./notes.log", "./out", "./run.sh", "./sub", "./sub/data.bin", "./sub/deep",
        "./sub/deep/ünïcode name", "./sub/secret", "755 0:0 run.sh", "600 0:0 sub/secret",
    ]  # fmt: skip
    assert (await shell.run("./run.sh; cat link; wc -c <sub/data.bin")).stdout == b"ran\ns12800000\n"
    assert (await shell.run("readlink out")).stdout == b"/etc/passwd\n"


@pytest.mark.docker
async def test_uploading_into_a_directory_that_is_there_leaves_its_mode(
    sandbox: DockerSandbox, tree: Path
) -> None:
    await sandbox.upload(tree / "sub", "/tmp", mode=0o640)
    await sandbox.upload(tree / "run.sh", "/tmp/one/file.sh", mode=0o711)
    shell = await sandbox.shell()
    stat = await shell.run("stat -c '%a %n' /tmp /tmp/secret /tmp/one/file.sh")
    assert stat.stdout == b"1777 /tmp\n640 /tmp/secret\n711 /tmp/one/file.sh\n"
    for path in ("relative", "/a/../b", "/"):
        with pytest.raises(ValueError, match="not an absolute path"):
            await sandbox.upload(tree, path)


@pytest.mark.docker
async def test_small_files_are_written_and_read(sandbox: DockerSandbox) -> None:
    contents = {
        "/logs/a": b"1.0\n", "/logs/b/c": b"", "/tmp/it's": "ü\n\n".encode(), "/tmp/nul": b"a\0b\xff",
        "/tmp/large": b"x" * 100_000, "/tmp/raw": bytes(range(1, 256)) + b"\n\r\\n",
    }  # fmt: skip
    await sandbox.write(contents)
    for _ in range(2):
        for path, content in contents.items():
            assert await sandbox.read(path) == content
        assert await sandbox.read("/no/such") is None
        assert await sandbox.read("/logs/no") is None
        await sandbox.shell()


@pytest.mark.docker
async def test_a_link_a_directory_a_fifo_and_a_file_too_large_are_not_read(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("cd /tmp; ln -s /etc/hostname link; ln -s nowhere broken; mkdir dir; mkfifo fifo")
    await shell.run("head -c 3000000 /dev/zero >/tmp/zeros; tr '\\0' x </tmp/zeros >/tmp/text")
    for stopped in (False, True):
        if stopped:
            await sandbox.stop_processes()
        for path, reason in (
            ("/tmp/link", "symbolic link"),
            ("/tmp/broken", "symbolic link"),
            ("/tmp/dir", "no regular file"),
            ("/tmp/fifo", "no regular file"),
            ("/tmp/zeros", "3000000 bytes"),
            ("/tmp/text", "3000000 bytes"),
        ):
            with pytest.raises(ValueError, match=reason):
                await sandbox.read(path)
    assert await sandbox.read("/tmp/text", max_bytes=3_000_000) == b"x" * 3_000_000


@pytest.mark.docker
async def test_a_tree_comes_out(sandbox: DockerSandbox, tmp_path: Path) -> None:
    shell = await sandbox.shell()
    await shell.run("mkdir -p /out/a/b; cd /out; echo one >a/1; ln a/1 a/b/hard; ln -s ../1 a/b/soft")
    await shell.run("chmod 750 a; chmod 4755 a/1; ln -s a/b top; head -c 5000000 /dev/zero >zeros")
    assert await sandbox.download("/out", tmp_path / "got", max_bytes=10_000_000)
    got = tmp_path / "got"
    assert (got / "a" / "1").read_text() == "one\n"
    assert (got / "a" / "b" / "hard").read_text() == "one\n"
    assert os.readlink(got / "a" / "b" / "soft") == "../1"
    assert (got / "top" / "soft").read_text() == "one\n"
    assert (got / "a").stat().st_mode & 0o7777 == 0o750
    assert (got / "a" / "1").stat().st_mode & 0o7777 == 0o755
    assert (got / "zeros").stat().st_size == 5_000_000
    assert await sandbox.download("/out/a/1", tmp_path / "deep" / "one", max_bytes=100)
    assert (tmp_path / "deep" / "one").read_text() == "one\n"
    assert not await sandbox.download("/nowhere", tmp_path / "none", max_bytes=100)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        await sandbox.download("/out", tmp_path / "no", max_bytes=1000)
    await shell.run("ln -s /etc/passwd a/escape")
    with pytest.raises(ValueError, match="a link"):
        await sandbox.download("/out", tmp_path / "no", max_bytes=10_000_000)
    assert not (tmp_path / "no").exists()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o644
    return made


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ([entry("top/../../x")], "an entry"),
        ([entry("/etc/x")], "an entry"),
        ([entry("top/x", tarfile.SYMTYPE, "/etc")], "a link"),
        ([entry("top/x", tarfile.SYMTYPE, "../x")], "a link"),
        ([entry("top", tarfile.SYMTYPE, "x")], "a link"),
        ([entry("top/a/x", tarfile.SYMTYPE, "b/../../..")], "a link"),
        ([entry("top/x", tarfile.LNKTYPE, "top/../x")], "a hard link"),
        ([entry("top/x", tarfile.LNKTYPE, "other/x")], "a hard link"),
        ([entry("top/x", tarfile.CHRTYPE)], "a special file"),
        ([entry("top/x", tarfile.FIFOTYPE)], "a special file"),
        ([entry("top/a", tarfile.SYMTYPE, "b"), entry("top/a/../x")], "an entry"),
    ],
)
def test_entries_that_leave_the_target_are_refused(
    tmp_path: Path, entries: list[tarfile.TarInfo], refused: str
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for made in entries:
            tar.addfile(made)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        reason = _unpack(tar, tmp_path / "inside" / "tree", 1000)
    assert reason is not None
    assert reason.startswith(refused)
    assert [path for path in tmp_path.rglob("*") if path.is_symlink()] == []


@pytest.mark.docker
async def test_files_of_a_sandbox_that_is_gone(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    sandbox = await make_sandbox()
    await sandbox.remove()
    for call in (
        lambda: sandbox.read("/etc/hostname"),
        lambda: sandbox.write({"/x": b""}),
        lambda: sandbox.download("/etc", tmp_path / "x", max_bytes=1000),
    ):
        with pytest.raises(SandboxError) as raised:
            await call()
        assert raised.value.error_class == "container_lost"
