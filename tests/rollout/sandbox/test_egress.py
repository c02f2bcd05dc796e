"""An allowlist is kept: what it names is reached, and nothing else, whatever a sandbox says that it is."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError, TaskError
from rollcage.rollout.sandbox import dns, egress, firewall
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.networks import Networks

Make = Callable[..., Networks]
Join = Callable[..., Awaitable[DockerSandbox]]
Reaches = Callable[..., Awaitable[str]]
REFUSED = "Connection refused"

NAMES = {
    "mirror.example.com": ["198.51.100.80"],
    "a.b.example.org": ["198.51.100.81"],
    "example.org": ["198.51.100.81"],
    "inside.example.com": ["10.77.77.80", "127.0.0.1", "169.254.169.254"],
    "both.example.com": ["10.77.77.80", "198.51.100.80"],
}


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are looked up; those of `NAMES` are there, and no others."""
    asked = []

    def look_up(name: str, port: None, family: int) -> list[Any]:
        asked.append(name)
        if name.rstrip(".") not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, 1, 6, "", (address, 0)) for address in NAMES[name.rstrip(".")]]

    monkeypatch.setattr(egress.socket, "getaddrinfo", look_up)
    return asked


async def names(sandbox: DockerSandbox, *asked: str) -> list[str]:
    """What a sandbox resolves these names to; `-` for one that it cannot."""
    lines = [
        f"echo $(getent ahostsv4 {name} | awk '{{print $1}}' | sort -u | head -n 1 || true)."
        for name in asked
    ]
    result = await (await sandbox.shell()).run("\n".join(lines), timeout=60)
    return [line.rstrip(".") or "-" for line in result.text.split()]


@pytest.mark.docker
async def test_what_is_listed_is_reached_and_nothing_else(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, lookups: list[str]
) -> None:
    networks = make_networks()
    lease = await networks.lease("allowlist", ["mirror.example.com", "198.51.100.90", "203.0.113.0/24"])
    sandbox = await join(networks, lease)
    assert await reaches(sandbox, outside.address) == REFUSED  # nobody has asked for its name
    assert await names(sandbox, "mirror.example.com", "MIRROR.Example.com", "other.example.com", "example.org") == [
        outside.address, outside.address, "-", "-",
    ]  # fmt: skip
    assert await reaches(sandbox, "mirror.example.com") == "outside"
    assert await reaches(sandbox, outside.address, 53) == "outside"
    assert await reaches(sandbox, outside.other) == REFUSED
    assert await reaches(sandbox, outside.other, 53) == REFUSED
    assert await reaches(sandbox, outside.private) == REFUSED
    assert await reaches(sandbox, lease.dns[0], 22) == REFUSED
    assert {name.rstrip(".") for name in lookups} == {"mirror.example.com"}


@pytest.mark.docker
async def test_the_machines_own_resolver_is_asked_by_nobody_whatever_is_listed(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolvers = [*firewall.resolvers(), outside.private, outside.other]
    monkeypatch.setattr(firewall, "resolvers", lambda: resolvers)
    networks = make_networks(allow_private=["10.77.0.0/16"])
    try:
        listed = ["8.0.0.0/5", "198.51.100.0/24"]
        sandbox = await join(networks, await networks.lease("allowlist", listed))
        assert await reaches(sandbox, outside.address, 53) == "outside"
        for resolver in (outside.private, outside.other):
            assert await reaches(sandbox, resolver, 53) == REFUSED
            assert await reaches(sandbox, resolver, 80) == "outside"
        free = await join(networks, await networks.lease("public"))
        assert await reaches(free, outside.private, 53) == "outside"
    finally:
        monkeypatch.undo()
        firewall.ensure()


@pytest.mark.docker
async def test_addresses_ranges_and_wildcards(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, lookups: list[str]
) -> None:
    networks = make_networks()
    one = await join(networks, await networks.lease("allowlist", [outside.address]))
    assert await reaches(one, outside.address) == "outside"
    assert await reaches(one, outside.other) == REFUSED
    many = await join(networks, await networks.lease("allowlist", ["198.51.100.0/24"]))
    assert await reaches(many, outside.other) == "outside"
    wild = await join(networks, await networks.lease("allowlist", ["*.example.org"]))
    assert await names(wild, "a.b.example.org", "example.org", "evilexample.org") == [outside.other, "-", "-"]
    assert await reaches(wild, outside.other) == "outside"
    assert await reaches(wild, outside.address) == REFUSED
    none = await join(networks, await networks.lease("allowlist", []))
    assert await reaches(none, outside.address) == REFUSED


@pytest.mark.docker
async def test_sandboxes_with_one_list_share_a_network_and_do_not_reach_each_other(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any
) -> None:
    networks = make_networks()
    listed = [outside.address, "198.51.100.200"]
    first = await networks.lease("allowlist", listed)
    again = await networks.lease("allowlist", listed[::-1])
    other = await networks.lease("allowlist", [outside.address])
    assert first == again
    assert other.name != first.name
    for _ in range(12):
        await networks.lease("allowlist", listed)
    assert networks.capacity().allowlists == 3, "a small network is full"
    one, two = await join(networks, first), await join(networks, again)
    server = (
        "perl -MIO::Socket::INET -e '$s=IO::Socket::INET->new(LocalPort=>80,Listen=>5);sleep 60' & sleep 0.3"
    )
    await (await two.shell()).run(server, timeout=20)
    address = (await (await two.shell()).run("hostname -i", timeout=20)).text.strip()
    assert await reaches(one, address) not in ("", "outside")
    assert await reaches(one, outside.address) == "outside"


SEND = r"""
use strict; my ($from, $to, $text) = @ARGV;
socket(my $s, 2, 3, 255) or die "socket: $!"; setsockopt($s, 0, 3, 1);
my $udp = pack("n n n n", 5353, 53, 8 + length $text, 0) . $text;
my $ip = pack("C C n n n C C n", 0x45, 0, 20 + length $udp, 7, 0, 64, 17, 0)
    . pack("C4", split /\./, $from) . pack("C4", split /\./, $to);
send($s, $ip . $udp, 0, pack("S n a4 x8", 2, 53, pack("C4", split /\./, $to))) or die "send: $!";
"""


def _wait_for(text: bytes, heard: Path) -> None:
    end = time.monotonic() + 10
    while text not in heard.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.docker
async def test_raw_sockets_and_false_addresses_get_no_further(
    make_networks: Make, join: Join, outside: Any
) -> None:
    networks = make_networks()
    free = await join(networks, await networks.lease("public"))
    bound = await join(networks, await networks.lease("allowlist", [outside.address]))
    friend = (await (await free.shell()).run("hostname -i", timeout=20)).text.strip()
    own = (await (await bound.shell()).run("hostname -i", timeout=20)).text.strip()
    await bound.write({"/send.pl": SEND.encode()})
    before = outside.heard.read_bytes()
    shell = await bound.shell()
    for source, target, text in (
        (own, outside.other, "own-to-other"),
        (friend, outside.other, "friend-to-other"),
        (own, outside.address, "own-to-allowed"),
    ):
        result = await shell.run(f"perl /send.pl {source} {target} {text}", timeout=20)
        assert result.exit_code == 0, result.text
    await asyncio.to_thread(_wait_for, b"own-to-allowed", outside.heard)
    assert outside.heard.read_bytes().removeprefix(before) == b"own-to-allowed\n"


@pytest.mark.docker
async def test_a_name_never_opens_what_is_private(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, lookups: list[str]
) -> None:
    networks = make_networks()
    sandbox = await join(networks, await networks.lease("allowlist", ["*.example.com"]))
    assert await names(sandbox, "inside.example.com", "both.example.com") == ["-", outside.address]
    assert await reaches(sandbox, outside.private) == REFUSED
    opened = make_networks(allow_private=["10.77.0.0/16"])
    lists = (["*.example.com"], [outside.private])
    named, listed = [await join(opened, await opened.lease("allowlist", hosts)) for hosts in lists]
    assert await reaches(named, outside.private) == REFUSED  # nobody has asked for its name
    assert await names(named, "inside.example.com") == [outside.private]
    assert await reaches(named, outside.private) == "outside"
    assert await reaches(listed, outside.private) == "outside"


@pytest.mark.docker
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("10.0.0.7", "10.0.0.7/32 is not on the internet; sandbox.network.allow_private must name it"),
        ("169.254.169.254", "169.254.169.254/32 is not on the internet"),
        ("2001:db8::/32", "is IPv6, which sandboxes do not have"),
        ("https://pypi.org/simple", "is no name, IP address or CIDR"),
        ("pypi.org:443", "is no name, IP address or CIDR"),
        ("*.1.2.3.4", "has a star before an IP address"),
        ("under_score.org", "is no name of letters"),
    ],
)
async def test_an_entry_that_cannot_be_kept_is_named(make_networks: Make, entry: str, said: str) -> None:
    with pytest.raises(TaskError, match=entry.replace("*", r"\*")) as caught:
        await make_networks().lease("allowlist", ["pypi.org", entry])
    assert caught.value.error_class == "unsupported"
    assert said in caught.value.message


@pytest.mark.docker
async def test_a_resolver_that_cannot_listen_says_so(make_networks: Make) -> None:
    networks = make_networks()
    await networks.lease("allowlist", ["198.51.100.1"])
    (bridge,) = networks._small
    with pytest.raises(SandboxError, match="could not listen at") as caught:
        await egress.Egress.open(bridge, ())
    assert caught.value.error_class == "network_setup"


def query(name: str, kind: int = dns.A) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return b"\x12\x34\x01\x00\x00\x01\0\0\0\0\0\0" + labels + b"\0" + kind.to_bytes(2, "big") + b"\0\1"


def test_a_query_is_read_and_answered() -> None:
    read = dns.read_query(query("Deb.debian.org"))
    assert read is not None
    assert (read.name, read.kind, read.recursion) == ("Deb.debian.org", dns.A, True)
    said = dns.answer(read, dns.NO_ERROR, ["198.51.100.80", "198.51.100.81"], 30)
    assert said[:4] == b"\x12\x34\x81\x80"
    assert said.endswith(b"\xc0\x0c\0\1\0\1\0\0\0\x1e\0\4\xc63dQ")
    assert len(dns.answer(read, dns.NO_ERROR, ["198.51.100.80"] * 500, 30)) <= 512
    assert dns.answer(read, dns.NAME_ERROR)[3] & 0xF == 3


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0" * 12,
        query("a.org")[:-3],
        query("a.org").replace(b"\1a", b"\x40a", 1),
        query("a.org").replace(b"\1a", b"\xc0\x0c", 1),
        b"\x12\x34\x81\x80" + query("a.org")[4:],
        b"\x12\x34\x29\x00" + query("a.org")[4:],
        query("a.org")[:-1] + b"\3",
        query("x" * 5).replace(b"xxxxx", b"a.org", 1),
    ],
)
def test_what_is_no_query_gets_no_answer(packet: bytes) -> None:
    assert dns.read_query(packet) is None
