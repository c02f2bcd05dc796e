"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from rollcage.rollout.policies.leash import Leash, shared_memory


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


def test_a_killed_process_takes_the_leashed_ones_with_it() -> None:
    program = """
        import os, signal, subprocess
        from rollcage.rollout.policies.leash import Leash
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Leash([child.pid])
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    if psutil.pid_exists(child):
        psutil.Process(child).wait(timeout=10)
    assert not psutil.pid_exists(child)


def test_a_dropped_leash_kills_nothing() -> None:
    child = sleeper()
    try:
        leash = Leash([child.pid])
        leash.drop()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_what_a_killed_process_has_started_in_its_scratch_goes_with_it_and_so_does_what_that_left(
    tmp_path: Path,
) -> None:
    """Also what it is still starting, and shared memory."""
    program = f"""
        import os, signal, subprocess, sys
        from pathlib import Path
        from rollcage.rollout.policies.leash import Leash
        leash = Leash(scratch=Path({str(tmp_path / "scratch")!r}))
        leash.also([Path({str(tmp_path / "seen-before")!r})])
        held = "from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=9)"
        child = subprocess.Popen(
            [sys.executable, "-c", held + "; print(m.name, flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={{**os.environ, "TMPDIR": {str(tmp_path / "scratch")!r}}},
            start_new_session=True,
        )
        print(child.pid, child.stdout.readline().decode(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "file").touch()
    (tmp_path / "seen-before").touch()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, check=False, timeout=60
    )
    pid, name = done.stdout.decode().split()
    if psutil.pid_exists(int(pid)):
        psutil.Process(int(pid)).wait(timeout=10)
    until = time.monotonic() + 10
    memory = Path("/dev/shm", name)
    while ((tmp_path / "scratch").exists() or memory.exists()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not (tmp_path / "scratch").exists()
    assert not memory.exists()
    assert not (tmp_path / "seen-before").exists()


def test_shared_memory_that_no_process_shows_any_more_goes_by_pythons_own_process_for_that(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    held = (
        "from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=9); m.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{held}; print(m.name, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        memory = Path("/dev/shm", child.stdout.readline().decode().strip())
        [tracker] = psutil.Process(child.pid).children()
        assert (memory.exists(), shared_memory(child.pid)) == (True, set())
        Leash(scratch=scratch).pull()
    assert not scratch.exists()
    assert not memory.exists()
    assert not tracker.is_running() or tracker.status() == psutil.STATUS_ZOMBIE


def test_a_leash_whose_shell_was_killed_says_what_is_still_there(tmp_path: Path) -> None:
    leash = Leash(scratch=tmp_path)
    [shell] = [one for one in psutil.process_iter() if str(tmp_path) in _command(one)]
    shell.kill()
    with pytest.raises(TimeoutError, match="its shell was killed"):
        leash.pull()
    assert tmp_path.exists()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
