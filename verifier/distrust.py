"""Giving the verifier the image's own tools, in a sandbox where the agent may have been root.

Files are put back over the engine, from a fresh container of the image, before the first program of the sandbox
is run; only then are its shell and `rm` asked to take the rest away.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from rollcage.rollout.outcome import Evidence, VerifierError
from rollcage.rollout.sandbox.base import CommandResult, Sandbox, Shell
from rollcage.verifier.plants import (
    PRELOAD,
    SYSTEM_BIN,
    Plants,
    find_plants,
    plugins_to_switch_off,
    runs_code,
)

HOUSEKEEPING_SEC = 60.0
"""For our own commands in the sandbox, which take milliseconds where nobody is in their way."""

_READ_FILES = 200
_READ_BYTES = 8192
_TESTS_BYTES = 4 << 20


async def distrust(sandbox: Sandbox, user: str | int | None, tests: Sequence[Path]) -> str:
    """Undo what the agent planted for the verifier, which runs as `user`. The agent's processes are gone already.

    Returns what is to be put into PYTEST_ADDOPTS: pytest plugins that neither the image nor the `tests` brought
    are switched off.
    Raises `VerifierError` (`reward_tampered`) where something cannot be undone.
    """
    changes = await sandbox.changes()
    if not changes:
        return ""
    workdir = sandbox.spec.workdir or "/"
    first = find_plants(changes, workdir=workdir, path=SYSTEM_BIN, home="/root")
    if PRELOAD in first.remove:
        await sandbox.write({PRELOAD: b""})
    if first.restore:
        await sandbox.restore(first.restore)
    if first.remove or first.shadows:
        # By the image's own sh, before anything is looked for on a PATH in which a plant may stand first.
        await _removed(partial(_system, sandbox), first.remove, first.shadows)
    path, home = await _facts(await sandbox.shell(user))
    plants = find_plants(changes, workdir=workdir, path=path, home=home)
    late = [name for name in plants.restore if name not in first.restore]
    if late:
        await sandbox.restore(late)
    return await _take_away(sandbox, plants, tests)


async def _take_away(sandbox: Sandbox, plants: Plants, tests: Sequence[Path]) -> str:
    if plants == Plants(restore=plants.restore):
        return ""
    root = await sandbox.shell(0)
    startup = dict(plants.startup)
    texts = await _texts(root, [*startup, *plants.plugins])
    remove = [*plants.remove, *(name for name in startup if runs_code(texts.get(name, "")))]
    put_back = [name for name in remove if startup.get(name)]
    await _removed(partial(root.run, timeout=HOUSEKEEPING_SEC), remove, plants.shadows)
    if put_back:
        await sandbox.restore(put_back)
    entry_points = {name: texts[name] for name in plants.plugins if name in texts}
    if not entry_points:
        return ""
    return " ".join(f"-p no:{name}" for name in plugins_to_switch_off(entry_points, _all_text(tests)))


async def _facts(shell: Shell) -> tuple[list[str], str]:
    """PATH and HOME as the verifier will have them."""
    result = await shell.run('printf \'%s\\n%s\\n\' "$PATH" "$HOME"', timeout=HOUSEKEEPING_SEC)
    path, _, home = result.stdout.decode("utf-8", "replace").partition("\n")
    return [
        place.rstrip("/") or "/" for place in path.split(":") if place.startswith("/")
    ], home.strip() or "/root"


async def _texts(shell: Shell, paths: Sequence[str]) -> dict[str, str]:
    """The heads of some small files, by path; those that cannot be read are left out."""
    asked = paths[:_READ_FILES]
    if not asked:
        return {}
    each = f'printf "%s\\0" "$f"; head -c {_READ_BYTES} < "$f" | tr -d "\\000"; printf "\\0"'
    command = f'for f in {_words(asked)}; do [ -f "$f" ] && {{ {each}; }}; done; true'
    result = await shell.run(command, timeout=HOUSEKEEPING_SEC, output_bytes=2 * _READ_FILES * _READ_BYTES)
    parts = result.stdout.decode("utf-8", "replace").split("\0")
    return dict(zip(parts[0::2], parts[1::2], strict=False))


async def _system(sandbox: Sandbox, command: str) -> CommandResult:
    argv = ["/bin/sh", "-c", command]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return await sandbox.exec(argv, user="0", env=env, timeout=HOUSEKEEPING_SEC)


async def _removed(
    run: Callable[[str], Awaitable[CommandResult]],
    paths: Sequence[str],
    shadows: Sequence[tuple[str, Sequence[str]]],
) -> None:
    lines = []
    if paths:
        lines.append(f"rm -rf -- {_words(paths)}")
    for program, elsewhere in shadows:
        there = " || ".join(f"[ -e {shlex.quote(place)} ]" for place in elsewhere)
        lines.append(f"if {there}; then rm -rf -- {shlex.quote(program)}; fi")
    if not lines:
        return
    result = await run(f"( {' && '.join(lines)} )")
    if result.exit_code != 0:
        said = "what the agent planted for the verifier cannot be removed"
        raise VerifierError(
            "reward_tampered", said, Evidence(said, exit_code=result.exit_code, log_tail=result.text[-1000:])
        )


def _all_text(directories: Sequence[Path]) -> str:
    """All files of the tests as one text, at most 4 MiB of it."""
    parts: list[str] = []
    left = _TESTS_BYTES
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            if left > 0 and path.is_file():
                with path.open("rb") as file:
                    data = file.read(left)
                left -= len(data)
                parts.append(data.decode("utf-8", "replace"))
    return "\n".join(parts)


def _words(paths: Sequence[str]) -> str:
    return " ".join(shlex.quote(path) for path in paths)
