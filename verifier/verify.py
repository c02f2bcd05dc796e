"""Running a task's tests on what an agent left, so that the reward is the verifier's word and nobody else's.

What is done for every task, whatever its tests look like:

- The agent's processes are gone before anything else is done (but see `keep_processes`), and the verifier's before
  the reward is read.
- `/tests` and `/logs/verifier` are removed and made anew, whatever they had become.
- The script is waited for, not the pipes of its children; its exit code is ignored.
- The environment is the image's and the task's: the verifier's shell descends from the engine, not from the
  agent. `HOME` stays the user's own, since tests look there for what they asked the agent to put there.
- Shells, interpreters and tools that the image has are the image's again, and what was planted for a verifier
  to run is taken away (`plants.py`), where the sandbox can say what changed.
- A reward that lay there before is never read. Where the verifier then leaves none, it is `reward_tampered`.

What stays open where agent and verifier share a sandbox and the agent is root (a separate verifier closes it):

- shared libraries, and whatever else of the image is not named in `plants.py`;
- programs that the image did not have, put where the distribution puts its own, and tools under a name that the
  image lacks (a `curl` of the agent's in an image without curl);
- bytecode in the `__pycache__` of a standard library that ships none, the finder of an editable install, a whole
  distribution of pytest in an image that has none;
- files that a test script sources by itself, such as `~/.bashrc`;
- whatever the agent's own program does while the tests run it.

Services that the agent started are stopped with its other processes: a task that grades a running service starts it
in its tests, has a `collect` command and a separate verifier, or is named in `keep_processes`.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from rollcage.rollout.outcome import BY_NAME, Domain, Evidence, SandboxError, VerifierError
from rollcage.rollout.rollout import Left
from rollcage.rollout.sandbox.base import CommandResult, Sandbox, Shell
from rollcage.rollout.task import Step, Task, ignore_patterns, resolve_env
from rollcage.rollout.trajectory import Reward
from rollcage.verifier.distrust import HOUSEKEEPING_SEC, distrust
from rollcage.verifier.handover import collect, hand_over, in_main
from rollcage.verifier.reports import REPORT_BYTES, REPORT_NAMES, test_ids
from rollcage.verifier.reward import REWARD_BYTES, below_min_reward, combine_steps, read_reward

TESTS = "/tests"
SCRIPT = f"{TESTS}/test.sh"
LOGS = "/logs/verifier"
OUTPUT = f"{LOGS}/test-stdout.txt"

OUTPUT_TAIL_BYTES = 4096
"""What is kept of the verifier's output: the summary of a failed pytest run is about so long."""


@dataclass(frozen=True)
class TestsVerifier:
    """Verifies steps with their own `tests/test.sh`. Holds no state: one serves any number of rollouts.

    `environ` resolves `${VAR}` in the task's verifier env. `reward_key` chooses the primary reward where
    reward.json has many keys and none is `reward`. `timeout_multiplier` stretches every task's limit.
    `image_tools`: give the verifier the image's own tools; False for tasks whose point is to replace one.
    `keep_processes`: patterns (fnmatch) of the names of tasks whose tests grade services that the agent started.
    What runs in the background there is not stopped, and can meddle with the verifier as it likes.
    """

    __test__ = False

    environ: Mapping[str, str] = field(default_factory=dict)
    reward_key: str | None = None
    timeout_multiplier: float = 1.0
    image_tools: bool = True
    keep_processes: tuple[str, ...] = ()

    async def verify(self, sandbox: Sandbox, task: Task, step: Step, left: Left | None = None) -> Reward:
        """Grade what the agent left in `sandbox`, where its tests are run too.

        Raises `VerifierError`, and `TaskError` for a variable that is not set; lets `SandboxError` through, as
        `agent_killed_sandbox` where no shell starts any more: the agent had one.
        """
        keep = any(fnmatchcase(task.name, pattern) for pattern in self.keep_processes)
        stop = sandbox.end_shells if keep else sandbox.stop_processes
        await stop()
        if left is not None:
            await left("its tests grade processes that the agent left (keep_processes)" if keep else "")
        tests = _directories(step)
        last = step.name == task.steps[-1].name
        try:
            options = await distrust(sandbox, step.verifier.user, tests) if self.image_tools else ""
            await stop()  # a planted tool may have run before it was taken away
            reward = await self._graded(sandbox, step, tests, options, keep=keep and not last)
            if not last:
                await _emptied(await sandbox.shell(0), (TESTS, LOGS), open_to_all=False)
        except SandboxError as error:
            raise await _after_an_agent(sandbox, error) from error
        return reward

    async def verify_separate(
        self,
        sandbox: Sandbox,
        verifier_sandbox: Sandbox,
        task: Task,
        step: Step,
        left: Left | None = None,
    ) -> Reward:
        """Grade what the agent left in `sandbox` with tests that run in `verifier_sandbox`: the `collect` commands
        are run in the agent's and in the task's other services, then the artifacts are handed over, and nothing
        else. Raises as `verify`."""
        try:
            for hook in step.verifier.collect:
                if in_main(hook):
                    await collect(sandbox, hook)
            await sandbox.stop_processes()
        except SandboxError as error:
            raise await _after_an_agent(sandbox, error) from error
        if left is not None:
            await left("")
        for hook in step.verifier.collect:  # what other services say is out of the agent's reach now
            if not in_main(hook):
                await collect(sandbox, hook)
        await hand_over(sandbox, verifier_sandbox, task, step)
        tests = [] if step.verifier.tests_in_image else _directories(step)
        return await self._graded(verifier_sandbox, step, tests, "")

    def passed_floor(self, step: Step, reward: Reward) -> bool:
        """False where the reward is below the step's `min_reward`, so that later steps are not run."""
        return below_min_reward(reward, step.min_reward) is None

    def combine(self, task: Task, rewards: list[tuple[Step, Reward]]) -> Reward:
        """One reward of the rewards of the steps that ran, by the task's own strategy."""
        return combine_steps(task, rewards)

    async def _graded(
        self, sandbox: Sandbox, step: Step, tests: Sequence[Path], pytest_options: str, *, keep: bool = False
    ) -> Reward:
        verifier = step.verifier
        env = resolve_env(verifier.env, self.environ)
        if pytest_options:
            env["PYTEST_ADDOPTS"] = f"{env.get('PYTEST_ADDOPTS', '')} {pytest_options}".strip()
        shell = await sandbox.shell(verifier.user)
        is_root = await _is_root(shell)
        root = shell if is_root else await sandbox.shell(0)
        places = (TESTS, LOGS) if tests else (LOGS,)
        planted = await _emptied(root, places, open_to_all=not is_root)
        if tests:
            await _put_tests(sandbox, root, tests, for_root=is_root)
        limit = self.timeout_multiplier * verifier.timeout_sec
        try:
            result = await shell.run(_command(env), timeout=limit, output_bytes=2 * OUTPUT_TAIL_BYTES)
        except SandboxError as error:
            if BY_NAME[error.error_class].domain is not Domain.AGENT:
                raise
            said = f"the sandbox ended under the tests: {error.message}"
            raise VerifierError("verifier_crash", said, error.evidence) from error
        await (sandbox.end_shells() if keep else sandbox.stop_processes())
        if result.timed_out or result.exit_code is None:
            tail = await _output_tail(await sandbox.shell(verifier.user))
        else:
            tail = _text(result.stdout)
        if result.timed_out:
            message = f"the verifier did not end within its {limit:g} s"
            raise VerifierError("verifier_timeout", message, _evidence(message, result, tail))
        try:
            txt, json = await asyncio.gather(
                _reward_file(sandbox, f"{LOGS}/reward.txt"), _reward_file(sandbox, f"{LOGS}/reward.json")
            )
            if txt is None and json is None:
                _no_reward(result, tail, planted, tests)
            reward = read_reward(txt, json, reward_key=self.reward_key)
        except VerifierError as error:
            raise VerifierError(
                error.error_class, error.message, _evidence(error.message, result, tail)
            ) from None
        return replace(reward, output_tail=tail, test_ids=await _test_ids(sandbox, _text(result.stderr)))


async def _after_an_agent(sandbox: Sandbox, error: SandboxError) -> SandboxError | VerifierError:
    """What it means that there is no shell where an agent has been: for a user that is not there the verifier cannot
    run, in a system without any the agent has left none."""
    if error.error_class not in ("container_config", "container_start"):
        return error
    if not await _root_has_a_shell(sandbox):
        return SandboxError("agent_killed_sandbox", error.message, error.evidence)
    if error.error_class == "container_start":
        return error
    return VerifierError("verifier_crash", error.message, error.evidence)


async def _root_has_a_shell(sandbox: Sandbox) -> bool:
    """Whether it is the verifier's user that is missing, and not the system."""
    try:
        return (await (await sandbox.shell(0)).run("true", timeout=HOUSEKEEPING_SEC)).exit_code == 0
    except SandboxError:
        return False


def _directories(step: Step) -> list[Path]:
    """What goes to /tests, in order: the tests that all steps share, then the step's own."""
    return [place for place in (step.shared_tests, step.tests) if place is not None and place.is_dir()]


async def _is_root(shell: Shell) -> bool:
    result = await shell.run("id -u", timeout=HOUSEKEEPING_SEC)
    return result.stdout.strip() == b"0"


async def _emptied(root: Shell, places: Sequence[str], *, open_to_all: bool) -> bool:
    """Make empty directories at `places`, whatever is there: files, links, mounts, immutable trees.

    Returns whether a reward lay in /logs/verifier. Raises `VerifierError` (`reward_tampered`) where something
    withstands.
    """
    mode = "777" if open_to_all else "755"
    command = f"""(
    cd /
    for f in {LOGS}/reward.txt {LOGS}/reward.json; do
        if [ -e "$f" ] || [ -L "$f" ]; then echo planted; fi
    done
    [ -d /logs ] || rm -f /logs
    set -- {" ".join(places)}
    rm -rf "$@" 2>/dev/null || {{ chattr -R -i -a "$@"; umount -l "$@"; rm -rf "$@"; }} >/dev/null 2>&1
    mkdir -p "$@" && chmod {mode} "$@" || exit 1
    for d; do
        [ -d "$d" ] && [ ! -L "$d" ] || {{ echo "$d is no directory" >&2; exit 1; }}
        for f in "$d"/* "$d"/.[!.]* "$d"/..?*; do
            if [ -e "$f" ] || [ -L "$f" ]; then echo "$f withstands" >&2; exit 1; fi
        done
    done
    )"""
    result = await root.run(command, timeout=HOUSEKEEPING_SEC)
    if result.exit_code != 0:
        message = f"{' and '.join(places)} cannot be made anew"
        raise VerifierError("reward_tampered", message, _evidence(message, result, _text(result.stderr)))
    return b"planted" in result.stdout


async def _put_tests(sandbox: Sandbox, root: Shell, tests: Sequence[Path], *, for_root: bool) -> None:
    """Upload the tests. A test.sh with Windows line ends is sent with Unix ones: the kernel takes the `\\r` of
    `#!/bin/bash\\r` as part of the interpreter's name."""
    for directory in tests:
        await sandbox.upload(directory, TESTS, exclude=ignore_patterns(directory))
    script = _script(tests)
    executable = script is not None and script.stat().st_mode & 0o111 == 0o111
    if script is not None and b"\r\n" in (text := script.read_bytes()).partition(b"\n")[0] + b"\n":
        await sandbox.write({SCRIPT: text.replace(b"\r\n", b"\n")}, mode=0o755)
    if not (for_root and executable):
        await root.run(f"chmod -R a+rX {TESTS}; chmod a+x {SCRIPT}", timeout=HOUSEKEEPING_SEC)


def _script(tests: Sequence[Path]) -> Path | None:
    found = [directory / "test.sh" for directory in tests if (directory / "test.sh").is_file()]
    return found[-1] if found else None


def _command(env: Mapping[str, str]) -> str:
    """Run the script; then print the end of its output, and on stderr which reports there are."""
    exports = "".join(f"export {key}={shlex.quote(value)}; " for key, value in env.items())
    reports = " ".join(f"{LOGS}/{name}" for name in REPORT_NAMES)
    return f"""( {exports}exec {SCRIPT} ) >{OUTPUT} 2>&1 </dev/null
    rollcage_status=$?
    tail -c {OUTPUT_TAIL_BYTES} {OUTPUT}
    for f in {reports}; do if [ -f "$f" ]; then echo "$f" >&2; fi; done
    ( exit $rollcage_status )"""


async def _output_tail(shell: Shell) -> str:
    result = await shell.run(f"tail -c {OUTPUT_TAIL_BYTES} {OUTPUT}", timeout=HOUSEKEEPING_SEC)
    return _text(result.stdout)


async def _reward_file(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path, max_bytes=REWARD_BYTES)
    except ValueError as error:
        raise VerifierError("reward_malformed", str(error)) from error


async def _test_ids(sandbox: Sandbox, there: str) -> tuple[str, ...]:
    for name in REPORT_NAMES:
        if f"{LOGS}/{name}" in there.splitlines():
            data = await _report(sandbox, name)
            if data is not None and (found := test_ids(name, data)):
                return found
    return ()


async def _report(sandbox: Sandbox, name: str) -> bytes | None:
    try:
        return await sandbox.read(f"{LOGS}/{name}", max_bytes=REPORT_BYTES)
    except ValueError:
        return None


def _no_reward(result: CommandResult, tail: str, planted: bool, tests: Sequence[Path]) -> NoReturn:
    """Say why there is none: tampered with, not run at all, killed, or simply not written."""
    code = result.exit_code
    if planted:
        raise VerifierError(
            "reward_tampered", "a reward lay there before the verifier ran, and the verifier wrote none"
        )
    if code in (126, 127):
        script = _script(tests)
        first = "" if script is None else _text(script.read_bytes()[:200].partition(b"\n")[0]).strip()
        means = "cannot be executed" if code == 126 else "was not found"
        raise VerifierError(
            "verifier_crash",
            f"test.sh ended with status {code} and no reward: a command of it, or its interpreter, {means}"
            f" (its first line is {first[:100]!r})",
        )
    if code is None or code > 128:
        how = "killed its shell" if code is None else f"was killed by signal {code - 128}"
        raise VerifierError("verifier_crash", f"test.sh {how} and left no reward")
    raise VerifierError(
        "reward_missing",
        f"test.sh ended with status {code} and left neither reward.txt nor reward.json in {LOGS}",
    )


def _evidence(message: str, result: CommandResult, tail: str) -> Evidence:
    return Evidence(message, "verifier", exit_code=result.exit_code, seconds=result.seconds, log_tail=tail)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
