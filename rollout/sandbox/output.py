"""Reading what a sandbox prints: bounded in memory, and with the ends of commands found in any bytes.

An attached stream of the engine carries stdout and stderr in frames of an 8-byte header (the stream's number,
three zeros, the length as a big-endian 32-bit integer) and a payload:
https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollcage.rollout.sandbox.base import OUTPUT_BYTES

READ_BYTES = 1 << 18
WORD_BYTES = 32
"""A word is 128 random bits in hexadecimal: no output holds it by chance."""
LINE_BYTES = 120
"""A statement is a word, then at most this much up to the end of the line."""
STDOUT, STDERR = 1, 2


class HeadTail:
    """Keeps the first and the last `limit / 2` bytes of what it is given, in memory of that order."""

    def __init__(self, limit: int = OUTPUT_BYTES) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes | bytearray) -> None:
        """Take more output."""
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + READ_BYTES:
            self._trim()

    def resized(self, limit: int) -> HeadTail:
        """The same output under another limit."""
        other = HeadTail(limit)
        other.add(self._head)
        self._trim()
        other.add(self._tail)
        other._total = self._total
        return other

    @property
    def omitted(self) -> int:
        """Bytes that were left out between head and tail."""
        return self._total - len(self._head) - min(len(self._tail), self._tail_limit)

    def bytes(self) -> bytes:
        """What was kept; a line of its own says where something was left out."""
        self._trim()
        if not self.omitted:
            return bytes(self._head + self._tail)
        return b"%b\n[... %d bytes left out ...]\n%b" % (bytes(self._head), self.omitted, bytes(self._tail))

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]


class Scanner:
    """Tells output from statements in one stream. A statement is a line behind one of `words`.

    Output goes to `sink`, which may be replaced at any time; each statement to `heard(word, rest)`, in order.
    """

    def __init__(self, key: bytes, heard: Callable[[bytes, bytes], None]) -> None:
        self.words = [key]
        self.sink = HeadTail()
        self._heard = heard
        self._held = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, wherever they were cut."""
        data = self._held + data
        self._held = b""
        start = 0
        while True:
            found = [(at, word) for word in self.words if (at := data.find(word, start)) >= 0]
            if not found:
                keep = max(start, len(data) - WORD_BYTES + 1)
                self.sink.add(data[start:keep])
                self._held = data[keep:]
                return
            at, word = min(found)
            text = at + WORD_BYTES
            end = data.find(b"\n", text, text + LINE_BYTES)
            if end < 0 and len(data) < text + LINE_BYTES:
                self.sink.add(data[start:at])
                self._held = data[at:]
                return
            if end < 0:
                self.sink.add(data[start:text])
                start = text
                continue
            self.sink.add(data[start:at])
            self._heard(word, data[text:end].strip())
            start = end + 1

    def flush(self) -> None:
        """The stream is at its end: what was held back is output."""
        self.sink.add(self._held)
        self._held = b""


async def demultiplex(reader: asyncio.StreamReader, feed: Callable[[int, bytes], None]) -> None:
    """Hand each payload, in pieces as they come, to `feed(stream number, bytes)` until the stream ends."""
    pending = b""
    left = 0
    stream = STDOUT
    try:
        while data := await reader.read(READ_BYTES):
            data = pending + data
            at = 0
            while at < len(data):
                if left == 0:
                    if len(data) - at < 8:
                        break
                    stream, left = data[at], int.from_bytes(data[at + 4 : at + 8])
                    at += 8
                payload = data[at : at + left]
                feed(stream, payload)
                at += len(payload)
                left -= len(payload)
            pending = data[at:]
    except ConnectionError:
        return
