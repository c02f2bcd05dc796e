"""What a sandbox does or prints is never taken for a fault of the infrastructure."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from attempts import Site, given, site
from fault_table import SPOOFS

from rollcage.rollout.outcome import BY_NAME, Domain, Outcome
from rollcage.rollout.trajectory import Attempt

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

Record = Callable[[str, str], None]

SOLVE = "echo 42 >/app/answer"
POOL = "Error response from daemon: could not find an available, non-overlapping IPv4 address pool among the defaults"
WORDS = (
    POOL,
    "Error response from daemon: No such container: 1a2b",
    "OCI runtime exec failed: exec failed: unable to start container process: error executing setns process: exit"
    " status 1: unknown",
    "failed to register layer: write /usr/x: no space left on device",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    '{"message":"container 5eab is not running"}',
    '{"errorDetail":{"code":1,"message":"toomanyrequests"},"error":"toomanyrequests"}',
)
SAY = "; ".join(f"echo {shlex.quote(words)}" for words in WORDS)
WRITE_0 = "echo 0 >/logs/verifier/reward.txt"
NAME = "no space left on device"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("spoofs"), "debian:bookworm-slim") as here:
        yield here


async def test_spoofs(here: Site, record: Record) -> None:
    """CASES 14 and 16, and more; four at a time."""
    plain = here.task()
    limited = here.task(environment="memory_mb = 128")
    named = here.task(
        dockerfile=f"{here.dockerfile}RUN mkdir '/{NAME}' && useradd --badname -m container-is-not-running\n",
        environment=f'workdir = "/{NAME}"',
        agent='user = "container-is-not-running"',
    )
    fake_shell = shlex.quote(f"#!/usr/bin/perl\nprint '{POOL}';\nexit 125;\n")
    statuses = [f"exit {status}" for status in (137, 125, 126, 127, 143, 255)]
    signals = "for s in 1 2 3 9 15 19; do kill -$s 1; done; kill -15 -1; kill -9 -1"
    spoofs = {
        "pkill": here.attempt(
            plain, here.shell_agent("exec -a rollcage-me bash -c 'pkill -9 -f rollcage-me'", SOLVE)
        ),
        "words": here.attempt(plain, here.shell_agent(f"{SAY}; exit 1")),
        "words_stderr": here.attempt(
            plain, here.shell_agent(f"({SAY}) >&2", f"({SAY}) >/dev/stderr; exit 125")
        ),
        "words_files": here.attempt(
            plain,
            here.shell_agent(
                f"mkdir -p /logs/verifier; ({SAY}) | tee /logs/verifier/x /tmp/x /app/answer",
                f"touch '/app/{NAME}'; mkdir '/app/No such container: 1a2b'",
            ),
        ),
        "words_test": here.attempt(here.task(test=f"{SAY}\n({SAY}) >&2\n{WRITE_0}\nexit 125\n")),
        "words_reward": here.attempt(
            here.task(test=f"echo {shlex.quote(POOL)} >/logs/verifier/reward.txt\nexit 1\n")
        ),
        "words_names": here.attempt(named, here.shell_agent("pwd; id -un")),
        "exits": here.attempt(plain, here.shell_agent(*statuses, SOLVE)),
        "kill_pid_1": here.attempt(plain, here.shell_agent(signals, signals, SOLVE)),
        "oom_words": here.attempt(plain, here.shell_agent("echo OOMKilled; echo Killed >&2; (exit 137)")),
        "own_limit": here.attempt(
            limited, here.shell_agent("ulimit -v 50000; perl -e '$x = \"x\" x 200000000' || exit 137")
        ),
        "full_tmpfs": here.attempt(plain, here.shell_agent("head -c 100m /dev/zero >/dev/shm/x")),
        "flood": here.attempt(plain, here.shell_agent("head -c 100m /dev/zero | tr '\\0' x", SOLVE)),
        "closed_stdio": here.attempt(
            plain, here.shell_agent("exec <&- >&- 2>&-", "echo lost", SOLVE, timeout=3)
        ),
        "replaced_bash": here.attempt(
            plain,
            here.shell_agent(
                f"printf %s {fake_shell} >/tmp/x; chmod +x /tmp/x; for s in bash sh dash; do"
                " for d in /bin /usr/bin; do cp /tmp/x $d/.new; mv $d/.new $d/$s; done; done; exit 1",
                "true",
            ),
        ),
        "pids": here.attempt(plain, here.shell_agent("f() { f | f & }; f; sleep 1", timeout=3)),
        "stops": here.attempt(plain, here.shell_agent("kill -STOP -1; sleep 600", SOLVE, timeout=1)),
        "deadline_status": here.attempt(plain, here.shell_agent("exec sh -c 'exit 124'")),
    }
    assert set(spoofs) == set(SPOOFS)
    slots = asyncio.Semaphore(4)

    async def one(attempt: object) -> Attempt:
        async with slots:
            return await attempt  # type: ignore[misc,no-any-return]

    ended = dict(zip(spoofs, await asyncio.gather(*map(one, spoofs.values())), strict=True))
    for key, attempt in ended.items():
        domain = BY_NAME[attempt.error_class].domain if attempt.error_class else None
        assert domain not in (Domain.INFRA, Domain.SERVICE), (key, attempt.evidence)
        assert attempt.outcome in (Outcome.PASSED, Outcome.FAILED) or domain is Domain.VERIFIER, key
    for key, attempt in ended.items():
        record(key, given(attempt))
    assert await here.left() == []
