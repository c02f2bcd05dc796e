"""What any sandbox offers. Agents and verifiers know these protocols and nothing of Docker.

Calls raise `SandboxError` when the sandbox or its engine fails. A command that fails is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

OUTPUT_BYTES = 1 << 20
"""Bytes kept of one command's stdout and of its stderr: half from the head, half from the tail."""

TERMINAL_COLUMNS, TERMINAL_ROWS = 160, 40
NEW_OUTPUT_BYTES = 1 << 16
"""Bytes kept of what a terminal printed since it was last asked: half from the head, half from the tail."""

HOSTNAME = "sandbox"
"""Of every sandbox: a shell's prompt shows it, and a replay is to show what the recording did."""


@dataclass(frozen=True)
class CommandResult:
    """What a command did. `stdout` and `stderr` are capped head and tail; `omitted_bytes` were left out.

    `exit_code` is None where the command did not end by itself: it `timed_out`, or the shell ended with it
    (`shell_replaced`; its exit status, where known, is `shell_exit_code`).
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    omitted_bytes: int = 0
    shell_replaced: bool = False
    shell_exit_code: int | None = None

    @property
    def text(self) -> str:
        """stdout, then stderr, as text; what is not UTF-8 becomes U+FFFD."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")

    @property
    def note(self) -> str:
        """What an agent must be told beside the output: one line, or empty."""
        if self.shell_replaced:
            ended = "" if self.shell_exit_code is None else f" with status {self.shell_exit_code}"
            reason = "after a timeout" if self.timed_out else f"because it ended{ended}"
            return f"[the shell was replaced {reason}; directory and variables are as at the start]"
        if self.timed_out:
            return f"[the command was stopped after {self.seconds:.0f} s; the shell is as it was]"
        return ""


@dataclass(frozen=True)
class SandboxState:
    """The engine's own word on a sandbox's container."""

    running: bool
    exit_code: int | None
    oom_killed: bool
    error: str = ""
    storage_exceeded: bool = False
    """Its processes were stopped because it had written more than `spec.storage_mb`."""


ChangeKind = Literal["added", "modified", "deleted"]


@dataclass(frozen=True)
class Change:
    """One path that differs from the image. Where a whole directory is gone, only it is listed; a directory is
    not listed because of what is in it."""

    path: str
    kind: ChangeKind


@dataclass(frozen=True)
class Origin:
    """What a sandbox that begins with a saved state was before: the `image` that its agent had, and what of it had
    been changed when the state was saved."""

    image: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made with.

    `image` is an image id or reference that the engine has. `network` is the engine's network name, or
    `none`. `dns`: resolvers in the place of those that the engine has. `memory_mb` and `storage_mb` are MiB,
    None for no limit. `deadline_sec`: seconds from its start at which PID 1 ends by itself, whoever is still
    there. `labels` are added to the container's. `user` and `workdir` None: as the image says.
    """

    image: str
    name: str
    network: str = "none"
    dns: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    pids: int = 1024
    deadline_sec: float = 24 * 3600.0
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    memory_reservation_mb: int | None = None
    """What the kernel tries to leave it when the host's memory runs short, beside the limit `memory_mb`."""
    aliases: tuple[str, ...] = ()
    """Names by which others on its network reach it."""
    binds: tuple[str, ...] = ()
    """Volumes that it shares with others: `volume:path`, or `volume:path:ro`."""
    volumes: tuple[str, ...] = ()
    """Paths at which it has a volume of its own, which goes with it."""
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Paths in memory, with mount options."""
    extra_hosts: tuple[str, ...] = ()
    """`name:address` lines of its /etc/hosts."""
    hostname: str | None = HOSTNAME
    """None: the engine's choice, which is the start of the container's id."""
    shm_mb: int | None = None
    """Size of /dev/shm; None: the engine's."""
    origin: Origin | None = None
    """Set where `image` is a saved state: `changes` and `restore` are then about the origin's image."""


class Shell(Protocol):
    """One shell over one stream: directory, variables and functions last from command to command."""

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        """Run `command` and return when it is done; background children do not hold it.

        After `timeout` seconds its processes are killed and the shell kept; a shell that does not come back
        is replaced. Raises `SandboxError` when the container is gone.
        """
        ...


@dataclass(frozen=True)
class Screen:
    """What a terminal shows: its rows without the blanks at their ends, and the cursor, counted from 0. `note` is
    what an agent must be told beside it, or empty."""

    lines: tuple[str, ...]
    row: int
    column: int
    columns: int
    note: str = ""

    @property
    def text(self) -> str:
        """The rows down to the last one that holds anything."""
        return "\n".join(self.lines).rstrip("\n")


@dataclass(frozen=True)
class TerminalOutput:
    """What a terminal printed since it was last asked, as it reads on a terminal; `omitted_bytes` were left out of
    its middle, where a line says so. `note` as in `Screen`."""

    text: str
    omitted_bytes: int = 0
    note: str = ""


class Terminal(Protocol):
    """One interactive shell on a TTY, for those who send keystrokes.

    A shell that ended, whoever ended it, is replaced at the next call, and the next note says so. All calls raise
    `SandboxError` when the container is gone.
    """

    async def send(self, keys: str | bytes) -> None:
        """Type these bytes, exactly. Raises `ValueError` for more than 1 MiB, and where the program has not read
        what was sent before."""
        ...

    async def press(self, *names: str) -> None:
        """Press keys by tmux's names: `Enter`, `C-c`, `Escape`, `Up`, `F5`, `M-x`. Raises `ValueError` for
        a name of no key, with nothing sent."""
        ...

    async def screen(self) -> Screen:
        """What is shown now."""
        ...

    async def new_output(self, output_bytes: int = NEW_OUTPUT_BYTES) -> TerminalOutput:
        """What was printed since the last call, capped head and tail."""
        ...

    async def history(self) -> Sequence[str]:
        """The last 1,000 lines that scrolled out of the screen, the oldest first."""
        ...

    async def wait(
        self,
        seconds: float,
        *,
        until: Callable[[Screen], bool] | None = None,
        quiet: float | None = None,
    ) -> bool:
        """Wait until `until` holds of the screen, or nothing was printed for `quiet` seconds: True. False after
        `seconds`, and when the shell ends."""
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size, which programs are told. Raises `ValueError` for one that is not 2 to 1,000."""
        ...

    async def close(self) -> None:
        """Kill the shell and what runs in its foreground; background jobs live on. The next call starts a
        fresh one."""
        ...


class ServiceContainer(Protocol):
    """Another container of the task, beside the agent's."""

    async def run(self, command: str, *, user: str | int | None = None, timeout: float) -> CommandResult:
        """Run a sh command in it. It may have ended long ago: `exit_code` is None then."""
        ...

    async def download(self, path: str, target: Path, *, max_bytes: int) -> bool:
        """See `Sandbox.download`."""
        ...


class Sandbox(Protocol):
    """One container. Paths inside are absolute POSIX paths."""

    id: str
    spec: SandboxSpec

    @property
    def oom_kills(self) -> int:
        """Processes that were killed for the memory limit, as was known when a shell last ended or
        `count_oom_kills` was called."""
        ...

    @property
    def storage_exceeded(self) -> bool:
        """True once the processes were stopped because the sandbox had written more than `spec.storage_mb`."""
        ...

    async def shell(self, user: str | int | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """The sandbox's shell for this user, started at the first call. Kept until `stop_processes`."""
        ...

    async def terminal(
        self,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
        columns: int = TERMINAL_COLUMNS,
        rows: int = TERMINAL_ROWS,
    ) -> Terminal:
        """The sandbox's terminal for this user, started at the first call, with this size. `env` is for one that
        is started. Kept until `stop_processes`; `end_shells` closes it."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        """Run one program on its own, apart from any shell (slower: an `exec` of the engine)."""
        ...

    async def stop_processes(self) -> None:
        """Kill every process but PID 1 and wait until they are gone. The next `shell()` is a fresh one."""
        ...

    async def count_oom_kills(self) -> None:
        """Have `oom_kills` say what is so now."""
        ...

    async def end_shells(self) -> None:
        """End the shells and the commands that they have in hand. Background processes live on; those of a shell
        that will not end are stopped with everything else. The next `shell()` is a fresh one."""
        ...

    async def upload(
        self, source: Path, target: str, *, mode: int | None = None, exclude: Sequence[str] = ()
    ) -> None:
        """Put the file or tree `source` at `target`, owned by root, modes kept (`mode` overrides every
        file's). Missing parents are made. `exclude` are gitignore-style patterns."""
        ...

    async def write(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Write small files, by absolute path, in one call."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """A regular file's bytes; None where there is no such file. A symbolic link or another kind of file,
        and a file past `max_bytes`, raise `ValueError` that says which."""
        ...

    async def download(self, path: str, target: Path, *, max_bytes: int) -> bool:
        """Copy a file or tree out; False where there is none. Entries that leave `target` are refused."""
        ...

    async def changes(self) -> Sequence[Change]:
        """Every path that differs from the image."""
        ...

    async def restore(self, paths: Sequence[str]) -> None:
        """Put these files and directories of the image back, over whatever is there."""
        ...

    async def state(self) -> SandboxState:
        """Ask the engine."""
        ...

    def service(self, name: str) -> ServiceContainer:
        """Another container of a task of several. Raises `KeyError` where there is none of that name."""
        ...

    async def remove(self) -> None:
        """Kill and remove the container and its anonymous volumes. Removing it twice is no error."""
        ...
