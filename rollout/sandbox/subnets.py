"""Which addresses our networks take: free subnets of an operator's range, or of ranges that nobody else uses.

A range has two parts. The lower holds the bridges that many sandboxes share, the upper the small networks of one
task or one allowlist, so that neither can take the other's last place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DEFAULT_RANGES = ("10.199.0.0/16", "10.211.0.0/16", "172.16.0.0/16")
"""Searched in order for free subnets where the operator names no range. Docker's own pools lie elsewhere."""

BRIDGE_PREFIX = 22
"""A /22 has addresses for the 1,023 ports of one bridge."""

SMALL_PREFIX = 28
"""A small network: addresses for `SMALL_PLACES` containers."""

SMALL_PLACES = (1 << (32 - SMALL_PREFIX)) - 3

WIDE_PREFIX = 20
"""A range of at least this size gives a quarter of itself to small networks, a narrower one half."""

LEAST_RANGE_PREFIX = SMALL_PREFIX - 2

ROUTES = Path("/proc/net/route")


class Ranges:
    """Where subnets are looked for. `cidr`: the operator's own range, at least a /26."""

    def __init__(self, cidr: str | None = None) -> None:
        ranges = [ipaddress.IPv4Network(text) for text in ((cidr,) if cidr else DEFAULT_RANGES)]
        self.shared: list[ipaddress.IPv4Network] = []
        self.small: list[ipaddress.IPv4Network] = []
        for whole in ranges:
            parts = list(whole.subnets(prefixlen_diff=2 if whole.prefixlen <= WIDE_PREFIX else 1))
            self.shared += parts[:-1]
            self.small.append(parts[-1])

    def free_for_bridge(self, used: Iterable[ipaddress.IPv4Network]) -> Iterator[ipaddress.IPv4Network]:
        """Free subnets for shared bridges, in order; smaller ones than a /22 where the range is."""
        return _free(self.shared, BRIDGE_PREFIX, used)

    def free_for_small(self, used: Iterable[ipaddress.IPv4Network]) -> Iterator[ipaddress.IPv4Network]:
        """Free subnets for small networks, in order."""
        return _free(self.small, SMALL_PREFIX, used)


def _free(
    ranges: Iterable[ipaddress.IPv4Network], prefix: int, used: Iterable[ipaddress.IPv4Network]
) -> Iterator[ipaddress.IPv4Network]:
    taken = list(used)
    for network in ranges:
        near = [other for other in taken if other.overlaps(network)]
        for subnet in network.subnets(new_prefix=max(prefix, network.prefixlen)):
            if not any(subnet.overlaps(other) for other in near):
                yield subnet


def subnets(networks: Iterable[dict[str, Any]]) -> Iterator[ipaddress.IPv4Network]:
    """The IPv4 subnets of networks as the engine lists them."""
    for network in networks:
        for config in (network.get("IPAM") or {}).get("Config") or []:
            if (text := config.get("Subnet", "")) and ":" not in text:
                yield ipaddress.IPv4Network(text, strict=False)


def routes() -> Iterator[ipaddress.IPv4Network]:
    """Where this machine's own routes lead, but for the default one; none where there is no Linux to ask.
    Addresses are little-endian hexadecimal: https://docs.kernel.org/filesystems/proc.html"""
    if not ROUTES.exists():
        return
    for line in ROUTES.read_text().splitlines()[1:]:
        target, mask = (int.from_bytes(bytes.fromhex(line.split()[at]), "little") for at in (1, 7))
        if mask:
            yield ipaddress.IPv4Network((target, bin(mask).count("1")), strict=False)
