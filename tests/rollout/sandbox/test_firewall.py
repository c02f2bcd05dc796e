"""Sandboxes with internet reach the internet, and not the machine, its networks or each other."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import Networks

pytestmark = pytest.mark.docker

Make = Callable[..., Networks]
Join = Callable[..., Awaitable[DockerSandbox]]
Reaches = Callable[..., Awaitable[str]]
REFUSED = "Connection refused"


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which this machine accepts connections at all of its addresses, and answers."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(0.2)
        command = [sys.executable, "-c", ANSWER, str(server.fileno())]
        process = subprocess.Popen(command, pass_fds=[server.fileno()])
        yield server.getsockname()[1]
        process.kill()
        process.wait()


ANSWER = """
import socket, sys
server = socket.socket(fileno=int(sys.argv[1]))
server.setblocking(True)
while True:
    client, _ = server.accept()
    client.recv(100)
    client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nthe machine")
    client.close()
"""


def address_of(engine: Engine, sandbox: DockerSandbox) -> str:
    found = engine.api.inspect_container(sandbox.id)["NetworkSettings"]["Networks"]
    return str(next(iter(found.values()))["IPAddress"])


def own_address() -> str:
    """This machine's address towards the world."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.200", 9))
        return str(probe.getsockname()[0])


async def serve(sandbox: DockerSandbox) -> None:
    """Have a sandbox answer at port 80."""
    program = (
        "use IO::Socket::INET; $s = IO::Socket::INET->new(LocalPort => 80, Listen => 5, ReuseAddr => 1); "
        "while ($c = $s->accept) { while (<$c>) { last if /^\\r?$/ } "
        'print $c "HTTP/1.0 200 OK\\r\\n\\r\\na sandbox"; close $c }'
    )
    await sandbox.write({"/serve.pl": program.encode()})
    await (await sandbox.shell()).run(
        "perl /serve.pl >/dev/null 2>&1 &\nuntil bash -c 'exec 3<>/dev/tcp/127.0.0.1/80'; do sleep 0.1; done",
        timeout=30,
    )


async def test_the_internet_is_reached_and_nothing_of_the_machine(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, listener: int
) -> None:
    networks = make_networks()
    sandbox = await join(networks, await networks.lease("public"))
    assert await reaches(sandbox, outside.address) == "outside"
    gateway = str(networks._bridges[0].gateway)
    for address in (gateway, own_address(), "172.17.0.1"):
        assert await reaches(sandbox, address, listener) == REFUSED, address
    assert await reaches(sandbox, outside.private) == REFUSED
    assert await reaches(sandbox, "169.254.169.254") == REFUSED
    assert await reaches(sandbox, "100.64.0.1", 2375) == REFUSED


async def test_names_are_resolved(make_networks: Make, join: Join) -> None:
    try:
        socket.getaddrinfo("deb.debian.org", 80)
    except socket.gaierror:
        pytest.skip("this machine itself cannot resolve deb.debian.org")
    networks = make_networks()
    sandbox = await join(networks, await networks.lease("public"))
    result = await (await sandbox.shell()).run("getent hosts deb.debian.org", timeout=30)
    assert result.exit_code == 0, result.text


async def test_an_insecure_network_reaches_the_machine(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, listener: int
) -> None:
    networks = make_networks(insecure=True)
    lease = await networks.lease("public")
    interface = networks._bridges[0].interface
    assert interface.startswith(firewall.OPEN)
    sandbox = await join(networks, lease)
    assert await reaches(sandbox, outside.address) == "outside"
    assert await reaches(sandbox, own_address(), listener) == "the machine"
    assert await reaches(sandbox, outside.private) == "outside"


async def test_an_operators_private_range_is_reached_where_it_is_named(
    make_networks: Make, join: Join, reaches: Reaches, outside: Any, listener: int
) -> None:
    networks = make_networks(allow_private=["10.77.77.0/24"])
    sandbox = await join(networks, await networks.lease("public"))
    assert await reaches(sandbox, outside.private) == "outside"
    assert await reaches(sandbox, outside.address) == "outside"
    assert await reaches(sandbox, own_address(), listener) == REFUSED


async def test_sandboxes_do_not_reach_each_other(
    make_networks: Make, join: Join, reaches: Reaches, engine: Engine, outside: Any
) -> None:
    networks, neighbour = make_networks(leases_per_bridge=2), make_networks()
    one, two = [await join(networks, await networks.lease("public")) for _ in range(2)]
    other = await join(networks, await networks.lease("public"))
    foreign = await join(neighbour, await neighbour.lease("public"))
    assert len(networks._bridges) == 2
    for server in (two, other, foreign):
        await serve(server)
        assert await reaches(server, "127.0.0.1") == "a sandbox"
        assert await reaches(one, address_of(engine, server), within=2) != "a sandbox"
    assert await reaches(two, outside.address) == "outside"


async def shown(*command: str) -> str:
    """What a command on this machine prints."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


ARP = r"""
use strict; my ($kind, $own, $asked) = @ARGV;
sub mac { pack("H12", join "", split /:/, $_[0]) }
open(my $f, "<", "/sys/class/net/eth0/address") or die; chomp(my $real = <$f>);
open($f, "<", "/sys/class/net/eth0/ifindex") or die; my $index = <$f>;
socket(my $s, 17, 3, unpack("S", pack("n", 3))) or die "socket: $!";
my $to = pack("S n i S C C a8", 17, 3, $index, 0, 0, 6, "\xff" x 6 . "\0\0");
bind($s, $to) or die "bind: $!";
my $from = $kind eq "steal" ? mac($ARGV[3]) : mac($real);
my $operation = $kind eq "ask" ? 1 : 2;
my $frame = "\xff" x 6 . $from . pack("n n n C C n", 0x806, 1, 0x800, 6, 4, $operation)
    . $from . pack("C4", split /\./, $own) . "\xff" x 6 . pack("C4", split /\./, $asked);
for (1 .. ($kind eq "ask" ? 3 : 100)) {
    send($s, $frame, 0, $to) or die "send: $!"; select(undef, undef, undef, 0.02)
}
exit 0 if $kind ne "ask";
my $end = time + 2;
while (time < $end) {
    vec(my $set = "", fileno($s), 1) = 1;
    next unless select($set, undef, undef, 0.5);
    recv($s, my $got, 2000, 0);
    if (unpack("x12n", $got) == 0x806 && unpack("x20n", $got) == 2) { print "answered\n"; exit 0 }
}
print "silence\n";
"""


async def test_not_even_at_the_level_of_ethernet(
    make_networks: Make, join: Join, reaches: Reaches, engine: Engine, outside: Any
) -> None:
    networks = make_networks()
    attacker, victim = [await join(networks, await networks.lease("public")) for _ in range(2)]
    bridge = networks._bridges[0]
    await attacker.write({"/arp.pl": ARP.encode()})
    shell = await attacker.shell()
    own, theirs = address_of(engine, attacker), address_of(engine, victim)
    link = (await victim.read("/sys/class/net/eth0/address") or b"").decode().strip()

    async def arp(*words: str) -> str:
        result = await shell.run(" ".join(["perl /arp.pl", *words]), timeout=20)
        assert result.exit_code == 0, result.text
        return result.text.strip()

    assert await arp("ask", own, bridge.gateway) == "answered"
    assert await arp("ask", own, theirs) == "silence"
    assert await reaches(victim, outside.address) == "outside"
    # The victim's IP address at the attacker's link address, then the victim's own link address at another port.
    await arp("claim", theirs, bridge.gateway)
    assert link in await shown("ip", "neigh", "show", theirs, "dev", bridge.interface)
    before = await shown("bridge", "fdb", "show", "br", bridge.interface)
    await arp("steal", theirs, bridge.gateway, link)
    assert await shown("bridge", "fdb", "show", "br", bridge.interface) == before
    assert await reaches(victim, outside.address) == "outside"
    assert await reaches(attacker, outside.address) == "outside"


async def test_ipv6_is_off_on_our_bridges(make_networks: Make) -> None:
    networks = make_networks()
    await networks.lease("public")
    assert "inet6" not in await shown("ip", "-6", "addr", "show", "dev", networks._bridges[0].interface)


async def test_rules_that_somebody_flushed_are_set_again_before_the_next_lease(
    make_networks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = make_networks()
    await networks.lease("public")
    calls: list[int] = []
    ensure = firewall.ensure
    monkeypatch.setattr(firewall, "ensure", lambda: calls.append(ensure() or 1))
    await networks.lease("public")
    networks._looked -= 60
    await networks.lease("public")
    assert len(calls) == 1


async def test_an_engine_whose_bridges_are_elsewhere_is_refused(
    make_networks: Make, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    networks = make_networks()
    monkeypatch.setattr(firewall, "INTERFACES", tmp_path)
    with pytest.raises(SandboxError, match="is not here, so that the engine is on another") as caught:
        await networks.check({"public"})
    monkeypatch.undo()
    assert caught.value.error_class == "network_setup"
    for remedy in ("as root", 'network_mode = "no-network"', "sandbox.network.insecure_network: true"):
        assert remedy in caught.value.message
    assert engine.api.networks(filters={"label": f"rollcage.host={networks.host_id}"}) == []


NOBODY = """
import asyncio, os, sys
from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import Networks

async def main():
    os.setgroups([])
    os.setgid(os.stat("/var/run/docker.sock").st_gid)
    os.setuid(65534)
    engine = Engine()
    networks = Networks(engine, sys.argv[1], cidr="10.233.0.0/16")
    await networks.check({"no-network"})
    assert (await networks.lease("no-network")).name == "none"
    assert (await networks.lease_private()).name != "none"
    for call in (networks.check({"public"}), networks.lease("public"), networks.lease_private(internet=True)):
        try:
            await call
        except SandboxError as error:
            assert error.error_class == "network_setup" and "is not root" in error.message, error
        else:
            raise AssertionError("a lease was given")
    await networks.close()
    print("well")

asyncio.run(main())
"""


def test_who_is_not_root_is_told_so_and_runs_tasks_without_internet(engine: Engine) -> None:
    host = f"test-{uuid4().hex[:8]}"
    done = subprocess.run([sys.executable, "-c", NOBODY, host], capture_output=True, text=True, timeout=120)
    assert done.stdout == "well\n", done.stderr
    assert engine.api.networks(filters={"label": f"rollcage.host={host}"}) == []


async def test_an_allowlist_and_insecure_networks_do_not_go_together(make_networks: Make) -> None:
    networks = make_networks(insecure=True)
    await networks.check({"public"})
    for call in (networks.check({"allowlist"}), networks.lease("allowlist", ["192.0.2.1"])):
        with pytest.raises(SandboxError, match="an allowlist cannot be kept"):
            await call


RULES = """
import subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from rollcage.rollout.sandbox import firewall

def shown():
    return subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout.splitlines()

def link(*words):
    subprocess.run(["ip", "link", *words], check=True)

def once(_):
    firewall.ensure()

if __name__ == "__main__":
    assert "no chain DOCKER-USER" in (firewall.problem() or "")
    subprocess.run(["iptables", "-N", "DOCKER-USER"], check=True)
    subprocess.run(["iptables", "-A", "DOCKER-USER", "-j", "RETURN"], check=True)
    subprocess.run(["iptables", "-A", "INPUT", "-s", "192.0.2.7", "-j", "DROP"], check=True)
    before = shown()
    link("add", "rcgs0123456789", "type", "bridge")
    link("add", "rcga0123456789", "type", "bridge")
    assert firewall.problem() is None
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(once, range(8)))
    rules = shown()
    assert len(rules) == len(set(rules)), "a rule is there twice"
    for chain, target in (("DOCKER-USER", firewall.FORWARD), ("INPUT", firewall.INPUT)):
        own = [rule for rule in rules if rule.startswith(f"-A {chain} ")]
        assert own[0] == f"-A {chain} -i rcg+ -j {target}", own
    firewall.set_network("rcga0123456789", ["-d 192.0.2.1/32 -j RETURN", "-j DROP"])
    firewall.open_in_network("rcga0123456789", ["-d 192.0.2.2/32 -j RETURN"])
    firewall.set_network("rcga0123456789", ["-d 192.0.2.3/32 -j RETURN", "-j DROP"])
    rules = shown()
    own = [rule for rule in rules if rule.startswith("-A ROLLCAGE-rcga")]
    assert own == [f"-A ROLLCAGE-rcga0123456789 {rule}" for rule in ("-d 192.0.2.3/32 -j RETURN", "-j DROP")], own
    # Another program flushes a chain, and the engine makes its own anew: as it was after one call.
    subprocess.run(["iptables", "-F", firewall.FORWARD], check=True)
    subprocess.run(["iptables", "-F", "DOCKER-USER"], check=True)
    firewall.ensure()
    subprocess.run(["iptables", "-A", "DOCKER-USER", "-j", "RETURN"], check=True)
    assert sorted(shown()) == sorted(rules)
    link("del", "rcga0123456789")
    firewall.sweep()
    assert sorted(shown()) == sorted(rule for rule in rules if "rcga0123456789" not in rule)
    link("del", "rcgs0123456789")
    firewall.sweep()
    assert shown() == before, shown()
    firewall.sweep()
    print("well")
"""


def test_rules_are_there_once_and_gone_with_the_last_network(outside: Any, tmp_path: Path) -> None:
    """In a network namespace of its own, where nobody else changes rules. (`outside` has seen to `ip`.)"""
    script = tmp_path / "rules.py"
    script.write_text(RULES)
    inside = "mount -t sysfs sysfs /sys && exec " + f"{sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", inside], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "well\n", done.stderr


async def test_no_lease_is_given_where_rules_cannot_be_set(
    make_networks: Make, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = make_networks()
    monkeypatch.setattr(firewall, "REFUSED", ("10.0.0.0/8", "nonsense"))
    with pytest.raises(SandboxError, match="could not be set") as caught:
        await asyncio.wait_for(networks.lease("public"), 60)
    assert caught.value.error_class == "network_setup"
    assert engine.api.networks(filters={"label": f"rollcage.host={networks.host_id}"}) == []
