"""Files: in, out, read, written, compared with the image and put back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.sandbox.base import Change, Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")

Start = Any


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o700)
    (top / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (top / "run.sh").chmod(0o755)
    (top / "sub" / "secret").write_text("s")
    (top / "sub" / "secret").chmod(0o600)
    (top / "sub" / "ünïcode and\nnewline").write_text("u")
    (top / "link").symlink_to("sub/secret")
    (top / "notes.log").write_text("log")
    return top


async def test_a_tree_goes_in_with_modes_and_links(sandbox: Sandbox, shell: Shell, tree: Path) -> None:
    await sandbox.upload(tree, "/tmp/new/tree")
    listed = await shell.run(
        "cd /tmp/new/tree && stat -c '%a %u:%g %F %n' run.sh sub/secret empty link; ./run.sh"
    )
    assert listed.text.splitlines() == [
        "755 0:0 regular file run.sh", "600 0:0 regular file sub/secret", "700 0:0 directory empty",
        "777 0:0 symbolic link link", "ran",
    ]  # fmt: skip
    assert (await shell.run("cat link 'sub/ünïcode and\nnewline'")).stdout == b"su"


async def test_one_file_goes_in_with_a_mode_and_its_directories(
    sandbox: Sandbox, shell: Shell, tree: Path
) -> None:
    await sandbox.upload(tree / "run.sh", "/tmp/a/b/named", mode=0o711)
    assert (await shell.run("stat -c %a /tmp/a/b/named; /tmp/a/b/named")).stdout == b"711\nran\n"


async def test_patterns_keep_files_out(sandbox: Sandbox, shell: Shell, tree: Path) -> None:
    await sandbox.upload(tree, "/tmp/tree", exclude=["*.log", "sub/*", "!sub/secret"])
    assert (await shell.run("cd /tmp/tree; find . -type f | sort")).stdout == b"./run.sh\n./sub/secret\n"


async def test_what_was_there_is_kept_beside_what_goes_in(sandbox: Sandbox, shell: Shell, tree: Path) -> None:
    await shell.run("mkdir -p /tmp/there/sub; chmod 1777 /tmp/there; echo mine >/tmp/there/sub/mine")
    await sandbox.upload(tree, "/tmp/there")
    assert (await shell.run("stat -c %a /tmp/there; cat /tmp/there/sub/mine")).stdout == b"1777\nmine\n"


@pytest.mark.parametrize("target", ["relative", "/tmp/../etc/x", "/"])
async def test_a_target_that_is_no_plain_path_is_refused(sandbox: Sandbox, tree: Path, target: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        await sandbox.upload(tree, target)


async def test_ten_megabytes_go_in_and_come_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(10_000_000))
    await sandbox.upload(tmp_path / "large", "/tmp/large")
    assert await sandbox.download("/tmp/large", tmp_path / "back", max_bytes=10_000_000)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()


async def test_small_files_are_written_and_read(sandbox: Sandbox, shell: Shell) -> None:
    contents = {"/tmp/into/a": b"1.0\n", "/tmp/into/b/empty": b"", "/tmp/into/it's": bytes(range(256))}
    await sandbox.write(contents, mode=0o640)
    assert (await shell.run("stat -c %a /tmp/into/a; cat /tmp/into/a")).stdout == b"640\n1.0\n"
    for path, content in contents.items():
        assert await sandbox.read(path) == content
    await sandbox.stop_processes()
    for path, content in contents.items():
        assert await sandbox.read(path) == content


async def test_a_file_that_is_not_there_is_none(sandbox: Sandbox) -> None:
    assert await sandbox.read("/tmp/none") is None
    assert await sandbox.read("/no/such/directory/none") is None


@pytest.mark.parametrize("quiet", [False, True], ids=["with a shell", "with nothing running"])
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("ln -s /etc/hostname", "symbolic link"),
        ("mkdir", "no regular file"),
        ("mkfifo", "no regular file"),
    ],
    ids=["link", "directory", "fifo"],
)
async def test_what_is_no_regular_file_is_not_read(
    sandbox: Sandbox, shell: Shell, made: str, reason: str, quiet: bool
) -> None:
    await shell.run(f"{made} /tmp/thing")
    if quiet:
        await sandbox.stop_processes()
    with pytest.raises(ValueError, match=reason):
        await sandbox.read("/tmp/thing")


async def test_a_link_to_nowhere_is_not_taken_for_nothing(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("ln -s nowhere /tmp/thing")
    with pytest.raises(ValueError, match="symbolic link"):
        await sandbox.read("/tmp/thing")


async def test_a_file_too_large_is_not_read_unless_asked(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("head -c 2000000 /dev/zero | tr '\\0' x >/tmp/large")
    with pytest.raises(ValueError, match="2000000 bytes"):
        await sandbox.read("/tmp/large")
    assert await sandbox.read("/tmp/large", max_bytes=2_000_000) == b"x" * 2_000_000


async def test_a_tree_comes_out_with_modes_and_links(sandbox: Sandbox, shell: Shell, tmp_path: Path) -> None:
    await shell.run("mkdir -p /tmp/out/a/b; cd /tmp/out; echo one >a/1; ln a/1 a/b/hard; ln -s ../1 a/b/soft")
    await shell.run("chmod 750 a; chmod 4755 a/1; ln -s a/b top; printf x >\"$(printf 'odd\\nname')\"")
    assert await sandbox.download("/tmp/out", tmp_path / "got", max_bytes=1_000_000)
    got = tmp_path / "got"
    assert (got / "a" / "b" / "hard").read_text() == "one\n"
    assert os.readlink(got / "a" / "b" / "soft") == "../1"
    assert (got / "top" / "soft").read_text() == "one\n"
    assert (got / "a").stat().st_mode & 0o7777 == 0o750
    assert (got / "a" / "1").stat().st_mode & 0o7777 == 0o755
    assert (got / "odd\nname").read_text() == "x"


async def test_nothing_there_is_said_and_nothing_is_made(sandbox: Sandbox, tmp_path: Path) -> None:
    assert not await sandbox.download("/tmp/none", tmp_path / "none", max_bytes=100)
    assert not (tmp_path / "none").exists()


async def test_a_tree_past_the_limit_is_refused_whole(sandbox: Sandbox, shell: Shell, tmp_path: Path) -> None:
    await shell.run("mkdir /tmp/out; for i in 1 2 3 4; do head -c 400 /dev/zero >/tmp/out/$i; done")
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        await sandbox.download("/tmp/out", tmp_path / "no", max_bytes=1000)
    assert not (tmp_path / "no").exists()


async def test_a_sparse_file_counts_by_its_length(sandbox: Sandbox, shell: Shell, tmp_path: Path) -> None:
    await shell.run("truncate -s 100G /tmp/sparse; truncate -s 3M /tmp/small")
    with pytest.raises(ValueError, match="bytes"):
        await sandbox.download("/tmp/sparse", tmp_path / "no", max_bytes=1_000_000)
    assert await sandbox.download("/tmp/small", tmp_path / "small", max_bytes=3 << 20)
    assert (tmp_path / "small").stat().st_size == 3 << 20


@pytest.mark.parametrize(
    "made",
    ["ln -s /etc/passwd x", "ln -s ../../x x", "mkdir d; ln -s ../../y d/x", "mkfifo x"],
    ids=["absolute link", "link out", "link out from below", "fifo"],
)
async def test_an_entry_that_leaves_the_tree_is_refused(
    sandbox: Sandbox, shell: Shell, tmp_path: Path, made: str
) -> None:
    await shell.run(f"mkdir /tmp/out; cd /tmp/out; {made}")
    with pytest.raises(ValueError, match=r"a link|a special file"):
        await sandbox.download("/tmp/out", tmp_path / "no", max_bytes=1_000_000)
    assert not (tmp_path / "no").exists()


async def test_what_differs_from_the_image_is_listed(start: Start) -> None:
    sandbox = await start()
    shell = await sandbox.shell()
    await shell.run(
        "echo x >/etc/added; echo x >>/etc/profile; rm /etc/issue; rm -r /etc/skel; chmod 700 /etc/motd"
    )
    found = set(await sandbox.changes())
    expected = {
        Change("/etc/added", "added"), Change("/etc/profile", "modified"), Change("/etc/issue", "deleted"),
        Change("/etc/skel", "deleted"), Change("/etc/motd", "modified"),
    }  # fmt: skip
    assert found >= expected
    assert not {"/etc/passwd", "/etc", "/usr"} & {change.path for change in found}


async def test_the_images_files_are_put_back(start: Start) -> None:
    sandbox = await start()
    shell = await sandbox.shell()
    before = (await shell.run("sha256sum /usr/bin/sort /etc/issue")).stdout
    await shell.run("cp /bin/true /tmp/t && mv /tmp/t /usr/bin/sort; rm /etc/issue; rm -rf /etc/skel")
    await sandbox.restore(["/usr/bin/sort", "/etc/issue", "/etc/skel"])
    assert (await shell.run("sha256sum /usr/bin/sort /etc/issue")).stdout == before
    assert (await shell.run("ls -A /etc/skel")).stdout
    assert not {"/etc/issue", "/etc/skel"} & {
        change.path for change in await sandbox.changes() if change.kind == "deleted"
    }
