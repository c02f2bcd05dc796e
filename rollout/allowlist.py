"""What a task's `allowed_hosts` may hold, and what it means: Harbor's rules for the entries.

An entry is a name, a name with a leading `*.` (any name below it, at any depth, not itself), an IP address or a
CIDR. No URLs, ports or paths. Names are matched whatever their case, without a dot at their end.

No name ends in a number: programs take such a one for an address, in spellings (`127.1`, `0x7f000001`) that the rules
for addresses would not see. `localhost` is a sandbox itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

WILDCARD = "*."

_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""The last label of what is an address, or none: https://url.spec.whatwg.org/#ends-in-a-number-checker."""

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Allowlist:
    """Entries, read. `below`: names, each with a leading dot, below which every name is allowed."""

    names: frozenset[str]
    below: tuple[str, ...]
    networks: tuple[ipaddress.IPv4Network, ...]

    def allows(self, name: str) -> bool:
        """Whether a name may be looked up and what it stands for be reached."""
        name = name.lower().rstrip(".")
        return name in self.names or name.endswith(self.below)


def read_allowlist(entries: Iterable[str]) -> Allowlist:
    """Raises `ValueError` for an entry that `read_entry` refuses, or that is IPv6."""
    names, below, networks = set(), [], []
    for entry in map(read_entry, entries):
        if entry.startswith(WILDCARD):
            below.append(entry[1:])
        elif (network := _network(entry)) is None:
            names.add(entry)
        elif isinstance(network, ipaddress.IPv4Network):
            networks.append(network)
        else:
            raise ValueError(f'"{entry}" is IPv6, which sandboxes do not have')
    return Allowlist(frozenset(names), tuple(below), tuple(networks))


def read_entry(text: str) -> str:
    """An entry in its one form. Raises `ValueError` that says what is wrong with it."""
    entry = text.strip().lower().rstrip(".")
    if "/" in entry or ":" in entry:
        if _network(entry) is None:
            raise ValueError(
                f'"{text}" is no name, IP address or CIDR (no URL, port or path; no bits after a /)'
            )
        return entry
    name = entry.removeprefix(WILDCARD)
    if "*" in name:
        raise ValueError(f'"{text}" may have a star only as a leading "*."')
    if name != entry and _network(name) is not None:
        raise ValueError(f'"{text}" has a star before an IP address')
    if _network(entry) is None and (len(name) > 253 or not all(map(_LABEL.fullmatch, name.split(".")))):
        raise ValueError(f'"{text}" is no name of letters, digits, hyphens and dots, and no IP address')
    if _network(entry) is None:
        _check_name(text, name)
    return entry


def _check_name(text: str, name: str) -> None:
    """Raises `ValueError` for what is spelled like a name and is none."""
    last = name.rpartition(".")[2]
    if last == "localhost":
        raise ValueError(f'"{text}" is the sandbox itself, which needs no entry')
    if _NUMBER.fullmatch(last):
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(name))
        except OSError:
            raise ValueError(f'"{text}" ends in a number, and is no IP address') from None
        raise ValueError(f'"{text}" is another spelling of an IP address: write {address}')


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return None if "%" in entry else ipaddress.ip_network(entry, strict=True)
    except ValueError:
        return None
