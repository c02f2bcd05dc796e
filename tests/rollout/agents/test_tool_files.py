"""Files read, written and edited by calls, in sandboxes with bash, with dash alone, and with nothing but busybox."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.agents.tools import ToolsAgent
from rollcage.rollout.sandbox.container import DockerSandbox

pytestmark = pytest.mark.docker

ODD = 'it\'s "q" $HOME `id` \\n %s \\\\ é 漢 !\n\ttab\nlast'


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


class Uses:
    """Has an agent make calls in one sandbox."""

    def __init__(self, sandbox: DockerSandbox, make_context: Any, **options: Any) -> None:
        self._sandbox = sandbox
        self._make_context = make_context
        self._options = options
        self.commands: list[str] = []

    async def __call__(self, *calls: dict[str, Any], user: str | None = None) -> list[str]:
        """What the policy was told of each call of one answer."""
        context = self._make_context(
            [{"tool_calls": list(calls)}, "done"],
            sandbox=self._sandbox,
            shell=await self._sandbox.shell(user),
        )
        await ToolsAgent(**self._options).run(context)
        self.commands = [command.command for turn in context.trajectory.turns for command in turn.commands]
        return [message.content for message in context.trajectory.messages if message.role == "tool"]

    async def sh(self, command: str) -> str:
        result = await (await self._sandbox.shell()).run(command)
        assert result.exit_code == 0, result.text
        return result.stdout.decode()


@pytest.fixture
def uses(sandbox: DockerSandbox, make_context: Any) -> Uses:
    return Uses(sandbox, make_context)


async def test_what_is_written_is_read_and_edited_to_the_byte(uses: Uses) -> None:
    await uses.sh("mkdir /w && cd /w && set -C")
    told = await uses(
        call("write_file", path="a b/c/odd.txt", content=ODD),
        call("read_file", path="/w/a b/c/odd.txt"),
        call("edit", path="a b/c/odd.txt", old_string="%s \\\\ é 漢 !\n\tt", new_string="'%d'\n\tT"),
        call("write_file", path="-n", content=""),
        call("read_file", path="-n"),
        call("write_file", path="~/home.txt", content="x\n"),
    )
    assert told[0] == f"[a b/c/odd.txt is written: {len(ODD.encode())} bytes]"
    numbered = [f"     {number}\t{line}" for number, line in enumerate(ODD.split("\n"), 1)]
    assert told[1].split("\n") == [*numbered, "[there is no newline at the end of the file]"]
    assert told[2].startswith("[a b/c/odd.txt is edited]\n     1\tit's")
    assert told[4] == "[the file is empty]"
    assert await uses.sh("cat '/w/a b/c/odd.txt'") == ODD.replace("%s \\\\ é 漢 !\n\tt", "'%d'\n\tT")
    assert await uses.sh("cat ~/home.txt; ls ./-n") == "x\n./-n\n"


async def test_functions_of_the_agents_are_not_in_the_way(uses: Uses) -> None:
    told = await uses(
        call("bash", command="mkdir /w && cd /w"),
        call(
            "bash",
            command='for f in cat head tail printf mkdir mktemp rm; do eval "$f() { echo mine; }"; done',
        ),
        call("write_file", path="d/file", content="one\ntwo\nthree\n"),
        call("edit", path="d/file", old_string="two", new_string="2"),
        call("read_file", path="d/file", start_line=2, end_line=2),
        call("bash", command="cat d/file; unset -f cat head tail printf mkdir mktemp rm"),
    )
    assert told[4] == "     2\t2\n[more lines follow, from 3 on]"
    assert "mine" in told[5], "or it would show nothing"
    assert await uses.sh("cat /w/d/file; ls /tmp") == "one\n2\nthree\n"


async def test_an_edit_must_match_once_and_keeps_what_the_file_is(uses: Uses) -> None:
    await uses.sh(
        "mkdir /w && cd /w && printf 'a\\r\\nb\\r\\na\\r\\n' >crlf && printf 'x=1\\nx=1\\n\\377' >raw"
    )
    await uses.sh("chmod 750 crlf && ln -s crlf link && chmod 600 raw")
    told = await uses(
        call("edit", path="link", old_string="a", new_string="c"),
        call("edit", path="link", old_string="a\nb", new_string="c\nd\ne"),
        call("edit", path="raw", old_string="x=1\n", new_string="y = 22\n", replace_all=True),
        call("edit", path="raw", old_string="z", new_string=""),
        call("edit", path="raw", old_string="", new_string="z"),
        call("edit", path="none", old_string="a", new_string="b"),
        call("edit", path="crlf", old_string="e\n", new_string=""),
    )
    assert "in link 2 times, at lines 1, 3: give more" in told[0]
    assert (
        told[1] == "[link is edited]\n     1\tc\n     2\td\n     3\te\n     4\ta\n[the lines end with CRLF]"
    )
    assert told[2] == "[raw is edited: 2 replacements]"
    assert "old_string is not in raw" in told[3]
    assert "old_string is empty" in told[4]
    assert told[5] == "[edit failed] none: there is no such file"
    assert len(uses.commands) == 3  # those that change a file
    assert await uses.sh("cat crlf") == "c\r\nd\r\na\r\n"
    assert await uses.sh("printf 'y = 22\\ny = 22\\n\\377' | cmp - raw") == ""
    assert await uses.sh("ls -l crlf raw link | cut -c 1-10") == "-rwxr-x---\nlrwxrwxrwx\n-rw-------\n"


async def test_long_and_odd_files_are_shown_in_part_and_said_to_be(
    sandbox: DockerSandbox, make_context: Any
) -> None:
    uses = Uses(sandbox, make_context, output_bytes=1000, max_output_tokens=100)
    await uses.sh('set -u; [ -z "${BASH_VERSION-}" ] || set -o pipefail')
    await uses.sh("cd /tmp && seq 1 50000 >seq && printf 'a\\0b' >bin && printf 'caf\\351\\n' >latin")
    await uses.sh("i=0; while [ $i -lt 300 ]; do printf 0123456789; i=$((i+1)); done >long")
    told = await uses(
        call("read_file", path="seq", start_line=4000, end_line=4002),
        call("read_file", path="seq"),
        call("read_file", path="seq", start_line=50001),
        call("read_file", path="seq", start_line=2, end_line=1),
        call("read_file", path="long"),
        call("read_file", path="bin"),
        call("read_file", path="latin"),
        call("read_file", path="/tmp"),
        call("read_file", path="/no/such"),
        call("write_file", path="/tmp", content="x"),
    )
    assert told[0] == "  4000\t4000\n  4001\t4001\n  4002\t4002\n[more lines follow, from 4003 on]"
    shown = told[1].splitlines()
    assert shown[-2].split() == [str(len(shown) - 1)] * 2
    assert shown[-1] == f"[more lines follow, from {len(shown)} on]"
    assert 20 < len(shown) < 60
    assert told[2] == "[the file has no line 50001]"
    assert "end_line 1 is before start_line 2" in told[3]
    assert len(told[4]) < 600
    assert "left out ...]" in told[4]
    assert told[5] == "[read_file failed] bin is a binary file"
    assert told[6] == "     1\tcaf\ufffd\n[not UTF-8: other bytes are shown as \ufffd]"
    assert told[7] == "[read_file failed] /tmp: it is no regular file"
    assert told[8] == "[read_file failed] /no/such: there is no such file"
    assert "[write_file failed] <exit_code>" in told[9]
    assert "irectory" in told[9]


async def test_files_are_the_agents_own_users_and_shut_to_it_where_they_are(uses: Uses) -> None:
    await uses.sh("mkdir -m 777 /w && echo secret >/w/shut && chmod 600 /w/shut")
    told = await uses(
        call("bash", command="cd /w"),
        call("write_file", path="own", content="mine\n"),
        call("edit", path="own", old_string="mine", new_string="still mine"),
        call("read_file", path="shut"),
        call("write_file", path="/w/shut", content="x"),
        call("edit", path="shut", old_string="secret", new_string="x"),
        user="1234",
    )
    assert told[3:] == [
        "[read_file failed] shut: it may not be read",
        told[4],
        "[edit failed] shut: it may not be read",
    ]
    assert "ermission denied" in told[4]
    assert (await uses.sh("ls -ln /w/own | tr -s ' ' | cut -d ' ' -f 3; cat /w/own /w/shut")).split("\n") == [
        "1234",
        "still mine",
        "secret",
        "",
    ]


async def test_a_large_file_is_written_edited_and_repeated_by_its_commands(
    uses: Uses, sandbox: DockerSandbox
) -> None:
    content = "".join(f"line {number} of many, it's long\n" for number in range(6_000))
    shell = await sandbox.shell()
    await uses(
        call("bash", command="cd /tmp"),
        call("write_file", path="d/big", content=content),
        call("edit", path="d/big", old_string="line 3000 of", new_string="LINE 3000 OF"),
    )
    assert len(uses.commands[2]) < 400
    sums = [await uses.sh("md5sum /tmp/d/big")]
    await uses.sh("rm -r /tmp/d && cd /")
    for command in uses.commands:
        assert (await shell.run(command)).exit_code == 0
    sums.append(await uses.sh("md5sum /tmp/d/big"))
    assert sums[0] == sums[1]
    assert await uses.sh("grep -c LINE /tmp/d/big; wc -c </tmp/d/big | tr -d ' '") == f"1\n{len(content)}\n"
    told = await uses(
        call("bash", command="cat d/big d/big d/big d/big d/big d/big d/big >d/bigger"),
        call("edit", path="d/bigger", old_string="LINE", new_string="x"),
    )
    assert "longer than 1048576 bytes" in told[1]
