"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import psutil

from rollcage.rollout.policies.leash import Leash


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
