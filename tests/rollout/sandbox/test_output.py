from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.sandbox.output import HeadTail, Scanner

KEY = b"0123456789abcdef0123456789abcdef"


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 64))
def test_the_head_and_the_tail_of_any_output_are_kept(pieces: list[bytes], limit: int) -> None:
    output = HeadTail(limit)
    for piece in pieces:
        output.add(piece)
    whole = b"".join(pieces)
    if len(whole) <= limit:
        assert output.bytes() == whole
        assert output.omitted == 0
    else:
        head, tail = (limit + 1) // 2, limit // 2
        assert output.omitted == len(whole) - limit
        assert output.bytes().startswith(whole[:head])
        assert output.bytes().endswith(whole[len(whole) - tail :])


def test_output_of_gigabytes_takes_no_more_memory_than_its_cap() -> None:
    output = HeadTail(1000)
    for _ in range(2000):
        output.add(b"x" * 100_000)
    assert output.omitted == 200_000_000 - 1000
    assert len(output._tail) < 1_000_000


@given(st.data())
def test_a_statement_is_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.sampled_from([b"", b"x", b"\n", KEY[:-1], b"\0\xff", KEY[:5]]), max_size=6))
    stream = b"".join(text + KEY + b" said %d\n" % at for at, text in enumerate(texts)) + b"rest"
    heard: list[bytes] = []
    scanner = Scanner(KEY, lambda _word, rest: heard.append(rest))
    at = 0
    while at < len(stream):
        step = data.draw(st.integers(1, 50))
        scanner.feed(stream[at : at + step])
        at += step
    scanner.flush()
    assert heard == [b"said %d" % at for at in range(len(texts))]
    assert scanner.sink.bytes() == b"".join(texts) + b"rest"


@pytest.mark.parametrize("noise", [KEY + b"x" * 500, KEY * 3, b"\n".join([KEY[:-1]] * 4)])
def test_a_word_without_a_statement_is_output(noise: bytes) -> None:
    scanner = Scanner(KEY, lambda _word, rest: pytest.fail(f"heard {rest!r}"))
    scanner.feed(noise)
    scanner.flush()
    assert scanner.sink.bytes() == noise
