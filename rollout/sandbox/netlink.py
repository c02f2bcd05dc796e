"""The few words of rtnetlink that seclusion needs: which port is a container's, and entries that nobody can move.

https://docs.kernel.org/userspace-api/netlink/intro.html, and rtnetlink(7). Everything here raises `OSError`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

RTM_GETLINK, RTM_NEWNEIGH = 18, 28
NLM_F_REQUEST, NLM_F_ACK, NLM_F_REPLACE, NLM_F_CREATE, NLM_F_DUMP = 0x1, 0x4, 0x100, 0x400, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
IFLA_ADDRESS, IFLA_LINK = 1, 5
NDA_DST, NDA_LLADDR = 1, 2
NUD_NOARP, NUD_PERMANENT = 0x40, 0x80
NTF_MASTER, NTF_STICKY = 0x04, 0x40
CLONE_NEWNET = 0x40000000

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_ATTRIBUTE = struct.Struct("=HH")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Link:
    """A network interface. `peer`: the index of the other end of a veth, in whatever namespace it is."""

    index: int
    peer: int | None
    address: bytes


def links_of(pid: int) -> list[Link]:
    """The interfaces in the network namespace of a process. To be called in a thread that ends with it: where the
    way back to its own namespace fails, the thread is of no use to anybody."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(theirs)
        finally:
            os.close(theirs)
        try:
            return _links()
        finally:
            _enter(own)
    finally:
        os.close(own)


def pin_neighbour(interface: str, address: str, link_address: bytes) -> None:
    """Have this machine know for good which link address an IPv4 address has on `interface`: ARP changes it not."""
    packed = ipaddress.IPv4Address(address).packed
    body = _NEIGHBOUR.pack(socket.AF_INET, socket.if_nametoindex(interface), NUD_PERMANENT, 0, 0)
    _ask(RTM_NEWNEIGH, body + _attribute(NDA_DST, packed) + _attribute(NDA_LLADDR, link_address))


def pin_port(port: str, link_address: bytes) -> None:
    """Have the bridge know for good that a link address is behind this port of it: frames from elsewhere that claim
    to be from it do not move it."""
    index = socket.if_nametoindex(port)
    body = _NEIGHBOUR.pack(socket.AF_BRIDGE, index, NUD_NOARP, NTF_MASTER | NTF_STICKY, 0)
    _ask(RTM_NEWNEIGH, body + _attribute(NDA_LLADDR, link_address))


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _links() -> list[Link]:
    found: list[Link] = []
    with _open() as netlink:
        netlink.send(
            _message(RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        )
        while True:
            for kind, body in _messages(netlink.recv(1 << 18)):
                if kind == NLMSG_DONE:
                    return found
                attributes = _attributes(body[_LINK.size :])
                peer = attributes.get(IFLA_LINK)
                found.append(
                    Link(
                        index=_LINK.unpack_from(body)[2],
                        peer=None if peer is None else int.from_bytes(peer, "little"),
                        address=attributes.get(IFLA_ADDRESS, b""),
                    )
                )


def _ask(kind: int, body: bytes) -> None:
    """Send a request that changes something and wait for the kernel's word."""
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
    with _open() as netlink:
        netlink.send(_message(kind, flags, body))
        _messages(netlink.recv(1 << 16))


def _open() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    netlink.bind((0, 0))
    return netlink


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body


def _messages(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while data:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        body = data[_HEADER.size : length]
        if kind == NLMSG_ERROR and (number := -int.from_bytes(body[:4], "little", signed=True)):
            raise OSError(number, os.strerror(number))
        found.append((kind, body))
        data = data[(length + 3) & ~3 :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
    return found
