"""Frames and the handshake: whatever comes in whatever pieces, and who is turned away."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from contrail_link.tcp import frames
from contrail_link.tcp.frames import FrameError, FrameReader, frame_head
from contrail_link.tcp.handshake import (
    MAGIC,
    NONCE_BYTES,
    ClientHandshake,
    Handshake,
    HandshakeError,
    ServerHandshake,
    derived_key,
)
from tests.support.each import each

BODY_MAX = 1_000
KEY = derived_key(b"the secret of this cluster", "test")
OTHER_KEY = derived_key(b"the secret of another one", "test")

u32 = st.integers(0, frames.VALUE_MAX)
kinds = st.integers(frames.REQUEST, frames.PULSE)
written_frames = st.lists(
    st.tuples(kinds, st.integers(0, 255), u32, u32, st.binary(max_size=BODY_MAX)), max_size=8
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(at)]


# Frames ------------------------------------------------------------------------------------------
@given(written_frames, st.lists(st.integers(0, 9_000), max_size=20))
def test_frames_are_found_again_however_they_were_cut(
    written: list[tuple[int, int, int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(frame_head(*head, len(body)) + body for *head, body in written)
    reader = FrameReader(BODY_MAX)
    found = [frame for piece in pieces(data, cuts) for frame in reader.feed(piece)]
    assert [(*astuple(frame)[:4], bytes(frame.body)) for frame in found] == written


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_garbage_is_refused_or_not_complete(garbage: list[bytes]) -> None:
    reader = FrameReader(BODY_MAX)
    try:
        for piece in garbage:
            for frame in reader.feed(piece):
                assert len(frame.body) <= BODY_MAX
    except FrameError:
        pass


@given(st.binary(min_size=1, max_size=BODY_MAX), st.data())
def test_frame_without_its_end_is_not_given_out(body: bytes, data: st.DataObject) -> None:
    whole = frame_head(frames.RESULT, 0, 1, 0, len(body)) + body
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert FrameReader(BODY_MAX).feed(whole[:cut]) == []


def test_oversized_frame_is_refused_at_its_head() -> None:
    with pytest.raises(FrameError):
        FrameReader(BODY_MAX).feed(frame_head(frames.REQUEST, 1, 1, 0, BODY_MAX + 1))


@each("kind", [0, frames.CONTEXT + 1, 255])
def test_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(FrameError):
        FrameReader(BODY_MAX).feed(frame_head(kind, 1, 1, 0, 0))


# Handshake ---------------------------------------------------------------------------------------
def nonce(filling: int) -> bytes:
    return bytes([filling]) * NONCE_BYTES


def ends(server_key: bytes = KEY, client_key: bytes = KEY) -> tuple[ServerHandshake, Handshake]:
    return ServerHandshake([server_key], nonce(1)), ClientHandshake(client_key, nonce(2))


def proof_of(client: Handshake, server: ServerHandshake) -> bytes:
    return client.feed(server.hello)


@given(st.lists(st.integers(0, 80), max_size=10), st.binary(max_size=30))
def test_ends_with_one_secret_find_each_other_in_any_pieces(cuts: list[int], rest: bytes) -> None:
    server, client = ends()
    proof = b"".join(client.feed(piece) for piece in pieces(server.hello, cuts))
    answer, later = b"", b""
    for piece in pieces(proof + rest, cuts):
        if server.done:
            later += piece
        else:
            answer += server.feed(piece)
    assert server.rest + later == rest
    for piece in pieces(answer, cuts):
        assert client.feed(piece) == b""
    assert client.done


def test_each_secret_of_the_server_is_accepted_and_proved() -> None:
    for key in (KEY, OTHER_KEY):
        server, client = ServerHandshake([KEY, OTHER_KEY], nonce(1)), ClientHandshake(key, nonce(2))
        client.feed(server.feed(proof_of(client, server)))
        assert client.done


def test_what_follows_the_proof_is_kept() -> None:
    server, client = ends()
    server.feed(proof_of(client, server) + b"a frame")
    assert server.rest == b"a frame"


def test_client_with_another_secret_is_turned_away_without_a_proof_in_return() -> None:
    server, client = ends(client_key=OTHER_KEY)
    with pytest.raises(HandshakeError):
        server.feed(proof_of(client, server))
    assert not server.done


def test_server_with_another_secret_is_found_out() -> None:
    server, client = ends()
    proof_of(client, server)
    with pytest.raises(HandshakeError):
        client.feed(bytes(32))


def test_overheard_proof_is_worth_nothing_on_the_next_connection() -> None:
    server, client = ends()
    overheard = proof_of(client, server)
    server.feed(overheard)
    with pytest.raises(HandshakeError):
        ServerHandshake([KEY], nonce(3)).feed(overheard)


def test_clients_own_proof_sent_back_is_no_proof() -> None:
    server, client = ends()
    proof = proof_of(client, server)[-32:]
    with pytest.raises(HandshakeError):
        client.feed(proof)


@given(st.binary(min_size=1, max_size=200).filter(lambda data: not MAGIC.startswith(data[:8])))
def test_stranger_is_turned_away_at_its_first_wrong_byte(data: bytes) -> None:
    server = ServerHandshake([KEY], nonce(1))
    with pytest.raises(HandshakeError):
        server.feed(data)


@given(st.binary(min_size=64, max_size=200))
def test_guessed_proof_is_turned_away(data: bytes) -> None:
    server = ServerHandshake([KEY], nonce(1))
    with pytest.raises(HandshakeError):
        server.feed(MAGIC + data)


def test_uses_of_a_secret_have_keys_of_their_own() -> None:
    keys = {derived_key(b"secret", label) for label in ("link", "ack tokens")}
    assert len(keys | {b"secret"}) == 3
