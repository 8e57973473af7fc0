"""Frames and the handshake: any pieces, any bytes, and proofs that fit one connection only."""

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_replicator.peers.frames import (
    BODY_BYTES_MAX,
    HEAD_BYTES,
    Channel,
    FrameCutter,
    FrameError,
    frame,
)
from contrail_replicator.peers.handshake import (
    MAGIC,
    NODE_NAME_BYTES_MAX,
    PLAIN,
    UNPROVEN_BYTES_MAX,
    DiallerHandshake,
    HandshakeError,
    Hello,
    ListenerHandshake,
    RefusedError,
    common_protocol,
    decode_hello,
    refusal,
)

BODY_MAX = 500
KEY, OTHER_KEY, THIRD_KEY = (bytes([number]) * 32 for number in range(3))
DIALLER = Hello("a", "b", Channel.APPEND, b"c" * 16, 3, 4, 5, 6)
LISTENER = Hello("b", "a", Channel.APPEND, b"c" * 16, 7, 8, 9, 10)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(at)]


def cut(*data: bytes, body_max: int = BODY_MAX) -> list[tuple[int, int, bytes]]:
    cutter = FrameCutter(body_max)
    return [(one.kind, one.group, bytes(one.body)) for piece in data for one in cutter.feed(piece)]


# Frames ------------------------------------------------------------------------------------------
@given(
    st.lists(
        st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=BODY_MAX)),
        max_size=8,
    ),
    st.lists(st.integers(0, 4_000), max_size=20),
)
def test_frames_are_found_again_however_they_were_cut(
    written: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(
        b"".join(frame(kind, group, [body[:7], body[7:]])) for kind, group, body in written
    )
    assert cut(*pieces(data, cuts)) == written


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=9))
def test_any_bytes_are_frames_or_one_kind_of_error(data: bytes, cuts: list[int]) -> None:
    with suppress(FrameError):
        cut(*pieces(data, cuts))


@given(st.integers(0, 8 * (HEAD_BYTES + 20) - 1))
def test_a_flipped_bit_is_noticed(bit: int) -> None:
    data = bytearray(b"".join(frame(1, 2, [b"x" * 20])))
    data[bit // 8] ^= 1 << bit % 8
    with suppress(FrameError):
        assert cut(bytes(data)) == []  # a longer body, of which the end is missing


def test_bytes_of_a_frame() -> None:
    assert b"".join(frame(3, 0x01020304, [b"ab", b"c"])).hex(" ") == (
        "03 00 00 00 03 00 00 00 04 03 02 01 87 5a f7 2d 61 62 63"
    )


def test_a_body_of_the_largest_size_and_one_byte_more() -> None:
    for limit in BODY_BYTES_MAX.values():
        whole = b"".join(frame(1, 1, [bytes(limit)]))
        assert cut(whole, body_max=limit) == [(1, 1, bytes(limit))]
        longer = frame(1, 1, [bytes(limit + 1)])[0]
        with pytest.raises(FrameError, match=f"with {limit + 1} bytes; at most {limit}"):
            cut(bytes(longer), body_max=limit)


# Handshake ---------------------------------------------------------------------------------------
def welcome(_: Hello) -> Hello:
    return LISTENER


def ends(
    dialler_keys: tuple[bytes, ...] = (KEY,),
    listener_keys: tuple[bytes, ...] = (KEY,),
    nonces: tuple[bytes, bytes] = (b"d" * 32, b"l" * 32),
    hello: Hello = DIALLER,
) -> tuple[DiallerHandshake, ListenerHandshake]:
    return (
        DiallerHandshake(dialler_keys, nonces[0], PLAIN, hello),
        ListenerHandshake(listener_keys, nonces[1], PLAIN, welcome),
    )


def shake(dialler: DiallerHandshake, listener: ListenerHandshake) -> None:
    dialler.feed(listener.feed(dialler.feed(listener.first)))


@given(st.lists(st.integers(0, 300), max_size=20))
def test_both_ends_know_each_other_however_the_bytes_come(cuts: list[int]) -> None:
    dialler, listener = ends()
    said = b"".join(map(dialler.feed, pieces(listener.first, cuts)))
    answer = b"".join(map(listener.feed, pieces(said, cuts)))
    assert listener.peer == DIALLER
    assert [dialler.feed(piece) for piece in pieces(answer + b"rest", cuts)]
    assert dialler.peer == LISTENER
    assert dialler.rest == b"rest"


@pytest.mark.parametrize(
    ("dialler_keys", "listener_keys", "agree"),
    [
        ((KEY,), (OTHER_KEY,), False),
        ((KEY, OTHER_KEY), (THIRD_KEY,), False),
        ((KEY, OTHER_KEY), (OTHER_KEY,), True),
        ((KEY,), (OTHER_KEY, KEY), True),
        ((OTHER_KEY, KEY), (KEY, THIRD_KEY), True),
    ],
)
def test_one_common_secret_is_enough(
    dialler_keys: tuple[bytes, ...], listener_keys: tuple[bytes, ...], agree: bool
) -> None:
    dialler, listener = ends(dialler_keys, listener_keys)
    if agree:
        shake(dialler, listener)
        assert dialler.peer == LISTENER
    else:
        with pytest.raises(HandshakeError, match="different cluster secret"):
            shake(dialler, listener)
        assert listener.peer is None


def test_an_overheard_proof_fits_no_other_connection() -> None:
    dialler, listener = ends()
    said = dialler.feed(listener.first)
    answer = listener.feed(said)
    _, again = ends(nonces=(b"d" * 32, b"m" * 32))
    with pytest.raises(HandshakeError, match="different cluster secret"):
        again.feed(said)
    later, _ = ends(nonces=(b"e" * 32, b"l" * 32))
    later.feed(listener.first)
    with pytest.raises(HandshakeError, match="different cluster secret"):
        later.feed(answer)


def test_a_dialler_is_not_satisfied_with_its_own_proof() -> None:
    dialler, listener = ends()
    said = dialler.feed(listener.first)
    encoded = DIALLER.encoded()
    with pytest.raises(HandshakeError):
        dialler.feed(bytes([0, len(encoded)]) + encoded + said[-32:])


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_end_in_one_kind_of_error(data: bytes, with_magic: bool) -> None:
    data = MAGIC * with_magic + data
    dialler, listener = ends()
    with suppress(HandshakeError):
        listener.feed(data)
    assert listener.peer is None
    with suppress(HandshakeError):
        dialler.feed(data)
    with suppress(HandshakeError):
        dialler.feed(data)
    assert dialler.peer is None


@given(st.binary(max_size=150))
def test_any_bytes_are_a_hello_or_refused(data: bytes) -> None:
    with suppress(HandshakeError):
        assert decode_hello(data).encoded() == data


def test_the_largest_hello_with_two_proofs_is_read_before_the_proof() -> None:
    longest = "n" * NODE_NAME_BYTES_MAX
    hello = Hello(longest, longest, Channel.CONTROL, b"c" * 16, 1, 1, 1)
    dialler, listener = ends((KEY, OTHER_KEY), (OTHER_KEY,), hello=hello)
    said = dialler.feed(listener.first)
    assert len(said) <= UNPROVEN_BYTES_MAX
    listener.feed(said)
    assert listener.peer == hello


def test_another_node_than_the_dialled_one_is_left() -> None:
    dialler, listener = ends(hello=Hello("a", "c", Channel.APPEND, b"c" * 16, 3, 4, 5, 6))
    with pytest.raises(HandshakeError, match="it is b, not c"):
        shake(dialler, listener)


def test_a_refusal_is_read_as_one_line_of_text() -> None:
    dialler, listener = ends()
    dialler.feed(listener.first)
    with pytest.raises(RefusedError, match=r"^n2 is not welcome here\?$"):
        dialler.feed(refusal("n2 is not\r\n\x1b welcome here\N{SNOWMAN}"))


def test_protocols_without_a_common_version_are_refused_in_a_sentence() -> None:
    def speaking(low: int, high: int) -> Hello:
        return Hello("b", "a", Channel.CONTROL, b"c" * 16, 1, 1, 1, 0, 0, low, high)

    assert common_protocol(speaking(1, 3), speaking(2, 5)) == 3
    with pytest.raises(HandshakeError, match="b is of another release: it speaks"):
        common_protocol(speaking(1, 3), speaking(4, 5))
