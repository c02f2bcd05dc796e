"""As much of the DNS as answers an allowlist's sandboxes need: a query's one question, and answers of type A.

RFC 1035, section 4. Names are not compressed in questions, and are not followed where they are.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass

A, IN = 1, 1
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NAME_ERROR = 0, 1, 2, 3

_HEADER = struct.Struct(">HHHHHH")
_RESPONSE, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x0100, 0x0080
_OPCODE = 0x7800
_TO_QUESTION = 0xC000 | _HEADER.size
_MOST_ANSWERS = 24
"""So that an answer fits into 512 bytes."""


@dataclass(frozen=True)
class Query:
    """`name` without the last dot. `question` is the question's own bytes."""

    number: int
    recursion: bool
    name: str
    kind: int
    question: bytes


def read_query(packet: bytes) -> Query | None:
    """None where it is not a query with one readable question."""
    if len(packet) < _HEADER.size:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(packet)
    if flags & (_RESPONSE | _OPCODE) or questions != 1:
        return None
    labels, at = [], _HEADER.size
    while at < len(packet) and (length := packet[at]):
        if length > 63 or at + length >= len(packet):
            return None
        labels.append(packet[at + 1 : at + 1 + length])
        at += 1 + length
    if at + 5 > len(packet) or at - _HEADER.size > 254:
        return None
    kind, family = struct.unpack_from(">HH", packet, at + 1)
    if family != IN or any(b"." in label for label in labels):
        return None
    name = b".".join(labels).decode("ascii", "replace")
    return Query(number, bool(flags & _RECURSION_DESIRED), name, kind, packet[_HEADER.size : at + 5])


def answer(query: Query, code: int, addresses: Sequence[str] = (), ttl: int = 0) -> bytes:
    """The answer to a query: `code`, and records of type A (of many addresses, as many as fit)."""
    addresses = addresses[:_MOST_ANSWERS]
    flags = _RESPONSE | _RECURSION_AVAILABLE | (_RECURSION_DESIRED if query.recursion else 0) | code
    header = _HEADER.pack(query.number, flags, 1, len(addresses), 0, 0)
    records = (
        struct.pack(">HHHIH", _TO_QUESTION, A, IN, ttl, 4) + ipaddress.IPv4Address(address).packed
        for address in addresses
    )
    return header + query.question + b"".join(records)
