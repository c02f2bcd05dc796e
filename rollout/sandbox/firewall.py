"""The rules that keep sandboxes from everything but the internet: two chains for all networks of ours.

Interfaces of our bridges are named `rcg` and a letter for the kind of network (`KINDS`), so that rules which are
set once cover every bridge that will ever be made:

    DOCKER-USER  -i rcg+ ->  ROLLCAGE-FORWARD  ->  ROLLCAGE-NETWORKS  ->  one chain for each network that has
    INPUT        -i rcg+ ->  ROLLCAGE-INPUT                              its own: allowlists, `allow_private`

Refused are this machine's own addresses, private, link-local, loopback, multicast and reserved ranges, and our
other bridges. Open are the internet, and port 53 of exactly the resolvers that the engine asks for containers (shut
for allowlists, whose resolver is ours).
What may pass here is still decided by the engine's own rules after it. IPv6 is off on our bridges (`bridges.py`).

Invariants:

- Rules are set in one transaction, under a lock of this machine, and only where they are not there: several hosts
  may do it at once, and nothing is ever open or shut in between.
- Rules are made before any container is on a bridge, and removed only when no interface of ours is left.
- An allowlist's network whose own chain is missing reaches nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rollcage.rollout.outcome import Evidence, SandboxError

T = TypeVar("T")

INTERFACE = "rcg"
OPEN = "rco"
"""The same for bridges of a host that wants no rules (`insecure_network`): others' rules do not cover them."""

SHARED, ALLOWLIST, PRIVATE, INTERNAL = "s", "a", "p", "i"
"""Kinds of network, the fourth letter of an interface: shared by many sandboxes, shared by those of one allowlist,
one task's with internet, one task's without."""

FORWARD, INPUT, NETWORKS = "ROLLCAGE-FORWARD", "ROLLCAGE-INPUT", "ROLLCAGE-NETWORKS"
REFUSE = "ROLLCAGE-REFUSE"
"""Refuses so that a program is told at once: resets are not held back, as many an ICMP message of the kernel is."""

DOCKER_USER = "DOCKER-USER"

REFUSED = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
"""What is not the internet: https://www.iana.org/assignments/iana-ipv4-special-registry, but for the ranges of
documentation, in which nothing is."""

DNS_LIMIT = (
    "-m hashlimit --hashlimit-upto 100/sec --hashlimit-burst 500 --hashlimit-mode srcip "
    "--hashlimit-name rollcage-dns"
)
"""Packets of one sandbox to an allowlist's resolver, which is a part of this process."""

PROGRAMS = ("iptables", "iptables-nft", "iptables-legacy")
"""The one that shows the engine's chain is the one that the engine uses."""

WAIT_SEC = 30
"""How long iptables waits for others that change rules."""

LOCK = Path("/run/lock/rollcage-firewall")
INTERFACES = Path("/sys/class/net")
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
DAEMON_JSON = Path("/etc/docker/daemon.json")

REMEDY = (
    'run rollcage as root on the engine\'s own machine, with iptables; or run tasks with network_mode = "no-network"; '
    "or, if every task is trusted with whatever this machine can reach, set sandbox.network.insecure_network: true"
)


def problem() -> str | None:
    """Why rules cannot be set here, as far as can be told without the engine; None where they can."""
    if os.geteuid() != 0:
        return "this process is not root"
    if not any(map(shutil.which, PROGRAMS)):
        return "there is no iptables here"
    if program() is None:
        return (
            f"iptables shows no chain {DOCKER_USER}: the engine is on another machine or in another network "
            "namespace, or it sets no rules of iptables"
        )
    return None


def refusal(why: str) -> SandboxError:
    """The error, with the remedy, of sandboxes that could not be kept from this machine."""
    said = f"sandboxes with internet cannot be kept from this machine and its networks: {why}; {REMEDY}"
    return SandboxError("network_setup", said, Evidence(said, "rollcage"))


def program() -> str | None:
    """The iptables that the engine uses; None where none shows the engine's chain."""
    found = [name for name in PROGRAMS if shutil.which(name)]
    return next(
        (name for name in found if _run([name, "-w", str(WAIT_SEC), "-S", DOCKER_USER]) is not None), None
    )


def ensure() -> None:
    """Have the rules there. Raises `SandboxError` (`network_setup`) where they cannot be set."""
    with _locked():
        iptables = _program()
        have = _chains(iptables)
        rules = [*_REFUSE, *(f"-A {FORWARD} {rule}" for rule in _forward())]
        rules += [f"-A {INPUT} {rule}" for rule in _input()]
        mark = "rollcage-" + hashlib.sha256("\n".join(rules).encode()).hexdigest()[:16]
        wanted: list[str] = []
        if NETWORKS not in have:
            wanted += [f":{NETWORKS} - [0:0]"]
            wanted += [f"-A {NETWORKS} -i {INTERFACE}{ALLOWLIST}+ -j {REFUSE}"]
        if not all(mark in " ".join(have.get(chain, ())) for chain in (FORWARD, INPUT)):
            # Naming a chain that is there empties it, in the same transaction.
            wanted += [f":{chain} - [0:0]" for chain in (REFUSE, FORWARD, INPUT)]
            wanted += [f"-A {chain} -m comment --comment {mark}" for chain in (FORWARD, INPUT)] + rules
        for chain, target in ((DOCKER_USER, FORWARD), ("INPUT", INPUT)):
            if f"-A {chain} {_jump(target)}" not in have[chain]:
                wanted.append(f"-I {chain} 1 {_jump(target)}")
        if wanted:
            # Chains are named first, as iptables-restore wants them.
            wanted.sort(key=lambda line: not line.startswith(":"))
            _restore(iptables, wanted)


def set_network(interface: str, rules: Sequence[str]) -> None:
    """Give the network with this bridge a chain of its own, or another one in its place, in one transaction.
    A rule is what stands behind `-A CHAIN`; what passes all of them goes on to the rules for all networks.
    Raises `SandboxError` (`network_setup`)."""
    with _locked():
        iptables = _program()
        chain = _chain(interface)
        lines = [f":{chain} - [0:0]", *(f"-A {chain} {rule}" for rule in rules)]
        if f"-A {NETWORKS} {_goto(interface)}" not in _chains(iptables).get(NETWORKS, ()):
            lines.append(f"-I {NETWORKS} 1 {_goto(interface)}")
        _restore(iptables, lines)


def open_in_network(interface: str, rules: Sequence[str]) -> None:
    """Put rules at the head of a network's chain. Raises `SandboxError` (`network_setup`) where it has none."""
    with _locked():
        _restore(_program(), [f"-I {_chain(interface)} 1 {rule}" for rule in rules])


def sweep() -> None:
    """Remove the chains of networks that are gone, and every rule of ours when no network of ours is left on this
    machine. Does nothing where this process may not set rules. Raises `SandboxError` (`network_setup`)."""
    if os.geteuid() != 0:
        return
    with _locked():
        iptables = program() or shutil.which(PROGRAMS[0])
        if iptables is not None and NETWORKS in (have := _chains(iptables)):
            _sweep(iptables, have)


def interfaces() -> set[str]:
    """Bridges of ours on this machine."""
    return {path.name for path in INTERFACES.glob(f"{INTERFACE}[{SHARED}{ALLOWLIST}{PRIVATE}{INTERNAL}]*")}


def resolvers() -> list[str]:
    """The IPv4 resolvers to which the engine sends containers: those of this machine that are not on loopback (to
    them the engine goes itself), and its own setting."""
    found = []
    for path in RESOLV_CONF:
        if path.exists():
            words = [line.split() for line in path.read_text(errors="replace").splitlines()]
            found += [line[1] for line in words if len(line) > 1 and line[0] == "nameserver"]
    if DAEMON_JSON.exists():
        # An engine would not have started with one that cannot be read, so that it is not this engine's.
        with suppress(ValueError, AttributeError):
            found += json.loads(DAEMON_JSON.read_text()).get("dns") or []
    return sorted({address for address in found if _is_resolver(address)})


_REFUSE = [
    f"-A {REFUSE} -p tcp -j REJECT --reject-with tcp-reset",
    f"-A {REFUSE} -j REJECT --reject-with icmp-port-unreachable",
]
_ESTABLISHED = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"


def _forward() -> list[str]:
    return [
        _ESTABLISHED,
        # Within one bridge: the engine's rule for it decides, and the isolation of its ports.
        "-m physdev --physdev-is-bridged -j RETURN",
        f"-o {INTERFACE}+ -j {REFUSE}",
        f"-i {INTERFACE}{INTERNAL}+ -j {REFUSE}",
        # Whatever an allowlist opens: they resolve every name.
        *(
            rule
            for address in resolvers()
            for rule in _dns(f"-i {INTERFACE}{ALLOWLIST}+ -d {address}", REFUSE)
        ),
        f"-j {NETWORKS}",
        *(rule for address in resolvers() for rule in _dns(f"-d {address}", "RETURN")),
        *(f"-d {refused} -j {REFUSE}" for refused in REFUSED),
    ]


def _input() -> list[str]:
    own = f"-i {INTERFACE}{ALLOWLIST}+ -m addrtype --dst-type LOCAL --limit-iface-in"
    return [
        # An allowlist's resolver is ours, on the bridge itself (`egress.py`), and can be asked only so often.
        *_dns(f"{own} {DNS_LIMIT}", "ACCEPT"),
        *_dns(own, "DROP"),
        _ESTABLISHED,
        f"-i {INTERFACE}{ALLOWLIST}+ -j {REFUSE}",
        f"-i {INTERFACE}{INTERNAL}+ -j {REFUSE}",
        *(rule for address in resolvers() for rule in _dns(f"-d {address}", "ACCEPT")),
        f"-j {REFUSE}",
    ]


def _dns(match: str, verdict: str) -> list[str]:
    return [f"{match} -p {protocol} -m {protocol} --dport 53 -j {verdict}" for protocol in ("udp", "tcp")]


def _jump(target: str) -> str:
    return f"-i {INTERFACE}+ -j {target}"


def _goto(interface: str) -> str:
    # `-g`: what returns from the chain goes on after the jump to NETWORKS, not to the refusal at its end.
    return f"-i {interface} -g {_chain(interface)}"


def _chain(interface: str) -> str:
    return f"ROLLCAGE-{interface}"


def _is_resolver(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback


def _program() -> str:
    found = program()
    if found is None:
        raise refusal(problem() or "the engine's rules came and went")
    return found


def _chains(iptables: str) -> dict[str, list[str]]:
    """The chains of the filter table, with their rules as `-S` shows them."""
    shown = _run([iptables, "-w", str(WAIT_SEC), "-S"])
    chains: dict[str, list[str]] = {}
    for line in (shown or "").splitlines():
        rules = chains.setdefault(line.split()[1], [])
        if line.startswith("-A "):
            rules.append(line)
    return chains


def _sweep(iptables: str, have: dict[str, list[str]]) -> None:
    here = interfaces()
    own = [name for name in have if name.startswith(f"ROLLCAGE-{INTERFACE}")]
    gone = [name for name in own if name.removeprefix("ROLLCAGE-") not in here]
    if here:
        gotos = [f"-D {NETWORKS} {_goto(name.removeprefix('ROLLCAGE-'))}" for name in gone]
        present = set(have[NETWORKS])
        lines = [line for line in gotos if line.replace("-D", "-A", 1) in present]
    else:
        jumps = [(DOCKER_USER, FORWARD), ("INPUT", INPUT)]
        lines = [
            rule.replace("-A", "-D", 1)
            for chain, target in jumps
            for rule in have.get(chain, ())
            if rule.endswith(f"-j {target}")
        ]
        gone = [*gone, *(name for name in (FORWARD, INPUT, NETWORKS, REFUSE) if name in have)]
    if gone:
        chains = [f":{name} - [0:0]" for name in gone]
        _restore(iptables, [*chains, *lines, *(f"-X {name}" for name in gone)])


def _restore(iptables: str, lines: Sequence[str]) -> None:
    """Change the filter table in one transaction."""
    text = "\n".join(["*filter", *lines, "COMMIT", ""])
    command = [f"{iptables}-restore", "--noflush", "-w", str(WAIT_SEC)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise SandboxError("network_setup", f"the rules for sandboxes' networks could not be set: {said}")


def _run(command: Sequence[str]) -> str | None:
    """What a command that only reads prints; None where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


@contextmanager
def _locked() -> Iterator[None]:
    try:
        LOCK.parent.mkdir(parents=True, exist_ok=True)
        lock = LOCK.open("a")
    except OSError as error:
        raise refusal(f"the lock for rules cannot be taken: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
