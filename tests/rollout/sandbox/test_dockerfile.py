"""What BuildKit can read builds on the classic builder and means the same; what is no Dockerfile is refused.

`BUILT` holds what stands in a Dockerfile after its head, and the files that BuildKit makes of it; `WHOLE` are whole
ones. Each is built by itself, on the real engine. Wherever an engine's own BuildKit can do it, the files were compared
with those of the frontend of https://github.com/moby/buildkit at version 1.26; the rest is what its documentation and
sources say. `REFUSED` are never built.
"""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from built_images import remove_built_by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.build import Build
from rollcage.rollout.sandbox.buildkit import offered
from rollcage.rollout.sandbox.context import Context, write_tar
from rollcage.rollout.sandbox.dockerfile import DockerfileError, parse
from rollcage.rollout.sandbox.lowering import BaseConfig, lower
from rollcage.rollout.sandbox.reaper import BUILD_LABEL
from rollcage.rollout.sandbox.stages import base_images

BASE = "debian:bookworm-slim"
HOST = f"test-dockerfile-{uuid.uuid4().hex[:8]}"
Files = dict[str, tuple[int, str, bytes]]


@dataclass
class Piece:
    """`files`: path below /out -> bytes, or (mode, owner, bytes) where they are not 0644 and root. `buildkit`: it
    is built by that."""

    says: str
    text: str
    files: dict[str, bytes | tuple[int, str, bytes]]
    context: dict[str, bytes] = field(default_factory=dict)
    buildkit: bool = False


BUILT = [
    Piece(
        "a RUN heredoc is a script for the shell",
        'RUN <<EOF\necho "i am" > /out/run\nid -un >> /out/run\nEOF',
        {"run": b"i am\nroot\n"},
    ),
    Piece(
        "its body sees ARG and ENV as the shell does",
        'ARG who=arg\nENV greeting=hello\nRUN <<EOF\nwho2=$who; echo "$greeting $who2 $0" > /out/env\nEOF',
        {"env": b"hello arg /bin/sh\n"},
    ),
    Piece(
        "a quoted delimiter makes no difference to RUN",
        "RUN <<'EOF'\nx=1; echo \"$x\" > /out/quoted\nEOF",
        {"quoted": b"1\n"},
    ),
    Piece(
        "lines of a body may look like comments, continuations and instructions",
        "RUN <<EOF\n# a comment\n  # another\ntrue \\\n  && echo one > /out/look\nCMD() { echo cmd; }\n\n"
        "CMD x >> /out/look\ncat <<FROM >> /out/look\nFROM y\nEOF2\nFROM\nEOF",
        {"look": b"one\ncmd\nFROM y\nEOF2\n"},
    ),
    Piece(
        "a command after the first failing one still decides the step, without set -e",
        "RUN <<EOF\nfalse\necho on > /out/goes-on\nEOF",
        {"goes-on": b"on\n"},
    ),
    Piece(
        "the working directory and the SHELL instruction hold",
        'SHELL ["/bin/bash", "-eo", "pipefail", "-c"]\nWORKDIR /out/wd\n'
        'RUN <<EOF\na=(1 2); echo "${a[1]} $PWD" > here\n'
        'EOF\nSHELL ["/bin/sh", "-c"]\nWORKDIR /',
        {"wd/here": b"2 /out/wd\n"},
    ),
    Piece(
        "a shell that is no shell gets the body as it is",
        'SHELL ["/usr/bin/perl", "-e"]\nRUN <<EOF\n'
        'open(F, ">/out/perl"); print F "a\\n";\nEOF\nSHELL ["/bin/sh", "-c"]',
        {"perl": b"a\n"},
    ),
    Piece(
        "an interpreter line is obeyed",
        "RUN <<EOF\n#!/usr/bin/perl\nopen(F, '>', '/out/bang'); print F \"$0\\n\";\nEOF",
        {"bang": b"/dev/pipes/EOF\n"},
    ),
    Piece(
        "an interpreter line with an option, tabs taken away",
        "RUN <<-EOF\n\t#!/bin/bash -e\n"
        '\tprintf \'%s\\n\' "\\$BASH" "${0##*/}" > /out/bash-e\n\tfalse | true\n\tEOF',
        {"bash-e": b"$BASH\nEOF\n"},
    ),
    Piece(
        "an interpreter line for a user who may not write to /dev",
        'USER nobody\nRUN <<EOF\n#!/bin/bash\necho "$(id -un) $(ls -A /tmp)" > /out/nobody\nEOF\nUSER root',
        {"nobody": (0o644, "nobody:nogroup", b"nobody \n")},
    ),
    Piece(
        "a heredoc may feed a command",
        "RUN cat <<EOF > /out/cat\nhello $HOME\nEOF",
        {"cat": b"hello /root\n"},
    ),
    Piece(
        "and is not expanded where its delimiter is quoted",
        "RUN cat <<'EOF' > /out/cat-quoted\nhello $HOME \\\nEOF",
        {"cat-quoted": b"hello $HOME \\\n"},
    ),
    Piece(
        "two in one command, continued on a second line",
        "RUN cat <<EOF1 | tr a-z A-Z > /out/two; \\\n    cat <<EOF2 >> /out/two\nlower\nEOF1\nUPPER\nEOF2",
        {"two": b"LOWER\nUPPER\n"},
    ),
    Piece(
        "on descriptors of their own",
        "RUN <<EOF 3<<IN bash -s\ncat <&3 > /out/fd\nEOF\nfrom three\nIN",
        {"fd": b"from three\n"},
    ),
    Piece(
        "the second delimiter inside the first body is text",
        "RUN cat <<A - <<B > /out/nested\nB\nRUN <<C\nA\nsecond\nB",
        {"nested": b"second\n"},
    ),
    Piece(
        "tabs go with <<- and stay with <<",
        "RUN cat <<-EOF > /out/tabs\n\tone\n\t\ttwo\n\tEOF\nRUN cat <<EOF >> /out/tabs\n\tthree\nEOF",
        {"tabs": b"one\ntwo\n\tthree\n"},
    ),
    Piece(
        "a space after << is allowed",
        "RUN << EOF\necho spaced > /out/spaced\nEOF",
        {"spaced": b"spaced\n"},
    ),
    Piece(
        "shifts, here-strings and quoted signs are no heredocs",
        'SHELL ["/bin/bash", "-c"]\n'
        "RUN echo $((1<<4)) \"<<EOF\" '<<X' > /out/none && cat <<< here >> /out/none\n"
        'RUN echo $((1 << 4)) >> /out/none\nSHELL ["/bin/sh", "-c"]',
        {"none": b"16 <<EOF <<X\nhere\n16\n"},
    ),
    Piece(
        "characters of every kind survive in a body",
        "RUN cat <<'EOF' > /out/chars\n"
        "\"q\" 'q' `b` \\n \\\\ $x ${y} %s \u00e9\u20ac\U0001f600 <tag> & \\\n#end\\\nEOF",
        {"chars": "\"q\" 'q' `b` \\n \\\\ $x ${y} %s \u00e9\u20ac\U0001f600 <tag> & \\\n#end\\\n".encode()},
    ),
    Piece(
        "a long line and a long body survive",
        "RUN cat <<'EOF' | tee /out/long | wc -c > /out/long-count\n"
        + "x# \\" * 9_000
        + "\n"
        + "# y\n" * 5_000
        + "EOF",
        {
            "long": ("x# \\" * 9_000 + "\n" + "# y\n" * 5_000).encode(),
            "long-count": b"56001\n",
        },
    ),
    Piece(
        "COPY writes a heredoc with mode 0644",
        "COPY <<EOF /out/copy\nsingle file\nEOF",
        {"copy": b"single file\n"},
    ),
    Piece(
        "several at once go into a folder by their names",
        "COPY <<robots.txt <<humans.txt /out/site/\nno\nrobots.txt\nyes\nhumans.txt",
        {"site/robots.txt": b"no\n", "site/humans.txt": b"yes\n"},
    ),
    Piece(
        "into a folder that is there",
        "COPY <<EOF /out/there\nx\nEOF",
        {"there/EOF": b"x\n"},
    ),
    Piece(
        "an unquoted body is expanded by the builder, quotes stay",
        "ARG name=world\nCOPY <<EOF /out/expand\nHello '${name}' \"$name\" ${unset:-d} ${name:+set} $unset.\nEOF",
        {"expand": b"Hello 'world' \"world\" d set .\n"},
    ),
    Piece(
        "a backslash escapes in an unquoted body",
        "COPY <<EOF /out/slashes\n\\$name \\\\ a\\\nb\nEOF",
        {"slashes": b"$name \\ a\nb\n"},
    ),
    Piece(
        "nothing is touched in a quoted one",
        'COPY <<"EOF" /out/raw\n\\ \\\\ \\$x ${name} $(x)\nFROM y\nEOF',
        {"raw": b"\\ \\\\ \\$x ${name} $(x)\nFROM y\n"},
    ),
    Piece(
        "variables of the base image are known",
        "COPY <<EOF /out/path\n$PATH\nEOF",
        {"path": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"},
    ),
    Piece(
        "ENV may be built from ARG and quotes, and is then expanded",
        "ARG v=1\nENV one=\"a $v\" two='$v' three=x\\ y\nENV four $one and more\nCOPY <<EOF /out/envs\n"
        "$one|$two|$three|$four\nEOF",
        {"envs": b"a 1|$v|x y|a 1 and more\n"},
    ),
    Piece(
        "--chmod and --chown hold for a heredoc",
        "COPY --chown=nobody:nogroup --chmod=0750 <<EOF /out/own\n"
        "x\nEOF\nADD --chmod=1600 <<EOF /out/added\ny\nEOF",
        {"own": (0o750, "nobody:nogroup", b"x\n"), "added": (0o1600, "root:root", b"y\n")},
    ),
    Piece(
        "tabs go with <<- in COPY",
        "COPY <<-EOF /out/copy-tabs\n\t\tone\n\t  two\n\tEOF",
        {"copy-tabs": b"one\n  two\n"},
    ),
    Piece(
        "an empty heredoc is an empty file",
        "COPY <<EOF /out/empty\nEOF",
        {"empty": b""},
    ),
    Piece(
        "a relative destination is below the working directory",
        "WORKDIR /out/rel\nCOPY <<EOF a/b\nx\nEOF",
        {"rel/a/b": b"x\n"},
    ),
    Piece(
        "CR LF stays in the file that COPY writes",
        "COPY <<EOF /out/crlf\r\none\r\ntwo\r\nEOF\r",
        {"crlf": b"one\r\ntwo\r\n"},
    ),
    Piece(
        "bytes that are not UTF-8 stay in a quoted body",
        "COPY <<'EOF' /out/bytes\na\udcff\udc80b\nEOF",
        {"bytes": b"a\xff\x80b\n"},
    ),
    Piece(
        "a heredoc beside files of the context",
        "COPY one.txt <<two.txt dir/ /out/mixed/\n2\ntwo.txt",
        {"mixed/one.txt": b"1\n", "mixed/two.txt": b"2\n", "mixed/in.txt": b"in\n"},
        {"one.txt": b"1\n", "dir/in.txt": b"in\n"},
    ),
    Piece(
        "--chmod of context files, folders and patterns",
        "COPY --chmod=755 dir /out/modes\nCOPY --chmod=640 o*.txt /out/modes/",
        {
            "modes/in.txt": (0o755, "root:root", b"in\n"),
            "modes/one.txt": (0o640, "root:root", b"1\n"),
        },
    ),
    Piece(
        "sources by variable, above the root, and quoted in JSON",
        'ARG d=dir\nCOPY ${d}/in.txt /out/var\nCOPY ../one.txt /out/above\nCOPY ["sp ace.txt", "/out/sp ace"]',
        {"var": b"in\n", "above": b"1\n", "sp ace": b"s\n"},
        {"sp ace.txt": b"s\n"},
    ),
    Piece(
        "a pattern that matches nothing copies nothing",
        "COPY one.txt *.lock /out/lock/\nCOPY *.nothing /out/lock/",
        {"lock/one.txt": b"1\n"},
    ),
    Piece(
        "--link and a cache only make it faster",
        "COPY --link one.txt /out/link\nRUN --mount=type=cache,target=/root/.cache --network=default \\\n"
        "    echo cached > /out/cached\nRUN --mount=type=cache,target=/x <<EOF\necho y >> /out/cached\nEOF",
        {"link": b"1\n", "cached": b"cached\ny\n"},
        buildkit=True,
    ),
    Piece(
        "the platform's ARGs have values",
        "ARG TARGETARCH TARGETOS\nARG BUILDPLATFORM=own\nRUN echo $TARGETOS/$TARGETARCH $BUILDPLATFORM > /out/arch",
        {"arch": b"linux/amd64 own\n"},
    ),
    Piece(
        "ADD unpacks an archive of the context",
        "ADD a.tar.gz /out/unpacked/",
        {"unpacked/inside": b"packed\n"},
    ),
    Piece(
        "comments and empty lines inside a continued instruction",
        "RUN echo a > /out/cont && \\\n# comment\n\n   echo b >> /out/cont",
        {"cont": b"a\nb\n"},
    ),
    Piece(
        "substitutions of every kind, nested, in an expanded body",
        "ARG set=s\nARG empty=\nCOPY <<EOF /out/subst\n${set:-a} ${set-a} ${empty:-a} ${empty-a} ${no:-$set} "
        "${no:-${set}x}\n"
        "${set:+b}${empty:+b}${empty+c} \\$set \\${set} $$set ${set}$set\nEOF",
        {"subst": b"s s a  s sx\nbc $set ${set} set ss\n"},
    ),
    Piece(
        "patterns in an expanded body",
        "ARG v=a.b.tar.gz\nCOPY <<EOF /out/patterns\n${v#*.} ${v##*.} ${v%.*} ${v%%.*} ${v/a/x} ${v//a/x}\nEOF",
        {"patterns": b"b.tar.gz gz a.b.tar a x.b.tar.gz x.b.txr.gz\n"},
    ),
    Piece(
        "a delimiter that is quoted in part, and one with a backslash",
        "COPY <<E'O'F /out/part\n$x\nEOF\nRUN cat <<E\\OF > /out/backslash\n$HOME\nEOF",
        {"part": b"$x\n", "backslash": b"$HOME\n"},
    ),
    Piece(
        "three in one command, one of them empty, one with tabs",
        "RUN cat <<A <<B <<-C > /dev/null; cat <<D > /out/three\na\nA\nB\n\tc\n\tC\nd\nD",
        {"three": b"d\n"},
    ),
    Piece(
        "heredocs inside the script of a heredoc",
        "RUN <<OUTER\ncat <<INNER > /out/inner\nRUN <<OUTER2\nCOPY <<X /y\n${HOME}\nINNER\n"
        "cat <<'INNER' >> /out/inner\n"
        "${HOME}\nINNER\nOUTER",
        {"inner": b"RUN <<OUTER2\nCOPY <<X /y\n/root\n${HOME}\n"},
    ),
    Piece(
        "a script that ends the step at the first failure, if it says so",
        "RUN <<EOF\nset -eu\nx=1\nfor i in 1 2; do\n    x=$((x << i))\ndone\nprintf '%s\\n' \"$x\" > /out/loop\nEOF",
        {"loop": b"8\n"},
    ),
    Piece(
        "an interpreter found by env",
        "RUN <<EOF\n#!/usr/bin/env bash\nset -o pipefail\nmapfile -t lines < <(printf 'a\\nb\\n')\n"
        'echo "${#lines[@]}" > /out/env-bash\nEOF',
        {"env-bash": b"2\n"},
    ),
    Piece(
        "an interpreter line that comes second is a comment",
        "RUN <<EOF\n\n#!/usr/bin/perl\necho $0 > /out/late\nEOF",
        {"late": b"/bin/sh\n"},
    ),
    Piece(
        "--chown by number, for several heredocs and a new folder",
        "COPY --chown=1234:5678 --chmod=600 <<a <<b /out/owned/\n1\na\n2\nb",
        {"owned/a": (0o600, "1234:5678", b"1\n"), "owned/b": (0o600, "1234:5678", b"2\n")},
    ),
    Piece(
        "ADD writes heredocs as COPY does",
        "ADD --chown=nobody:nogroup <<'x.sh' <<y.conf /out/adds/\n#!/bin/sh\necho $HOME\nx.sh\np=$PATH\ny.conf",
        {
            "adds/x.sh": (0o644, "nobody:nogroup", b"#!/bin/sh\necho $HOME\n"),
            "adds/y.conf": (
                0o644,
                "nobody:nogroup",
                b"p=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
            ),
        },
    ),
    Piece(
        "CR LF in instructions that are no heredocs",
        "ENV a=1 \\\r\n    b=2\r\nRUN echo $a \\\r\n  $b > /out/crlf-run\r",
        {"crlf-run": b"1 2\n"},
    ),
    Piece(
        "--chmod with letters",
        "COPY --chmod=u=rwX,go=rX dir /out/letters\nCOPY --chmod=a+x,o-r one.txt /out/letters/\n"
        "COPY --chmod=go-r <<EOF /out/letters/here\nx\nEOF",
        {
            "letters/in.txt": (0o644, "root:root", b"in\n"),
            "letters/one.txt": (0o751, "root:root", b"1\n"),
            "letters/here": (0o600, "root:root", b"x\n"),
        },
    ),
    Piece(
        "--parents keeps paths, from the pivot on",
        "COPY --parents dir/in.txt tree/a/*.py tree/./**/deep.md /out/parents/",
        {
            "parents/dir/in.txt": b"in\n",
            "parents/tree/a/one.py": b"1",
            "parents/a/b/deep.md": b"d",
        },
        {"tree/a/one.py": b"1", "tree/a/b/deep.md": b"d", "tree/top.md": b"t"},
    ),
    Piece(
        "--exclude leaves out what it names, and nothing below",
        "COPY --exclude=a/b --exclude=*.md tree /out/exclude\nCOPY --exclude=*.txt one.* /out/exclude/\n"
        "COPY --exclude=x one.txt /out/exclude/renamed",
        {"exclude/a/one.py": b"1", "exclude/renamed": b"1\n"},
    ),
]

WHOLE = [
    Piece(
        "# syntax, a byte order mark, lower case, and stages that are not needed",
        "\ufeff# syntax=docker/dockerfile:1\nARG TAG=bookworm-slim\n"
        "from nowhere.invalid/none as unused\nrun false\n"
        f"FROM --platform=$BUILDPLATFORM {BASE.split(':')[0]}:${{TAG}} AS Build\nARG v=7\nENV e=$v\n"
        "COPY <<EOF /made\n$v\nEOF\nFROM scratch AS late\nCOPY --from=1 /made /late\n"
        "FROM build\nRUN mkdir /out && echo $v $e > /out/args\nCOPY --from=late /late /out/\n"
        "COPY <<EOF /out/inherited\n$v $e\nEOF",
        {"args": b"7 7\n", "late": b"7\n", "inherited": b"7 7\n"},
    ),
    Piece(
        "another escape character",
        f"# escape=`\nFROM {BASE}\nRUN mkdir /out && `\n    echo a\\b > /out/plain\n"
        "RUN <<EOF\necho 'tick`' > /out/tick\necho \\\n  two >> /out/tick\n"
        "EOF\nENV x=a`$b\nCOPY <<EOF /out/body\n\\$x $x\nEOF",
        {"plain": b"ab\n", "tick": b"tick`\ntwo\n", "body": b"$x a$b\n"},
    ),
    Piece(
        "COPY . brings the author's files and none of ours; .dockerignore holds",
        f"FROM {BASE}\nCOPY <<EOF /x\nEOF\nCOPY . /out/",
        {
            "Dockerfile": f"FROM {BASE}\nCOPY <<EOF /x\nEOF\nCOPY . /out/".encode(),
            ".dockerignore": b"# all logs\n**/*.log\nsecret\n!secret/open\n",
            "a/b.txt": b"b",
            "secret/open": b"o",
        },
        {
            ".dockerignore": b"# all logs\n**/*.log\nsecret\n!secret/open\n",
            "a/b.txt": b"b",
            "a/c.log": b"c",
            "top.log": b"t",
            "secret/shut": b"s",
            "secret/open": b"o",
        },
    ),
    Piece(
        "a heredoc beside files of another stage",
        f"FROM {BASE} AS a\nRUN echo 1 > /one\nFROM {BASE}\nRUN mkdir /out\n"
        "COPY --from=0 --chown=nobody:nogroup /one <<two /out/beside/\n2\ntwo",
        {"beside/one": (0o644, "nobody:nogroup", b"1\n"), "beside/two": (0o644, "nobody:nogroup", b"2\n")},
    ),
    Piece(
        "an ONBUILD heredoc runs in the stage on top, with a second instruction behind it",
        f"FROM {BASE} AS base\nRUN mkdir /out\nONBUILD ARG v=trigger\nONBUILD RUN <<EOF\necho $v > /out/onbuild\nEOF\n"
        "RUN echo no > /out/base\nFROM base\nRUN echo yes > /out/top",
        {"onbuild": b"trigger\n", "base": b"no\n", "top": b"yes\n"},
    ),
    Piece(
        "a backtick as escape, in continued COPYs, modes and bodies",
        f"# escape=`\nFROM {BASE}\nARG d=/out\nCOPY --chmod=700 <<A `\n  <<B `\n  ${{d}}/\na`\nA\n\\$d `$d\nB\n"
        'RUN ["/bin/sh", "-c", "echo a\\\\b > /out/json"]',
        {"A": (0o700, "root:root", b"a`\n"), "B": (0o700, "root:root", b"$d `/out\n"), "json": b"ab\n"},
    ),
    Piece(
        "mounts of every kind, which only BuildKit has",
        f"FROM {BASE} AS tools\nCOPY <<EOF /tool\ntool\nEOF\nFROM {BASE}\nARG where=/bound\nRUN mkdir /out\n"
        "RUN --mount=type=bind,source=dir,target=${where} --mount=from=tools,source=/tool,target=/t,ro "
        "--mount=type=cache,target=/cached,id=rollcage-test --mount=type=tmpfs,target=/tmp \\\n"
        "    cat /bound/in.txt /t > /out/bound && touch /tmp/x /cached/x\n"
        "RUN --mount=type=bind,target=/ctx,rw <<EOF\n#!/bin/bash\ncd /ctx && ls > /out/list\necho x > written\nEOF\n"
        "RUN ls /cached /tmp /ctx /bound > /out/left\nCOPY --from=tools --chmod=710 /tool /out/tool",
        {
            "bound": b"in\ntool\n",
            "list": b"Dockerfile\ndir\n",
            "left": b"/bound:\n\n/cached:\n\n/ctx:\n\n/tmp:\n",
            "tool": (0o710, "root:root", b"tool\n"),
        },
        {"dir/in.txt": b"in\n"},
        buildkit=True,
    ),
]


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    client = docker.APIClient(timeout=120)
    yield client
    remove_built_by(client, HOST)
    client.close()


def write_context(root: Path, text: str, files: dict[str, bytes]) -> None:
    (root / "Dockerfile").write_bytes(text.encode("utf-8", "surrogateescape"))
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def built(api: Any, root: Path, text: str, files: dict[str, bytes]) -> tuple[Files, bool]:
    """The files below /out in the image that this Dockerfile gives, and whether BuildKit made it."""
    write_context(root, text, files)
    context = Context.read(root)
    dockerfile = parse(text)
    bases = {}
    for base in base_images(dockerfile):
        env = api.inspect_image(base)["Config"]["Env"] or []
        bases[base] = BaseConfig(dict(entry.split("=", 1) for entry in env))
    api_version = offered(api.version())
    lowered = lower(dockerfile, context, bases=bases, labels={BUILD_LABEL: HOST}, buildkit=api_version)
    tar = io.BytesIO()
    write_tar(tar, context, lowered.dockerfile.encode("utf-8", "surrogateescape"), lowered.files)
    tar.seek(0)
    tag = f"rollcage-test/dockerfile:{uuid.uuid4().hex}"
    image = Build(tag, "build a test", {}, buildkit=lowered.buildkit).run(api, tar, 240)
    container = api.create_container(image, ["true"], labels={"rollcage.host": "test-dockerfile"})["Id"]
    try:
        chunks, _ = api.get_archive(container, "/out")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as out:
            found = {}
            for member in out.getmembers():
                if member.isreg():
                    content = out.extractfile(member)
                    assert content is not None
                    user = {0: "root", 65534: "nobody"}.get(member.uid, str(member.uid))
                    group = {0: "root", 65534: "nogroup"}.get(member.gid, str(member.gid))
                    mode = member.mode & 0o7777
                    found[member.name.removeprefix("out/")] = (mode, f"{user}:{group}", content.read())
            return found, lowered.buildkit
    finally:
        api.remove_container(container, force=True)


def expected(piece: Piece) -> Files:
    plain = {
        name: (0o644, "root:root", value) for name, value in piece.files.items() if isinstance(value, bytes)
    }
    return plain | {name: value for name, value in piece.files.items() if not isinstance(value, bytes)}


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("inside")
        info.size = 7
        tar.addfile(info, io.BytesIO(b"packed\n"))
    return packed.getvalue()


@pytest.fixture(scope="module")
def all_built(api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """What became of each Dockerfile, three built at a time: a step waits for the engine more than it computes. None
    is removed before all are built: with an image go the layers that only it has until then, under another build that
    has just found them in the cache."""
    files = {"a.tar.gz": archive()}
    for piece in BUILT:
        files |= piece.context
    head = f"FROM {BASE}\nRUN mkdir -p /out/there && chmod 777 /out\n"
    texts = {piece.says: (head + piece.text + "\n", files) for piece in BUILT}
    texts |= {piece.says: (piece.text, piece.context) for piece in WHOLE}
    with ThreadPoolExecutor(3) as threads:
        yield {
            says: threads.submit(built, api, tmp_path_factory.mktemp("context"), text, context)
            for says, (text, context) in texts.items()
        }
        threads.shutdown(cancel_futures=True)


@pytest.mark.docker
@pytest.mark.parametrize("piece", [*BUILT, *WHOLE], ids=lambda piece: piece.says)
def test_it_builds_with_buildkits_meaning(piece: Piece, all_built: dict[str, Future[Any]]) -> None:
    files, buildkit = all_built[piece.says].result()
    assert files == expected(piece)
    assert buildkit is piece.buildkit


@dataclass
class Refused:
    says: str
    text: str
    line: int
    column: int
    problem: str
    error_class: str = "dockerfile_parse"


FROM = f"FROM {BASE}\n"
REFUSED = [
    Refused("a heredoc never closed", FROM + "RUN true\nRUN <<EOF\necho\n", 3, 5, "<<EOF"),
    Refused("a heredoc closed with a space behind", FROM + "COPY <<EOF /x\nEOF \n", 2, 6, "take them away"),
    Refused(
        "a delimiter that ran into the command", FROM + "RUN cat <<EOF>/f\nx\nEOF\n", 2, 9, "put a space"
    ),
    Refused("<< inside a word", FROM + "RUN cat<<EOF > /f\nhello\nEOF\n", 3, 1, "put a space before it"),
    Refused("CR LF in a script", FROM + "RUN <<EOF\r\nset -e\r\nEOF\r\n", 3, 7, "CR LF"),
    Refused("CR LF in what a command is fed", FROM + "RUN cat <<EOF > /f\r\nx\r\nEOF\r\n", 3, 2, "CR LF"),
    Refused("a NUL in a script", FROM + "RUN <<EOF\necho \0\nEOF\n", 3, 6, "NUL"),
    Refused("a script that is not UTF-8", FROM + "RUN <<EOF\necho \udcff\nEOF\n", 3, 6, "UTF-8"),
    Refused(
        "a bad substitution in an expanded body",
        FROM + "COPY <<EOF /x\n${}\nEOF\n",
        3,
        1,
        "quote the delimiter",
    ),
    Refused("a heredoc as destination", FROM + "COPY x <<EOF\nEOF\n", 2, 8, "destination"),
    Refused("a misspelt instruction", FROM + "RUNN true\n", 2, 1, "RUN is meant?"),
    Refused("a missing continuation", FROM + "RUN apt-get update\n  apt-get install x\n", 3, 3, "backslash"),
    Refused("nothing at all", "# only a comment\n", 1, 1, "no FROM"),
    Refused("an instruction before FROM", "RUN true\n" + FROM, 1, 1, "before any FROM"),
    Refused("FROM with too much", "FROM a b c\n", 1, 1, "FROM takes"),
    Refused("a stage name that is none", "FROM a AS 1x\n", 1, 11, "cannot name a stage"),
    Refused("a base image without a name", "ARG X\nFROM ${X}\n", 2, 6, "names no image"),
    Refused("COPY without a destination", FROM + "COPY x\n", 2, 1, "no destination"),
    Refused("an unknown flag", FROM + "COPY --chmood=1 a b\n", 2, 6, "no flag"),
    Refused("a mode that is none", FROM + "COPY --chmod=99 . /b\n", 2, 6, "octal"),
    Refused(
        "COPY from a later stage",
        f"{FROM}COPY --from=b /x /\nFROM {BASE} AS b\nCOPY --from=0 /x /y\n",
        2,
        13,
        "no earlier stage",
    ),
    Refused("an escape that is none", "# escape=x\nFROM a\n", 1, 10, "escape character"),
    Refused("SHELL without an array", FROM + "SHELL /bin/bash -c\n", 2, 1, "JSON array"),
    Refused("an array of more than strings", FROM + 'CMD ["a", 1]\n', 2, 1, "more than strings"),
    Refused("ENV without a value", FROM + "ENV A\n", 2, 1, "has no value"),
    Refused("an open quote", FROM + "WORKDIR '/x\n", 2, 9, "not closed"),
    Refused("ONBUILD of FROM", FROM + "ONBUILD FROM x\n", 2, 1, "cannot hold FROM"),
    Refused(
        "a source that is not there",
        FROM + "RUN true\nCOPY nope.txt /\n",
        3,
        6,
        "not in the build context",
        "image_build",
    ),
    Refused(
        "a source that .dockerignore leaves out",
        FROM + "COPY hidden /\n",
        2,
        6,
        ".dockerignore",
        "image_build",
    ),
    Refused(
        "a secret mount",
        FROM + "RUN --mount=type=secret,id=x cat /run/secrets/x\n",
        2,
        5,
        "RUN --mount",
        "unsupported",
    ),
    Refused(
        "a bind mount",
        FROM + "RUN true\nRUN --mount=type=bind,source=a,target=/a true\n",
        3,
        5,
        "COPY the files",
        "unsupported",
    ),
    Refused(
        "a cache that starts from a stage",
        FROM + "RUN --mount=type=cache,from=a,target=/a true\n",
        2,
        5,
        "--mount",
        "unsupported",
    ),
    Refused("no network for one step", FROM + "RUN --network=none true\n", 2, 5, "--network", "unsupported"),
    Refused(
        "--security=insecure", FROM + "RUN --security=insecure true\n", 2, 5, "--security", "unsupported"
    ),
    Refused(
        "--parents from a stage",
        FROM + FROM + "COPY --from=0 --parents a/b /\n",
        3,
        15,
        "--parents",
        "unsupported",
    ),
    Refused(
        "--exclude from a stage",
        FROM + FROM + "COPY --from=0 --exclude=*.md / /\n",
        3,
        15,
        "--exclude",
        "unsupported",
    ),
    Refused(
        "--chmod in letters from a stage",
        FROM + FROM + "COPY --from=0 --chmod=u+x / /b\n",
        3,
        15,
        "octal",
        "unsupported",
    ),
    Refused("letters that are none", FROM + "COPY --chmod=u+z . /b\n", 2, 6, "u+z"),
    Refused(
        "--parents of what is not there", FROM + "COPY --parents ./nope/x /\n", 2, 16, "not in", "image_build"
    ),
    Refused("another frontend", "# syntax=example/other:1\n" + FROM, 1, 10, "example/other", "unsupported"),
    Refused("an ARG without a value in FROM", "ARG V\nFROM python:${V}\nRUN true\n", 2, 6, "'python:'"),
    Refused("a mount of no kind", FROM + "RUN --mount=type=volume,target=/x true\n", 2, 18, "type volume"),
    Refused(
        "a mount with a misspelt option", FROM + "RUN --mount=tpye=bind,target=/x true\n", 2, 13, "'tpye'"
    ),
    Refused("an unknown flag of RUN", FROM + "RUN --mont=type=cache,target=/x true\n", 2, 5, "no flag"),
    Refused(
        "a setuid mode",
        FROM + "COPY --chmod=4755 x /b\n",
        2,
        6,
        "RUN chmod",
        "unsupported",
    ),
    Refused(
        "--chmod from a stage",
        f"FROM {BASE} AS a\nFROM {BASE}\nCOPY --from=a --chmod=755 /x /\n",
        3,
        15,
        "--chmod",
        "unsupported",
    ),
    Refused(
        "ADD of a repository",
        FROM + "ADD https://github.com/x/y.git /y\n",
        2,
        5,
        "cannot fetch",
        "unsupported",
    ),
    Refused(
        "--checksum",
        FROM + "ADD --checksum=sha256:00 https://x.invalid/a /a\n",
        2,
        5,
        "--checksum",
        "unsupported",
    ),
    Refused(
        "a substitution that only BuildKit has",
        FROM + "ARG A=1.2\nENV B=${A%.*}\n",
        3,
        7,
        "${A%",
        "unsupported",
    ),
    Refused(
        "ONBUILD COPY of a heredoc",
        FROM + "ONBUILD COPY <<EOF /x\nEOF\n",
        2,
        1,
        "ONBUILD COPY",
        "unsupported",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.says)
def test_it_is_refused_with_its_place_before_a_build(case: Refused, tmp_path: Path) -> None:
    write_context(tmp_path, case.text, {".dockerignore": b"hidden\n", "hidden": b"", "x": b""})
    with pytest.raises(BuildError) as caught:
        lower(parse(case.text), Context.read(tmp_path))
    error = caught.value
    assert isinstance(error, DockerfileError)
    assert (error.error_class, error.line, error.column) == (case.error_class, case.line, case.column)
    assert case.problem in error.message
    assert error.remedy
    assert error.message.startswith(f"Dockerfile:{case.line}:{case.column}: ")


BASES = [
    ("FROM a\n", ("a",)),
    ("ARG V=3.13\nARG I=python:${V}-slim\nFROM ${I}\n", ("python:3.13-slim",)),
    ("ARG V\nFROM img:${V:-latest}\n", ("img:latest",)),
    (f"FROM python:3.13-slim@sha256:{'0' * 64}\n", (f"python:3.13-slim@sha256:{'0' * 64}",)),
    ("FROM a AS x\nFROM x AS y\nFROM Y\n", ("a",)),
    ("FROM a AS x\nFROM b AS unused\nFROM c\nCOPY --from=x / /\n", ("a", "c")),
    ("FROM a\nFROM b\nCOPY --from=0 / /\n", ("a", "b")),
    ("FROM scratch\nCOPY --from=ghcr.io/astral-sh/uv:0.5 /uv /bin/\n", ("ghcr.io/astral-sh/uv:0.5",)),
    ("FROM --platform=$BUILDPLATFORM a:$TARGETARCH\n", ("a:amd64",)),
    ("FROM a\nRUN <<EOF\nFROM b\nEOF\n", ("a",)),
    ("FROM x AS x\n", ("x",)),
]


@pytest.mark.parametrize(("text", "images"), BASES)
def test_the_base_images_are_those_that_the_builder_would_ask_for(text: str, images: tuple[str, ...]) -> None:
    assert base_images(parse(text)) == images


def test_a_build_argument_chooses_the_base_image() -> None:
    assert base_images(parse("ARG V=1\nFROM a:${V}\n"), build_args={"V": "2"}) == ("a:2",)


def test_a_base_image_brings_its_shell_and_its_variables(tmp_path: Path) -> None:
    text = "FROM a\nRUN <<EOF\nx\nEOF\nCOPY <<EOF /f\n$COLOUR\nEOF\n"
    write_context(tmp_path, text, {})
    base = BaseConfig({"COLOUR": "red"}, ("/bin/bash", "-c"), ("ENV COLOUR=blue",))
    lowered = lower(parse(text), Context.read(tmp_path), bases={"a": base})
    assert 'RUN ["/bin/bash", "-c", ' in lowered.dockerfile
    assert [file.body for file in lowered.files] == [b"blue\n"]


def test_an_untouched_instruction_stays_as_it_was_written(tmp_path: Path) -> None:
    text = 'FROM a\nRUN  apt-get update && \\\n    apt-get install -y x\nCMD ["x"]\nEXPOSE 80\n'
    write_context(tmp_path, text, {})
    assert lower(parse(text), Context.read(tmp_path)).dockerfile == text


PIECES = [
    "FROM a",
    " AS b",
    "\n",
    "RUN ",
    "COPY ",
    "ADD ",
    "ENV ",
    "ARG ",
    "ONBUILD ",
    "SHELL ",
    "HEALTHCHECK ",
    "USER ",
    "<<EOF",
    "<<-EOF",
    "<<'EOF'",
    "<<",
    "EOF",
    "EOF\n",
    " ",
    "\\\n",
    "\\",
    '"',
    "'",
    "$",
    "${",
    "}",
    "${x:-",
    "${x/",
    "/x",
    ".",
    "*",
    "[",
    '["a"]',
    "]",
    "#",
    "# escape=`\n",
    "`\n",
    "--from=0",
    "--chmod=1",
    "--mount=type=cache",
    "=",
    "x",
    "-",
    "\r\n",
    "\t",
    "é",
    "\x00",
    "�",
    "((1 << 4))",
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=30).map(lambda pieces: "FROM a\n" + "".join(pieces)))
def test_any_text_is_lowered_or_refused_with_its_place(tmp_path: Path, text: str) -> None:
    refused = None
    try:
        lowered = lower(parse(text), Context.read(tmp_path))
    except DockerfileError as error:
        refused = error
    if refused is not None:
        assert 1 <= refused.line <= text.count("\n") + 1
        return
    stages = parse(lowered.dockerfile).stages
    assert not any(at.heredocs for stage in stages for at in stage.instructions)
